"""A delivery file, or the first bytes of one, as the network it holds."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from elsa_format._container import Header, Kind, TensorInfo, as_array
from elsa_format._delivery import Prefix
from elsa_format._delivery.blocks import BlockDecoder, Blocks, Words, at_once
from elsa_format._errors import InvalidOption, TrailingData
from elsa_format._memory import aligned
from elsa_format._network.base import Network, TensorBytes
from elsa_format._options import Limit
from elsa_format._profile import LevelNumber
from elsa_format._storage import PositionedStorage, Storage
from elsa_format._storage.local import SpooledStorage
from elsa_format._threads import run


@dataclass(frozen=True, eq=False)
class DeliveryNetwork(Network):
    """One delivery file; of its levels those can be read that were downloaded."""

    prefix: Prefix = field(kw_only=True)
    blocks: Blocks = field(kw_only=True)

    @property
    def kind(self) -> Kind:
        return "delivery"

    @property
    def high_latency(self) -> bool:
        return True  # blocks hold several tensors, so these are read one after the other

    def open(self, level: LevelNumber = "dense", only: TensorInfo | None = None) -> TensorBytes:
        last = self.prefix.part(level)
        self.prefix.check_indexes(last)
        return _DeliveredBytes(self.blocks, last, alone=only is not None)

    def place(self, stored: str) -> tuple[str, int]:
        raise InvalidOption(
            f"{self.name}: is a delivery file, whose weights are coded; "
            "elsa-extract --restore gives the ELSA file, which has them as they are"
        )

    def need(self, level: LevelNumber) -> None:
        self.prefix.need(self.prefix.part(level))

    def check_unchanged(self) -> None:
        held, end = self.prefix.storage, self.prefix.document.ends[-1]
        if isinstance(held, SpooledStorage) and held.have >= end and held.keep(end + 1) > end:
            raise TrailingData(f"{self.name}: bytes follow the last part")
        held.check_unchanged(grows=True)

    @property
    def original_start(self) -> bytes:
        return self.prefix.head

    def decode(self, level: LevelNumber, jobs: int) -> "_GrowingArrays":
        part = self.prefix.part(level)
        self.prefix.check_indexes(part)
        return _GrowingArrays(self.blocks.decoder, part, jobs)

    @property
    def available(self) -> Sequence[LevelNumber]:
        return self.levels[: self.prefix.parts]

    @property
    def downloads(self) -> Mapping[LevelNumber, int]:
        end = self.prefix.end
        return {level: end(self.prefix.part(level)) for level in self.levels}

    @property
    def file_size(self) -> int:
        """Bytes of the delivery file that are there, or of all of it where that is not known."""
        size = self.prefix.storage.size
        return self.downloads["dense"] if size is None else size

    def holds(self, stored: str, level: LevelNumber) -> bool:
        place = self.prefix.plan.places.get(stored)
        return place is None or place.part <= self.prefix.part(level)

    def checksum(self, stored: str, level: LevelNumber) -> str | None:
        partial = level != "dense" and stored in self.profile.nested
        return None if partial else super().checksum(stored, level)

    def close(self) -> None:
        """Close the file."""
        self.blocks.close()
        self.prefix.close()


def delivery_network(storage: Storage, header: Header, limit: Limit) -> DeliveryNetwork:
    """The network in a delivery file whose header was read."""
    if storage.size is None or storage.high_latency or not isinstance(storage, PositionedStorage):
        storage = SpooledStorage(storage, header.data_start)
    prefix = Prefix(storage, header, limit)
    blocks = Blocks(BlockDecoder(prefix))
    return DeliveryNetwork(prefix.name, prefix.header, prefix.profile, prefix=prefix, blocks=blocks)


class _DeliveredBytes(TensorBytes):
    """Takes tensors from the blocks that they are in."""

    def __init__(self, blocks: Blocks, part: int, *, alone: bool) -> None:
        self._blocks, self._part, self._alone = blocks, part, alone

    def seek(self, info: TensorInfo) -> Self:
        """What follows a tensor is decoded ahead, unless it is read alone."""
        place = self._blocks.decoder.prefix.plan.places[info.name]
        sequence, self._place, self._at = place.sequence, place, place.start
        end = place.start + info.nbytes // sequence.words.itemsize
        self._stop = -(-end // sequence.batch) if self._alone else sequence.batches
        return self

    def readinto(self, buffer: Any, /) -> int:
        """As much of the tensor as one batch of blocks has."""
        out: NDArray[np.uint8] = np.frombuffer(buffer, np.uint8)
        number, inside = divmod(self._at, self._place.sequence.batch)
        words = self._blocks.get(self._place, self._part, number, self._stop)
        found = words[inside:].view(np.uint8)[: out.size]
        out[: found.size] = found
        self._at += found.size // words.itemsize
        return found.size


class _GrowingArrays:
    """The nested tensors of a level, which grow in place: views of the sequences they lie in."""

    def __init__(self, decoder: BlockDecoder, part: int, jobs: int) -> None:
        prefix = decoder.prefix
        self._decoder, self._prefix, self._part = decoder, prefix, part
        self._sequences: list[tuple[Any, Words]] = [
            (s, aligned(s.length * s.words.itemsize).view(s.words)) for s in prefix.plan.nested
        ]
        self._stored: set[tuple[int, int]] = set()
        self._decode(1, part, jobs)
        words_of = {id(sequence): words for sequence, words in self._sequences}
        self.arrays: dict[str, NDArray[Any]] = {}
        for name in prefix.profile.nested:
            info, place = prefix.header.tensors[name], prefix.plan.places.get(name)
            if place is not None:
                size = info.nbytes // place.sequence.words.itemsize
                words = words_of[id(place.sequence)][place.start : place.start + size]
                self.arrays[name] = as_array(words.view(np.uint8), info, prefix.name)

    def upgrade(self, level: LevelNumber, jobs: int) -> None:
        """Add the words of more parts."""
        part = self._prefix.part(level)
        self._prefix.check_indexes(part)
        if part > self._part:
            self._decode(self._part + 1, part, jobs)
            self._part = part

    def _decode(self, first: int, last: int, jobs: int) -> None:
        for which, (sequence, _) in enumerate(self._sequences):

            def one(batch: int, which: int = which) -> None:
                sequence, words = self._sequences[which]
                for start, blocks in self._runs(which, sequence.blocks_of(batch), first):
                    own = words[blocks.start * sequence.block : blocks.stop * sequence.block]
                    stored = self._decoder.nested(sequence, blocks, own, last, start)
                    self._stored.update((which, number) for number in stored)

            run(one, range(sequence.batches), at_once(sequence, jobs))

    def _runs(self, which: int, blocks: range, first: int) -> Iterator[tuple[int, range]]:
        """Blocks in a row, and the part to decode from: stored ones are in part 1 alone."""
        for stored, numbers in groupby(blocks, lambda number: (which, number) in self._stored):
            run = list(numbers)
            yield 1 if stored else first, range(run[0], run[-1] + 1)
