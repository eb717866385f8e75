"""The parts of a delivery file: which words are in which block (delivery-1.0 §4.2), and payloads.

Of a part, its index is checked as a whole, and each payload with its checksum.
"""

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as ListOf
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from elsa_format._container import Header, TensorInfo
from elsa_format._container.dtypes import Dtype
from elsa_format._errors import ChecksumMismatch, InvalidDelivery, Truncated
from elsa_format._profile import Profile
from elsa_format._storage import PositionedStorage

BATCH = 1 << 17
"""Words that are decoded together, if blocks are smaller: those of a block as Writers have it."""
SIZE = 3
"""Bytes of a size in the index."""
CHECKSUM = 8
"""Bytes of the checksum before a payload that is not empty."""
TOGETHER = 1 << 16
"""Bytes of small payloads that are read at a time."""
PIECE = 1024
"""Sizes of an index that are read at a time: it may be larger than the memory that one has."""


@dataclass(frozen=True)
class Sequence:
    """The words of tensors of one dtype, one tensor after the other (ELSA-D-016)."""

    dtype: Dtype
    tensors: tuple[TensorInfo, ...]
    block: int
    """Words in a block."""
    words: "np.dtype[Any]" = field(init=False, repr=False)
    """Of elements of fewer than 8 bits the bytes are the words."""
    starts: tuple[int, ...] = field(init=False, repr=False)
    """The first word of each tensor, and one past the last of all."""

    def __post_init__(self) -> None:
        words = np.dtype(f"<u{max(self.dtype.size, 8) // 8}")
        sizes = (info.nbytes // words.itemsize for info in self.tensors)
        object.__setattr__(self, "words", words)
        object.__setattr__(self, "starts", tuple(accumulate(sizes, initial=0)))

    @property
    def length(self) -> int:
        """Words in all."""
        return self.starts[-1]

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return -(-self.length // self.block)

    def size(self, number: int) -> int:
        """Words of a block (ELSA-D-017)."""
        return min(self.block, self.length - number * self.block)

    @property
    def batch(self) -> int:
        """Words of a batch, the blocks that are decoded together: as many as each costs time."""
        return max(self.block, BATCH)

    @property
    def batches(self) -> int:
        """Number of batches."""
        return -(-self.length // self.batch)

    def blocks_of(self, batch: int) -> range:
        """The numbers of the blocks of a batch."""
        many = self.batch // self.block
        return range(batch * many, min((batch + 1) * many, self.blocks))

    def batch_size(self, batch: int) -> int:
        """Words of a batch."""
        return min(self.batch, self.length - batch * self.batch)

    def limit(self, number: int) -> int:
        """The most bytes that a payload of a block may have (ELSA-D-018)."""
        n = self.size(number)
        return n * self.words.itemsize + -(-n // 8) + 1024

    def pieces(self, number: int) -> Iterator[tuple[TensorInfo, int, int]]:
        """What a block has of tensors: the tensor, the first byte in it, and the bytes."""
        at, stop = number * self.block, number * self.block + self.size(number)
        which = bisect_right(self.starts, at) - 1
        while at < stop:
            info, begin, end = self.tensors[which], self.starts[which], self.starts[which + 1]
            size = min(end, stop) - at
            yield info, (at - begin) * self.words.itemsize, size * self.words.itemsize
            at, which = at + size, which + 1


def _sequences(tensors: Iterable[TensorInfo], block: int) -> list[Sequence]:
    """The sequences of tensors in the order of their data."""
    found: dict[str, list[TensorInfo]] = {}
    for info in tensors:
        if info.nbytes:
            found.setdefault(info.dtype.name, []).append(info)
    return [Sequence(infos[0].dtype, tuple(infos), 1 << block) for infos in found.values()]


@dataclass(frozen=True)
class Place:
    """Where a tensor is."""

    part: int
    """The part that has it: 1…T, T + 1 for the dense part; 0 if it is nested, and in all."""
    sequence: Sequence
    start: int
    """Its first word."""


class BlockPlan:
    """The sequences of a network's delivery file."""

    def __init__(self, header: Header, profile: Profile, block: int) -> None:
        levels, tensors = len(profile.levels), header.tensors
        parts: list[list[TensorInfo]] = [[] for _ in range(levels + 2)]
        for name, info in tensors.items():
            if name in profile.nested:
                parts[0].append(info)
            elif name in profile.varying:
                parts[levels + 1].append(info)
            else:
                parts[profile.variants.get(name, ("", 1))[1]].append(info)
        self.levels = levels
        self.nested, *self.plain = (_sequences(infos, block) for infos in parts)
        """Sequences that every part has; those of parts 1…T and the dense part alone."""
        self.places: dict[str, Place] = {}
        for part, sequences in enumerate([self.nested, *self.plain]):
            for sequence in sequences:
                for info, start in zip(sequence.tensors, sequence.starts, strict=False):
                    self.places[info.name] = Place(part, sequence, start)

    def of_part(self, part: int) -> list[Sequence]:
        """The sequences of a part, in order."""
        return [*self.plain[part - 1], *self.nested]


# --- Payloads ------------------------------------------------------------------------------------


def index_bytes(sizes: "NDArray[np.uint32]") -> "NDArray[np.uint8]":
    """Sizes as an index has them (ELSA-D-015)."""
    return np.ascontiguousarray(sizes.astype("<u4").view(np.uint8).reshape(-1, 4)[:, :SIZE])


def read_at(storage: PositionedStorage, start: int, view: memoryview) -> None:
    """Fill a buffer from a position."""
    while view:
        count = storage.read_at(start, view)
        if not count:
            raise Truncated(f"{storage.name}: ends {len(view)} bytes early")
        view, start = view[count:], start + count


class Payloads:
    """The payloads of a part that is there (ELSA-D-015)."""

    def __init__(
        self,
        storage: PositionedStorage,
        start: int,
        stop: int,
        sequences: ListOf[Sequence],
        seed: int,
    ) -> None:
        self.storage, self.start, self.seed = storage, start, seed
        self._sequences = list(sequences)
        self._firsts = list(accumulate((s.blocks for s in sequences), initial=0))
        self._first_of = {id(s): first for s, first in zip(sequences, self._firsts, strict=False)}
        self.count = self._firsts[-1]
        # Before anything is made for each block: a header may declare far more than there is.
        if self.count * SIZE > stop - start:
            raise InvalidDelivery(
                f"{storage.name}: an index of {self.count} blocks in a part of {stop - start} bytes"
            )
        self._cached = -1, np.empty(0, np.int64)  # one attribute, as several threads read it
        self._positions = array("Q", [start + self.count * SIZE])
        for piece in range(-(-self.count // PIECE)):
            self._positions.append(self._positions[-1] + int(self._load(piece, check=True)[-1]))
        if (position := self._positions[-1]) != stop:
            raise InvalidDelivery(
                f"{storage.name}: index and payloads end at byte {position}, expected {stop}"
            )

    def _load(self, piece: int, *, check: bool = False) -> NDArray[np.int64]:
        """Where the payloads of a piece of the index end, from the first of them on."""
        at_hand, ends = self._cached
        if piece != at_hand:
            raw = np.zeros((min(PIECE, self.count - piece * PIECE), 4), np.uint8)
            packed = np.empty(raw.shape[0] * SIZE, np.uint8)
            read_at(self.storage, self.start + piece * PIECE * SIZE, packed.data)
            raw[:, :SIZE] = packed.reshape(-1, SIZE)
            sizes = raw.view("<u4").reshape(-1)
            if check and (sizes > self._limits(piece * PIECE, sizes.size)).any():
                raise InvalidDelivery(f"{self.storage.name}: a payload is too long for its block")
            ends = np.zeros(sizes.size + 1, np.int64)
            np.cumsum(sizes + CHECKSUM * (sizes > 0), out=ends[1:], dtype=np.int64)
            self._cached = piece, ends
        return ends

    def _limits(self, first: int, count: int) -> NDArray[np.int64]:
        limits = np.empty(count, np.int64)
        for sequence, begin in zip(self._sequences, self._firsts, strict=False):
            here = slice(max(begin - first, 0), max(begin + sequence.blocks - first, 0))
            limits[here] = sequence.limit(0)
            last = begin + sequence.blocks - 1 - first
            if 0 <= last < count:
                limits[last] = sequence.limit(sequence.blocks - 1)
        return limits

    def first(self, sequence: Sequence) -> int:
        """The number of a sequence's first block in this part."""
        return self._first_of[id(sequence)]

    def read(self, position: int, view: NDArray[np.uint8]) -> None:
        """Fill memory with the checksum that is there and the payload behind it (ELSA-D-018).

        They are compared before anything is decoded.
        """
        read_at(self.storage, position, view.data)
        self._compare(view.data, view[CHECKSUM:].data, position)

    def positions(self, first: int, count: int) -> NDArray[np.int64]:
        """Where payloads in a row begin, checksums included, and where the last of them ends."""
        found, done = np.empty(count + 1, np.int64), 0
        while done < count:
            piece, inside = divmod(first + done, PIECE)
            here = self._load(piece)[inside : inside + count - done + 1]
            found[done : done + here.size] = here + self._positions[piece]
            done += here.size - 1
        return found

    def read_many(self, positions: ListOf[int]) -> list[memoryview]:
        """Payloads in a row by one read, each compared with its checksum."""
        start, found = positions[0], list[memoryview]()
        data = memoryview(bytearray(positions[-1] - start))
        read_at(self.storage, start, data)
        for begin, end in pairwise(positions):
            payload = data[begin - start + CHECKSUM : end - start]
            if begin < end:
                self._compare(data[begin - start :], payload, begin)
            found.append(payload)
        return found

    def check(self) -> None:
        """Compare the checksums of all payloads."""
        for first in range(0, self.count, PIECE):
            at, done = self.positions(first, min(PIECE, self.count - first)), 0
            while done < at.size - 1:
                stop = int(at.searchsorted(at[done] + TOGETHER, "right")) - 1
                stop = max(stop, done + 1)
                self.read_many(at[done : stop + 1].tolist())
                done = stop

    def _compare(self, checksum: memoryview, payload: memoryview, position: int) -> None:
        stated = int.from_bytes(checksum[:CHECKSUM], "little")
        if xxhash.xxh3_64_intdigest(payload, seed=self.seed) != stated:
            raise ChecksumMismatch(
                f"{self.storage.name}: the payload at byte {position} has another checksum"
            )

    def where(self, number: int) -> str:
        """A block for messages."""
        which = bisect_right(self._firsts, number) - 1
        info, _, _ = next(self._sequences[which].pieces(number - self._firsts[which]))
        return f"{self.storage.name}: block of tensor {info.name!r}"
