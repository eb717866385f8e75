"""The tensors of a level, or the whole source, out of a delivery file or its first bytes."""

from _thread import allocate_lock
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from elsa_format import _kernels
from elsa_format._closing import Closing
from elsa_format._container.arrays import as_array
from elsa_format._container.header import RESERVED, Header, TensorInfo
from elsa_format._delivery.blocks import Blocks, Decoder, Words, at_once
from elsa_format._delivery.prefix import Growing, Prefix, open_prefix
from elsa_format._delivery.sequences import Sequence
from elsa_format._errors import ChecksumMismatch, CountMismatch, InvalidOption, TrailingData
from elsa_format._memory import BLOCK, aligned, give_block, take_block
from elsa_format._options import Limit
from elsa_format._output import Target, open_output
from elsa_format._profile import Level, LevelLike, LevelNumber, Profile, find_level
from elsa_format._storage import Source
from elsa_format._threads import CORES, Meter, Progress, Renewed, no_progress, run


class Delivery(Closing, Renewed):
    """A delivery file or the first bytes of one: the levels that are there, and how they grow.

    >>> with open_delivery("net.ship.safetensors") as net:
    ...     weights = net.load(1)
    ...     kept = int((weights["layer"] != 0).sum())
    ...     _ = net.upgrade(2)  # in the same arrays
    ...     net.there, kept, int((weights["layer"] != 0).sum())
    ('dense', 500, 1000)
    """

    def __init__(self, prefix: Prefix) -> None:
        self.prefix = prefix
        self.path, self.header, self.profile = prefix.name, prefix.header, prefix.profile
        self._decoder = Decoder(prefix)
        self._blocks = Blocks(self._decoder)
        self._loaded: _Loaded | None = None
        super().__init__()

    def renew(self) -> None:
        """Be unlocked."""
        self._loading = allocate_lock()

    @property
    def levels(self) -> tuple[Level, ...]:
        """The levels of the network, sparsest first, whether they are there or not."""
        return self.profile.levels

    @property
    def there(self) -> LevelNumber | None:
        """The densest level whose bytes are there; None if not even level 1 is."""
        parts = self.prefix.parts
        return "dense" if parts > len(self.levels) else parts or None

    @property
    def sizes(self) -> dict[LevelNumber, int]:
        """How many of the first bytes of the file each level needs."""
        numbers = range(1, len(self.levels) + 1)
        sizes: dict[LevelNumber, int] = {t: self.prefix.end(t) for t in numbers}
        sizes["dense"] = self.prefix.end(len(self.levels) + 1)
        return sizes

    def _part(self, level: LevelLike) -> int:
        """The last part that a level needs, which is there."""
        number = find_level(level, [entry.name for entry in self.levels], self.path)
        part = len(self.levels) + 1 if number == "dense" else number
        self.prefix.check_indexes(part)
        return part

    def blocks(
        self, info: TensorInfo, part: int, into: NDArray[np.uint8] | None = None
    ) -> Iterator[NDArray[np.uint8]]:
        """A stored tensor's bytes as the first parts have them; zeros for weights that are left.

        They are parts of `into`, or else each block is overwritten by the next. Blocks hold whole
        elements, and all but the last a multiple of 8 of them.
        """
        place = self.prefix.plan.places.get(info.name)
        complete = place is None or place.part or part > len(self.levels)
        checksum = xxhash.xxh3_64() if complete and info.name in self.profile.checksums else None
        buffer = take_block() if into is None else into
        for start in range(0, info.nbytes, BLOCK):
            size = min(BLOCK, info.nbytes - start)
            block = buffer[:size] if into is None else buffer[start : start + size]
            self.read(info, part, start, block)
            if checksum:
                checksum.update(block.data)
            yield block
        if checksum:
            compare_checksum(self.profile, info, checksum, self.path)
        if into is None:
            give_block(buffer)

    def read(
        self,
        info: TensorInfo,
        part: int,
        start: int,
        out: NDArray[np.uint8],
        *,
        alone: bool = False,
    ) -> None:
        """Bytes of a tensor as the first parts have it, from `start` on.

        What follows is decoded ahead, unless the tensor is read `alone`.
        """
        place = self.prefix.plan.places[info.name]
        sequence = place.sequence
        itemsize = sequence.words.itemsize
        end = place.start + info.nbytes // itemsize
        stop = -(-end // sequence.batch) if alone else sequence.batches
        at, done = place.start + start // itemsize, 0
        while done < out.size:
            number, inside = divmod(at, sequence.batch)
            words = self._blocks.get(place, part, number, stop)
            found = words[inside:].view(np.uint8)[: out.size - done]
            out[done : done + found.size] = found
            done, at = done + found.size, at + found.size // itemsize

    def stream(self, level: LevelLike) -> Iterator[tuple[str, NDArray[Any]]]:
        """The tensors of a level one after the other, in the order in which they are stored."""
        part = self._part(level)
        number: LevelNumber = "dense" if part > len(self.levels) else part
        for info in tensors_of(self.header, self.profile, number):
            array = self._tensor(info, part)
            yield plain_name(info.name), array

    def _tensor(self, info: TensorInfo, part: int) -> NDArray[Any]:
        flat = aligned(info.nbytes)
        for _ in self.blocks(info, part, flat):
            pass
        if info.name in self.profile.nested:
            check_counts(self.profile, info, flat.view(info.dtype.words), part, self.path)
        return as_array(flat, info, self.path)

    def load(self, level: LevelLike = "dense", *, jobs: int = CORES) -> dict[str, NDArray[Any]]:
        """All tensors of a level. `upgrade` changes these arrays, so treat them as its own.

        >>> with open_delivery("net.ship.safetensors") as net:
        ...     sorted(net.load("90%"))
        ['bias', 'layer']
        """
        part = self._part(level)
        with self._loading:
            self._loaded = None
            loaded = self._loaded = _Loaded(self, part, jobs)
        return loaded.arrays

    def upgrade(self, level: LevelLike, *, jobs: int = CORES) -> dict[str, NDArray[Any]]:
        """Make what was loaded a denser level, in the arrays that it is in; only the rest is read.

        Of two upgrades at once the second waits for the first. If one fails, the arrays are of no
        use any more: load them again.
        """
        part = self._part(level)
        with self._loading:
            loaded = self._loaded
            if loaded is None:
                raise InvalidOption(f"{self.path}: no level is loaded that could be upgraded")
            if part < loaded.part:
                raise InvalidOption(
                    f"{self.path}: level {loaded.part} is loaded, and {level!r} is not above it"
                )
            self._loaded = None
            loaded.upgrade(part, jobs)
            self._loaded = loaded
        return loaded.arrays

    def whole(
        self, target: Target, *, force: bool = False, progress: Progress = no_progress
    ) -> None:
        """Write the ELSA file that the delivery file was made of, byte for byte."""
        meter = Meter(progress, self.header.data_start + self.header.data_size)
        with open_output(target, force=force, in_order=True) as output:
            for position, block in self.whole_blocks():
                output.write_at(position, block)
                meter.tick(memoryview(block).nbytes)
            self.finish()
            output.commit()

    def whole_blocks(self) -> Iterator[tuple[int, Any]]:
        """The ELSA file in order: positions and the bytes there, in memory that is reused."""
        part, position = self._part("dense"), len(self.prefix.head)
        yield 0, self.prefix.head
        for info in self.header.tensors.values():
            for block in self.blocks(info, part):
                yield position, block
                position += block.size

    def finish(self) -> None:
        """Nothing follows what was read, and it is what it was."""
        storage, end = self.prefix.storage, self.prefix.document.ends[-1]
        if isinstance(storage, Growing) and storage.have >= end and storage.keep(end + 1) > end:
            raise TrailingData(f"{self.path}: bytes follow the last part")
        self.prefix.storage.check_unchanged(grows=True)

    def close(self) -> None:
        """Close the file."""
        self._blocks.close()
        self.prefix.close()

    def __repr__(self) -> str:
        names = ", ".join(level.name for level in self.levels)
        there = "nothing" if self.there is None else f"level {self.there}"
        return f"<elsa_format.Delivery {self.path!r}: levels {names}; {there} is there>"


class _Loaded:
    """The arrays of a level. Nested ones are views of their sequence, in which blocks lie."""

    def __init__(self, delivery: Delivery, part: int, jobs: int) -> None:
        self.delivery, self.part = delivery, part
        plan, header = delivery.prefix.plan, delivery.header
        self.sequences = [(s, _empty(s)) for s in plan.nested]
        self.stored: set[tuple[int, int]] = set()
        self._decode(1, part, jobs)
        places = {id(sequence): words for sequence, words in self.sequences}
        self.arrays: dict[str, NDArray[Any]] = {}
        for info in header.tensors.values():
            if info.name.startswith(RESERVED):
                continue
            place = plan.places.get(info.name)
            if info.name in delivery.profile.nested and place is not None:
                size = info.nbytes // place.sequence.words.itemsize
                words = places[id(place.sequence)][place.start : place.start + size]
                self.arrays[info.name] = as_array(words.view(np.uint8), info, delivery.path)
            else:
                stored = delivery.profile.stored_name(info.name, self._level(part))
                self.arrays[info.name] = delivery._tensor(header.tensors[stored], part)

        self._check(part)

    def _level(self, part: int) -> LevelNumber:
        return "dense" if part > len(self.delivery.levels) else part

    def _decode(self, first: int, last: int, jobs: int) -> None:
        for which, (sequence, _) in enumerate(self.sequences):

            def one(batch: int, which: int = which) -> None:
                sequence, words = self.sequences[which]
                for start, blocks in self._runs(which, sequence.blocks_of(batch), first):
                    own = words[blocks.start * sequence.block : blocks.stop * sequence.block]
                    stored = self.delivery._decoder.nested(sequence, blocks, own, last, start)
                    self.stored.update((which, number) for number in stored)

            run(one, range(sequence.batches), at_once(sequence, jobs))

    def _runs(self, which: int, blocks: range, first: int) -> Iterator[tuple[int, range]]:
        """Blocks in a row, and the part to decode from: stored ones are in part 1 alone."""
        for stored, numbers in groupby(blocks, lambda number: (which, number) in self.stored):
            run = list(numbers)
            yield 1 if stored else first, range(run[0], run[-1] + 1)

    def upgrade(self, part: int, jobs: int) -> None:
        """Add the words of more parts."""
        if part == self.part:
            return
        self._decode(self.part + 1, part, jobs)
        header, profile = self.delivery.header, self.delivery.profile
        for name in profile.per_level:
            info = header.tensors[profile.stored_name(name, self._level(part))]
            self.arrays[name][...] = self.delivery._tensor(info, part)
        self._check(part)
        self.part = part

    def _check(self, part: int) -> None:
        delivery = self.delivery
        for name in delivery.profile.nested:
            info = delivery.header.tensors[name]
            words = self.arrays[name].reshape(-1).view(info.dtype.words)
            check_counts(delivery.profile, info, words, part, delivery.path)
            if part > len(delivery.levels):
                checksum = xxhash.xxh3_64(words.view(np.uint8).data)
                compare_checksum(delivery.profile, info, checksum, delivery.path)


def _empty(sequence: Sequence) -> Words:
    words: Words = aligned(sequence.length * sequence.words.itemsize).view(sequence.words)
    return words


def plain_name(stored: str) -> str:
    """The name of a tensor, or of that whose variant it is."""
    return stored.split(".", 2)[2] if stored.startswith(RESERVED) else stored


def tensors_of(header: Header, profile: Profile, level: LevelNumber) -> Iterator[TensorInfo]:
    """The stored tensors that are those of a level, in stored order."""
    names = (name for name in header.tensors if not name.startswith(RESERVED))
    wanted = {profile.stored_name(name, level) for name in names}
    return (info for name, info in header.tensors.items() if name in wanted)


def compare_checksum(
    profile: Profile, info: TensorInfo, checksum: xxhash.xxh3_64, where: str
) -> None:
    """Compare the checksum of a tensor's bytes with that of the profile, if it has one."""
    found, expected = f"xxh3:{checksum.hexdigest()}", profile.checksums.get(info.name)
    if expected not in (None, found):
        raise ChecksumMismatch(
            f"{where}: tensor {info.name!r}: checksum {found}, expected {expected}"
        )


def check_counts(
    profile: Profile, info: TensorInfo, words: NDArray[Any], part: int, where: str
) -> None:
    """Compare the numbers of weights of a nested tensor with the profile (ELSA-D-024)."""
    levels = min(part, len(profile.levels))
    counts = _kernels.count(words, profile.bits)[1 : levels + 1].cumsum()
    expected: Mapping[str, tuple[int, ...]] = profile.nested
    if tuple(counts.tolist()) != expected[info.name][:levels]:
        raise CountMismatch(
            f"{where}: tensor {info.name!r}: levels keep {counts.tolist()}, "
            f"expected {list(expected[info.name][:levels])}"
        )


def open_delivery(source: Source, *, max_bytes: int | None = None) -> Delivery:
    """Open a delivery file, or the first bytes of one: a path, a URL or a stream.

    Reads no more of a URL or a pipe than the requested levels need.

    Args:
        source: path, URL or readable binary stream of the delivery file.
        max_bytes: refuse headers, or tensors as dense arrays, that take more than this; they are
            refused before there is memory for them.

    Raises:
        TooLarge: the network takes more than `max_bytes`.

    >>> with open_delivery("net.ship.safetensors") as net:
    ...     [level.name for level in net.levels], net.there
    (['95%', '90%', '80%'], 'dense')
    """
    return Delivery(open_prefix(source, Limit(max_bytes)))
