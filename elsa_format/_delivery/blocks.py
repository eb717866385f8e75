"""Decoded blocks of a delivery file; those that follow are decoded while some are used."""

import time
from _thread import allocate_lock
from collections import OrderedDict
from collections.abc import Iterator
from collections.abc import Sequence as ListOf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elsa_format._delivery import Prefix
from elsa_format._delivery.codec import Bytes, decode_nested, decode_plain
from elsa_format._delivery.parts import CHECKSUM, TOGETHER, Payloads, Place, Sequence
from elsa_format._errors import InvalidDelivery
from elsa_format._threads import CORES, PATIENCE, Renewed, Task, start

MEMORY = 20 << 20
"""Bytes of decoded blocks that are kept: tensors of several sequences follow one another. And bytes
that blocks take while they are decoded."""
TAKEN = 6
"""How often its words a block takes then, at most: words, payloads, what decoders work with."""
SMALL = 1 << 16
"""Bytes of a block up to which a thread would cost more than it does."""
OBJECT = 64
"""Bytes that count for a payload then, however small: one may be in each of 256 parts."""

Words = NDArray[np.unsignedinteger[Any]]


class BlockDecoder:
    """Blocks of a delivery file as words."""

    def __init__(self, prefix: Prefix) -> None:
        self.prefix = prefix

    def plain(self, part: int, sequence: Sequence, blocks: range, words: Words) -> None:
        """Fill plain blocks of a part that follow one another."""
        for number, block, payload, _ in self._payloads(sequence, blocks, words, part, part):
            try:
                decode_plain(payload, block, sequence.dtype)
            except ValueError as error:
                raise self._wrong(part, sequence, number, error) from None

    def nested(
        self, sequence: Sequence, blocks: range, words: Words, last: int, first: int = 1
    ) -> list[int]:
        """Put the words of parts `first` to `last` into blocks; the numbers of stored ones."""
        bits, levels, stored = self.prefix.profile.bits, self.prefix.levels, []
        for number, block, joined, sizes in self._payloads(sequence, blocks, words, first, last):
            try:
                if decode_nested(joined, sizes, first, block, sequence.dtype, bits, levels):
                    stored.append(number)
            except ValueError as error:
                raise self._wrong(last, sequence, number, error) from None
        return stored

    def _payloads(
        self, sequence: Sequence, blocks: range, words: Words, first: int, last: int
    ) -> Iterator[tuple[int, Words, Bytes, list[int]]]:
        """Of each block: its words, its payloads one behind the other, and their sizes."""
        parts = [self.prefix.payloads(part) for part in range(first, last + 1)]
        starts = [payloads.first(sequence) + blocks.start for payloads in parts]
        at = [p.positions(start, len(blocks)) for p, start in zip(parts, starts, strict=True)]
        memory = np.sum(at, axis=0) + np.arange(len(blocks) + 1) * (OBJECT * len(parts))
        done = 0
        while done < len(blocks):
            stop = int(memory.searchsorted(memory[done] + TOGETHER, "right")) - 1
            if stop > done + 1:
                found = _read_many(parts, [a[done : stop + 1].tolist() for a in at])
            else:  # a large one, whose payloads are read to where they are needed
                sizes = [max(int(a[done + 1] - a[done]) - CHECKSUM, 0) for a in at]
                end = CHECKSUM + sum(sizes)
                joined = np.empty(end, np.uint8)
                # From the last to the first: a checksum lies where the payload before it will end.
                for which in reversed(range(len(parts))):
                    if size := sizes[which]:
                        view = joined[end - size - CHECKSUM : end]
                        parts[which].read(int(at[which][done]), view)
                        end -= size
                found = [(joined[CHECKSUM:], sizes)]
            for joined, sizes in found:
                inside = done * sequence.block
                block = words[inside : inside + sequence.block]
                yield blocks[done], block, joined, sizes
                done += 1

    def _wrong(
        self, part: int, sequence: Sequence, number: int, error: ValueError
    ) -> InvalidDelivery:
        payloads = self.prefix.payloads(part)
        return InvalidDelivery(f"{payloads.where(payloads.first(sequence) + number)}: {error}")


def _read_many(
    parts: ListOf[Payloads], positions: ListOf[ListOf[int]]
) -> list[tuple[Bytes, list[int]]]:
    """The payloads of each of several small blocks."""
    found = (part.read_many(places) for part, places in zip(parts, positions, strict=True))
    rows = zip(*found, strict=True)
    return [(np.frombuffer(b"".join(row), np.uint8), [len(it) for it in row]) for row in rows]


def at_once(sequence: Sequence, jobs: int = CORES) -> int:
    """How many batches of a sequence are decoded at a time: as many as there is memory for."""
    itemsize = sequence.words.itemsize
    if sequence.block * itemsize <= SMALL:
        return 1
    return max(1, min(jobs, MEMORY // (TAKEN * sequence.batch * itemsize)))


class Blocks(Renewed):
    """The batches of blocks that were used last, and those that will be used next."""

    def __init__(self, decoder: BlockDecoder) -> None:
        self.decoder = decoder
        super().__init__()

    def renew(self) -> None:
        """Know of none."""
        self._lock = allocate_lock()
        self._found: OrderedDict[tuple[int, int, int], _Batch] = OrderedDict()
        self._held = 0
        """Bytes of their words."""

    def get(self, place: Place, part: int, number: int, stop: int) -> Words:
        """A batch as the first parts have it; those up to `stop` will be asked for after it."""
        batch = None
        try:
            with self._lock:
                batch = self._batch(place, part, number)
                last = min(number + at_once(place.sequence), stop)
                following = [self._batch(place, part, n) for n in range(number + 1, last)]
            for other in following:
                if other.taken.acquire(blocking=False):
                    start(other)
            if batch.taken.acquire(blocking=False):
                batch()
            batch.wait()
            return batch.words
        except BaseException:  # Ctrl-C, perhaps: whoever asks again gets it anew
            with self._lock:
                left = [(key, found) for key, found in self._found.items() if found is not batch]
                self._found = OrderedDict(left)
                self._held = sum(found.words.nbytes for _, found in left)
            raise

    def _batch(self, place: Place, part: int, number: int) -> "_Batch":
        sequence = place.sequence
        key = id(sequence), number, part if place.part == 0 else 0
        if key in self._found:
            self._found.move_to_end(key)
            return self._found[key]
        size = sequence.batch_size(number)
        self._held += size * sequence.words.itemsize
        while self._found and self._held > MEMORY:
            self._held -= self._found.popitem(last=False)[1].words.nbytes
        words: Words = np.empty(size, sequence.words)
        blocks = sequence.blocks_of(number)
        if place.part == 0:
            batch = _Batch(words, self.decoder.nested, sequence, blocks, words, part)
        else:
            batch = _Batch(words, self.decoder.plain, place.part, sequence, blocks, words)
        self._found[key] = batch
        return batch

    def close(self) -> None:
        """Forget them, when no thread reads the file any more."""
        until = time.monotonic() + PATIENCE
        for batch in self._found.values():
            if not batch.taken.acquire(blocking=False):
                batch.abandon(until)
        self._found.clear()


class _Batch(Task):
    """Blocks that are decoded by whoever needs them first, or before that in a thread."""

    def __init__(self, words: Words, *call: Any) -> None:
        super().__init__(*call)
        self.words, self.taken = words, allocate_lock()
        """Whoever has the lock decodes them, and keeps it."""
