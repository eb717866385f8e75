"""A delivery file, or the first bytes of one, as the network it holds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from elsa_format._container import Header, Kind, TensorInfo
from elsa_format._delivery.prefix import Growing, Prefix
from elsa_format._delivery.reader import Delivery, NestedArrays
from elsa_format._errors import InvalidOption
from elsa_format._network.base import Network, TensorBytes
from elsa_format._options import Limit
from elsa_format._profile import LevelNumber
from elsa_format._storage import PositionedStorage, Storage


@dataclass(frozen=True, eq=False)
class DeliveryNetwork(Network):
    """One delivery file; of its levels those can be read that were downloaded."""

    delivery: Delivery = field(kw_only=True)

    @property
    def kind(self) -> Kind:
        return "delivery"

    @property
    def high_latency(self) -> bool:
        return True  # blocks hold several tensors, so these are read one after the other

    def open(self, level: LevelNumber = "dense", only: TensorInfo | None = None) -> TensorBytes:
        last = self.delivery.prefix.part(level)
        self.delivery.prefix.check_indexes(last)
        return _DeliveredBytes(self.delivery, last, alone=only is not None)

    def place(self, stored: str) -> tuple[str, int]:
        raise InvalidOption(
            f"{self.name}: is a delivery file, whose weights are coded; "
            "elsa-extract --restore gives the ELSA file, which has them as they are"
        )

    def need(self, level: LevelNumber) -> None:
        self.delivery.prefix.need(self.delivery.prefix.part(level))

    def check_unchanged(self) -> None:
        self.delivery.finish()

    @property
    def original_start(self) -> bytes:
        return self.delivery.prefix.head

    def decode(self, level: LevelNumber, jobs: int) -> NestedArrays:
        part = self.delivery.prefix.part(level)
        self.delivery.prefix.check_indexes(part)
        return NestedArrays(self.delivery, part, jobs)

    @property
    def available(self) -> Sequence[LevelNumber]:
        return self.levels[: self.delivery.prefix.parts]

    @property
    def downloads(self) -> Mapping[LevelNumber, int]:
        end = self.delivery.prefix.end
        return {level: end(self.delivery.prefix.part(level)) for level in self.levels}

    @property
    def file_size(self) -> int:
        """Bytes of the delivery file that are there, or of all of it where that is not known."""
        size = self.delivery.prefix.storage.size
        return self.downloads["dense"] if size is None else size

    def holds(self, stored: str, level: LevelNumber) -> bool:
        place = self.delivery.prefix.plan.places.get(stored)
        return place is None or place.part <= self.delivery.prefix.part(level)

    def checksum(self, stored: str, level: LevelNumber) -> str | None:
        partial = level != "dense" and stored in self.profile.nested
        return None if partial else super().checksum(stored, level)

    def close(self) -> None:
        """Close the file."""
        self.delivery.close()


def delivery_network(storage: Storage, header: Header, limit: Limit) -> DeliveryNetwork:
    """The network in a delivery file whose header was read."""
    if storage.size is None or storage.high_latency or not isinstance(storage, PositionedStorage):
        storage = Growing(storage, header.data_start)
    prefix = Prefix(storage, header, limit)
    return DeliveryNetwork(prefix.name, prefix.header, prefix.profile, delivery=Delivery(prefix))


class _DeliveredBytes(TensorBytes):
    """Takes tensors from the blocks that they are in."""

    def __init__(self, delivery: Delivery, part: int, *, alone: bool) -> None:
        self._delivery, self._part, self._alone = delivery, part, alone

    def seek(self, info: TensorInfo) -> Self:
        """What follows a tensor is decoded ahead, unless it is read alone."""
        place = self._delivery.prefix.plan.places[info.name]
        sequence, self._place, self._at = place.sequence, place, place.start
        end = place.start + info.nbytes // sequence.words.itemsize
        self._stop = -(-end // sequence.batch) if self._alone else sequence.batches
        return self

    def readinto(self, buffer: Any, /) -> int:
        """As much of the tensor as one batch of blocks has."""
        out: NDArray[np.uint8] = np.frombuffer(buffer, np.uint8)
        number, inside = divmod(self._at, self._place.sequence.batch)
        words = self._delivery.blocks.get(self._place, self._part, number, self._stop)
        found = words[inside:].view(np.uint8)[: out.size]
        out[: found.size] = found
        self._at += found.size // words.itemsize
        return found.size
