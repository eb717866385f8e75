"""A delivery file, or what there is of one, as the network it holds."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elsa_format._container.header import Header, TensorInfo
from elsa_format._delivery.prefix import Growing, Prefix
from elsa_format._delivery.reader import Delivery
from elsa_format._network import Network, Step
from elsa_format._profile import LevelNumber
from elsa_format._storage import Reader, Storage
from elsa_format._storage.local import PipeStorage
from elsa_format._storage.shards import Shard, Shards
from elsa_format._storage.virtual import TensorBytes, TensorReader, VirtualStorage


class DeliveryView(VirtualStorage):
    """The source as the first parts have it."""

    high_latency = True  # blocks hold several tensors, so these are read one after the other

    def __init__(self, delivery: Delivery, part: int, stop: int = sys.maxsize) -> None:
        self.delivery, self.part, self.stop = delivery, part, stop
        self.name, self.header = delivery.path, delivery.header

    def reader(self, start: int, stop: int) -> Reader:
        """Read along a range; what follows its last tensor is not decoded ahead."""
        return TensorReader(DeliveryView(self.delivery, self.part, stop), start)

    def tensor(self, info: TensorInfo) -> TensorBytes:
        """Take a tensor from the blocks that it is in."""
        last = self.header.data_start + info.stop >= self.stop
        return _DeliveredTensor(self.delivery, info, self.part, alone=last)

    def check_unchanged(self) -> None:
        """Ask the file."""
        self.delivery.finish()

    def close(self) -> None:
        """Close the file."""
        self.delivery.close()


class _DeliveredTensor:
    def __init__(self, delivery: Delivery, info: TensorInfo, part: int, alone: bool) -> None:
        self._delivery, self._info, self._part, self._alone = delivery, info, part, alone
        self._position = 0

    def readinto(self, buffer: Any, /) -> int:
        out: NDArray[np.uint8] = np.frombuffer(buffer, np.uint8)
        self._delivery.read(self._info, self._part, self._position, out, alone=self._alone)
        self._position += out.size
        return out.size

    def close(self) -> None:
        pass


@dataclass(frozen=True, eq=False)
class DeliveryNetwork(Network):
    """One delivery file; of its levels those can be read that are there."""

    delivery: Delivery = field(kw_only=True)

    @property
    def complete(self) -> int:
        """How many parts are there: levels, and the dense network."""
        return self.delivery.prefix.parts

    @property
    def there(self) -> LevelNumber | None:
        """The densest level whose bytes are there."""
        return self.delivery.there

    def readable(self) -> list[int | None]:
        """The levels that are there."""
        return super().readable()[: self.complete]

    @property
    def downloads(self) -> Mapping[LevelNumber, int]:
        """How many of the first bytes of the file each level needs."""
        return self.delivery.sizes

    @property
    def file_size(self) -> int:
        """Bytes of the delivery file that are there, or of all of it where that is not known."""
        size = self.delivery.prefix.storage.size
        return self.downloads["dense"] if size is None else size

    def steps(self, level: int | None) -> list[Step]:
        """What the parts of the level hold; what only denser ones need may not be there."""
        places, last = self.delivery.prefix.plan.places, self._part(level)
        return [
            step
            for step in super().steps(level)
            if step.info.name not in places or places[step.info.name].part <= last
        ]

    def _part(self, level: int | None) -> int:
        return len(self.profile.levels) + 1 if level is None else level

    def view(self, level: int | None) -> tuple[Storage, Mapping[str, str]]:
        """The level, which must be there, by its own parts.

        A tensor has its checksum only where it is complete.
        """
        profile, part = self.profile, self._part(level)
        self.delivery.prefix.need(part)
        nested = {} if level is None else profile.nested
        complete = {n: xxh for n, xxh in profile.checksums.items() if n not in nested}
        return DeliveryView(self.delivery, part), complete


def delivery_network(storage: Storage, header: Header) -> DeliveryNetwork:
    """The network in a delivery file whose header was read."""
    if isinstance(storage, PipeStorage) or storage.high_latency:
        storage = Growing(storage, header.data_start)
    delivery = Delivery(Prefix(storage, header))
    view = DeliveryView(delivery, len(delivery.levels) + 1)
    return DeliveryNetwork(view, delivery.header, delivery.profile, delivery=delivery)


@dataclass(frozen=True, eq=False)
class DeliveryShards(Network):
    """The delivery files of a network in shards; a level is there if all of them have it."""

    files: Sequence[str] = field(kw_only=True)

    @property
    def deliveries(self) -> Sequence[DeliveryNetwork]:
        """The networks of the shards."""
        return [shard for shard in self.shards if isinstance(shard, DeliveryNetwork)]

    @property
    def complete(self) -> int:
        """How many parts are there in every shard."""
        return min(shard.complete for shard in self.deliveries)

    @property
    def there(self) -> LevelNumber | None:
        """The densest level whose bytes are there in every shard."""
        return min(self.deliveries, key=lambda shard: shard.complete).there

    def readable(self) -> list[int | None]:
        """The levels that are there."""
        return super().readable()[: self.complete]

    @property
    def downloads(self) -> Mapping[LevelNumber, int]:
        """How many bytes each level needs of all files together."""
        one = self.deliveries[0].downloads
        return {level: sum(shard.downloads[level] for shard in self.deliveries) for level in one}

    @property
    def file_size(self) -> int:
        """Bytes of all delivery files that are there."""
        return sum(shard.file_size for shard in self.deliveries)

    def steps(self, level: int | None) -> list[Step]:
        """What the parts of the level hold; what only denser ones need may not be there."""
        there = {step.info.name for shard in self.shards for step in shard.steps(level)}
        return [step for step in super().steps(level) if step.info.name in there]

    def part(self, names: frozenset[str], shard: tuple[int, int]) -> Network:
        """What a shard that is written is about; for that it makes no difference what is read."""
        return Network(self.storage, self.header, self.profile).part(names, shard)

    def view(self, level: int | None) -> tuple[Storage, Mapping[str, str]]:
        """The level by its own parts, of all files as one."""
        views = [shard.view(level) for shard in self.deliveries]
        shards = [
            Shard(file, storage, shard.header)
            for file, (storage, _), shard in zip(self.files, views, self.shards, strict=True)
        ]
        return Shards(self.name, shards), {n: xxh for _, own in views for n, xxh in own.items()}
