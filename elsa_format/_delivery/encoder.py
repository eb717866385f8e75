"""Tensors as they are stored, once, to the parts of a delivery file (delivery-1.0 §4)."""

import tempfile
from array import array
from collections import deque
from collections.abc import Iterator
from typing import IO, Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from elsa_format._container import LENGTH_BYTES, Header, TensorInfo
from elsa_format._delivery.codec import Bytes, encode_nested, encode_plain
from elsa_format._delivery.parts import CHECKSUM, SIZE, BlockPlan, Place, Sequence, index_bytes
from elsa_format._memory import BLOCK, aligned, give_block, take_block
from elsa_format._profile import Profile
from elsa_format._storage import Closing
from elsa_format._threads import Task, start

COPIED = 1 << 20
"""Bytes copied at a time."""


class DeliveryEncoder(Closing):
    """Codes the tensors of a file block by block; payloads wait on disk until all are there."""

    def __init__(self, header: Header, profile: Profile, block: int, jobs: int) -> None:
        self.head = len(header.raw).to_bytes(LENGTH_BYTES, "little") + header.raw
        """The source's first bytes."""
        self.levels = len(profile.levels)
        self._bits, self._jobs = profile.bits, jobs
        self._plan = BlockPlan(header, profile, block)
        self._begun: dict[int, _Begun] = {}
        self._under_way: deque[_Coding] = deque()
        self._spool = _Spool(xxhash.xxh3_64_intdigest(self.head))

    def take(self, info: TensorInfo, data: Bytes) -> None:
        """Take the next bytes of a tensor; tensors come in the order in which they are stored."""
        place = self._plan.places[info.name]
        begun = self._begun.setdefault(id(place.sequence), _Begun(place.sequence))
        while data.size:
            data = data[begun.take(data) :]
            if begun.full:
                self._code(_Coding(place, *begun.words(), self._bits, self.levels))

    def _code(self, coding: "_Coding") -> None:
        if self._jobs == 1:
            coding()
            self._keep(coding)
            return
        coding.task = start(coding)
        self._under_way.append(coding)
        while len(self._under_way) > self._jobs:
            self._keep(self._under_way.popleft())

    def _keep(self, coding: "_Coding") -> None:
        if coding.task is not None:
            coding.task.wait()
        for part, payload in enumerate(coding.payloads, coding.place.part or 1):
            self._spool.add(part, coding.place.sequence, payload)

    def finish(self) -> None:
        """Put away what is under way; everything was taken."""
        while self._under_way:
            self._keep(self._under_way.popleft())

    def size(self, part: int) -> int:
        """Bytes of a part."""
        sizes = self._sizes(part)
        checksums = CHECKSUM * int(np.count_nonzero(sizes))
        return SIZE * sizes.size + checksums + int(sizes.sum(dtype=np.int64))

    def _sizes(self, part: int) -> NDArray[np.uint32]:
        found = [self._spool.sizes(part, sequence) for sequence in self._plan.of_part(part)]
        return np.concatenate([np.empty(0, np.uint32), *(np.array(s, np.uint32) for s in found)])

    def read(self, part: int) -> Iterator[Any]:
        """A part in pieces: the index, then the payloads (ELSA-D-015)."""
        yield index_bytes(self._sizes(part)).tobytes()
        for sequence in self._plan.of_part(part):
            yield from self._spool.read(part, sequence)

    def close(self) -> None:
        """Forget the payloads."""
        self._spool.close()


class _Begun:
    """A sequence, and the block of it that is being filled."""

    def __init__(self, sequence: Sequence) -> None:
        self._sequence, self._number, self._filled = sequence, 0, 0
        self._block = self._memory = np.empty(0, np.uint8)

    def take(self, data: Bytes) -> int:
        """Copy what there is room for; how many bytes that is."""
        if not self._block.size:
            size = self._sequence.size(self._number) * self._sequence.words.itemsize
            # Of small ones, the last of their sequences, there may be many at a time.
            self._memory = take_block(size) if size > BLOCK // 4 else aligned(size)
            self._block = self._memory[:size]
        taken = min(data.size, self._block.size - self._filled)
        self._block[self._filled : self._filled + taken] = data[:taken]
        self._filled += taken
        return taken

    @property
    def full(self) -> bool:
        """Whether the block is complete."""
        return self._filled == self._block.size

    def words(self) -> tuple[Any, Bytes]:
        """The words of the block and their memory, which are another's from now on."""
        words = self._block.view(self._sequence.words)
        self._block, self._number, self._filled = np.empty(0, np.uint8), self._number + 1, 0
        return words, self._memory


class _Coding:
    """A block that is coded, perhaps in another thread."""

    task: Task | None = None
    payloads: list[Bytes]

    def __init__(self, place: Place, words: Any, memory: Bytes, bits: int, levels: int) -> None:
        self.place = place
        self._words, self._memory, self._bits, self._levels = words, memory, bits, levels

    def __call__(self) -> None:
        dtype = self.place.sequence.dtype
        if self.place.part:
            self.payloads = [encode_plain(self._words, dtype)]
        else:
            self.payloads = encode_nested(self._words, dtype, self._bits, self._levels)
        give_block(self._memory)
        del self._words, self._memory


class _Spool:
    """Payloads in the order in which they are coded, on disk, and where each of them is."""

    def __init__(self, seed: int) -> None:
        self._file: IO[bytes] = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - see close
        self._seed, self._end = seed, 0
        self._places: dict[tuple[int, int], tuple[array[int], array[int]]] = {}

    def _of(self, part: int, sequence: Sequence) -> tuple["array[int]", "array[int]"]:
        return self._places.setdefault((part, id(sequence)), (array("Q"), array("I")))

    def add(self, part: int, sequence: Sequence, payload: Bytes) -> None:
        """Put the next payload of a sequence away, with its checksum unless it is empty."""
        positions, sizes = self._of(part, sequence)
        positions.append(self._end)
        sizes.append(payload.size)
        if payload.size:
            checksum = xxhash.xxh3_64_intdigest(payload.data, seed=self._seed)
            self._write(checksum.to_bytes(CHECKSUM, "little"))
            self._write(payload)

    def _write(self, data: Any) -> None:
        view = memoryview(data)
        self._end += view.nbytes
        while view:
            view = view[self._file.write(view) :]

    def sizes(self, part: int, sequence: Sequence) -> "array[int]":
        """Bytes of the payloads that a part has of a sequence."""
        return self._of(part, sequence)[1]

    def read(self, part: int, sequence: Sequence) -> Iterator[bytes]:
        """These payloads, with their checksums."""
        for position, size in zip(*self._of(part, sequence), strict=True):
            self._file.seek(position)
            left = CHECKSUM + size if size else 0
            while left:
                data = self._file.read(min(left, COPIED))
                yield data
                left -= len(data)

    def close(self) -> None:
        """Forget them."""
        self._file.close()
