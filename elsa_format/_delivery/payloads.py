"""The payloads of one part: its index, checked as a whole, and each payload with its checksum."""

from array import array
from bisect import bisect_right
from collections.abc import Sequence as ListOf
from contextlib import closing
from itertools import accumulate

import numpy as np
import xxhash
from numpy.typing import NDArray

from elsa_format._delivery.sequences import Sequence
from elsa_format._errors import ChecksumMismatch, InvalidDelivery, Truncated
from elsa_format._storage import Storage, fill

ENTRY = np.dtype([("size", "<u4"), ("checksum", "<u8")])
PIECE = 1024
"""Entries of an index that are read at a time: it may be larger than the memory that one has."""


def read_at(storage: Storage, start: int, view: memoryview) -> None:
    """Fill a buffer from a position."""
    with closing(storage.reader(start, start + len(view))) as reader:
        if missing := fill(reader, view):
            raise Truncated(f"{storage.name}: ends {missing} bytes early")


class Payloads:
    """The payloads of a part that is there (ELSA-D-015)."""

    def __init__(
        self, storage: Storage, start: int, stop: int, sequences: ListOf[Sequence], seed: int
    ) -> None:
        self.storage, self.start, self.seed = storage, start, seed
        self._sequences = list(sequences)
        self._firsts = list(accumulate((s.blocks for s in sequences), initial=0))
        self.count = self._firsts[-1]
        # Before anything is made for each block: a header may declare far more than there is.
        if self.count * ENTRY.itemsize > stop - start:
            raise InvalidDelivery(
                f"{storage.name}: an index of {self.count} blocks in a part of {stop - start} bytes"
            )
        self._cached = -1, np.empty(0, ENTRY)  # one attribute, as several threads read it
        self._positions = array("Q")
        position = start + self.count * ENTRY.itemsize
        for piece in range(-(-self.count // PIECE)):
            self._positions.append(position)
            sizes = self._load(piece)["size"]
            if (sizes > self._limits(piece * PIECE, sizes.size)).any():
                raise InvalidDelivery(f"{storage.name}: a payload is too long for its block")
            position += int(sizes.sum(dtype=np.int64))
        if position != stop:
            raise InvalidDelivery(
                f"{storage.name}: index and payloads end at byte {position}, expected {stop}"
            )

    def _load(self, piece: int) -> NDArray[np.void]:
        at_hand, entries = self._cached
        if piece != at_hand:
            entries = np.empty(min(PIECE, self.count - piece * PIECE), ENTRY)
            at = self.start + piece * PIECE * ENTRY.itemsize
            read_at(self.storage, at, entries.view(np.uint8).data)
            self._cached = piece, entries
        return entries

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
        which = next(i for i, other in enumerate(self._sequences) if other is sequence)
        return self._firsts[which]

    def entry(self, number: int) -> tuple[int, int, int]:
        """Position, size and checksum of a payload."""
        piece, inside = divmod(number, PIECE)
        entries = self._load(piece)
        before = int(entries["size"][:inside].sum(dtype=np.int64))
        size, checksum = entries[inside].tolist()
        return self._positions[piece] + before, size, checksum

    def read(self, number: int, view: NDArray[np.uint8]) -> None:
        """Read a payload, and compare its checksum before anything is decoded (ELSA-D-018)."""
        position, size, checksum = self.entry(number)
        read_at(self.storage, position, view[:size].data)
        if xxhash.xxh3_64_intdigest(view[:size].data, seed=self.seed) != checksum:
            raise ChecksumMismatch(
                f"{self.storage.name}: the payload at byte {position} has another checksum"
            )

    def where(self, number: int) -> str:
        """A block for messages."""
        which = bisect_right(self._firsts, number) - 1
        info, _, _ = next(self._sequences[which].pieces(number - self._firsts[which]))
        return f"{self.storage.name}: block of tensor {info.name!r}"
