"""The payloads of one part: its index, checked as a whole, and each payload with its checksum."""

from array import array
from bisect import bisect_right
from collections.abc import Sequence as ListOf
from itertools import accumulate, pairwise

import numpy as np
import xxhash
from numpy.typing import NDArray

from elsa_format._delivery.sequences import Sequence
from elsa_format._errors import ChecksumMismatch, InvalidDelivery, Truncated
from elsa_format._storage import PositionedStorage

SIZE = 3
"""Bytes of a size in the index."""
CHECKSUM = 8
"""Bytes of the checksum before a payload that is not empty."""
TOGETHER = 1 << 16
"""Bytes of small payloads that are read at a time."""
PIECE = 1024
"""Sizes of an index that are read at a time: it may be larger than the memory that one has."""


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
