"""The shards of a network, of whatever kind, as one network (spec §10)."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from elsa_format._container import Header, TensorInfo, VirtualHeader
from elsa_format._layouts import LayoutName
from elsa_format._network.base import Kind, Network, TensorBytes
from elsa_format._profile import LevelNumber, Profile
from elsa_format._storage import Fillable


@dataclass(frozen=True, eq=False)
class ShardedNetwork(Network):
    """Several files; a level can be read if all of them have it."""

    shards: Sequence[Network] = field(kw_only=True)
    """Each file by itself; its profile is that of the whole."""

    @property
    def files(self) -> Sequence[Network]:
        return self.shards

    @property
    def kind(self) -> Kind:
        return self.shards[0].kind

    @property
    def layout(self) -> LayoutName:
        return self.shards[0].layout

    @property
    def high_latency(self) -> bool:
        return any(shard.high_latency for shard in self.shards)

    @cached_property
    def homes(self) -> Mapping[str, Network]:
        """The shard of each stored tensor."""
        return {name: shard for shard in self.shards for name in shard.header.tensors}

    def open(self, level: LevelNumber = "dense", only: TensorInfo | None = None) -> TensorBytes:
        self.need(level)
        return _ShardedBytes(self, level, only)

    def place(self, stored: str) -> tuple[str, int]:
        return self.homes[stored].place(stored)

    def mapped(self, stored: str) -> NDArray[np.uint8] | None:
        return self.homes[stored].mapped(stored)

    def need(self, level: LevelNumber) -> None:
        for shard in self.shards:
            shard.need(level)

    def checksum(self, stored: str, level: LevelNumber) -> str | None:
        return self.homes[stored].checksum(stored, level)

    @property
    def available(self) -> Sequence[LevelNumber]:
        return min((shard.available for shard in self.shards), key=len)

    @property
    def digests(self) -> Sequence[tuple[Iterable[str], str]]:
        return [*super().digests, *(own for shard in self.shards for own in shard.digests)]

    @property
    def downloads(self) -> Mapping[LevelNumber, int]:
        one = self.shards[0].downloads
        return {level: sum(shard.downloads[level] for shard in self.shards) for level in one}

    @property
    def file_size(self) -> int:
        return sum(shard.file_size for shard in self.shards)

    def holds(self, stored: str, level: LevelNumber) -> bool:
        return self.homes[stored].holds(stored, level)

    def with_counts(self, kept: Mapping[str, int]) -> Self:
        shards = [shard.with_counts(kept) for shard in self.shards]
        profile = join_levels(shards, self.profile.levels[0].digest)
        return replace(self, shards=shards, profile=profile)

    def check_unchanged(self) -> None:
        for shard in self.shards:
            shard.check_unchanged()

    def close(self) -> None:
        """Close the files."""
        for shard in self.shards:
            shard.close()


class _ShardedBytes(TensorBytes):
    """Goes from shard to shard."""

    def __init__(self, network: ShardedNetwork, *wanted: Any) -> None:
        self._network, self._wanted = network, wanted
        self._shard: Network | None = None
        self._bytes: TensorBytes | None = None

    def seek(self, info: TensorInfo) -> Fillable:
        shard = self._network.homes[info.name]
        if self._bytes is None or shard is not self._shard:
            self.close()
            self._shard, self._bytes = shard, shard.open(*self._wanted)
        return self._bytes.seek(info)

    def finish(self) -> None:
        if self._bytes is not None:
            self._bytes.finish()

    def close(self) -> None:
        if self._bytes is not None:
            self._bytes.close()
            self._bytes = None


def join_headers(shards: Sequence[Network]) -> Header:
    """The tensors and metadata of several files; of two values the first's counts (spec §10.1)."""
    tensors: dict[str, TensorInfo] = {}
    metadata: dict[str, str] = {}
    for shard in shards:
        tensors |= shard.header.tensors
        metadata = {**shard.header.metadata, **metadata}
    if shards[0].layout != "dense":  # as one file of this layout has them
        tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].dtype.size))
    size = sum(shard.header.data_start for shard in shards)
    return VirtualHeader(tensors, metadata, b"", headers_size=size)


def join_levels(shards: Sequence[Network], digest: str | None) -> Profile:
    """The profile of a level file in shards; the digest of the whole is the index's to know."""
    first = shards[0].profile
    found = [shard.profile.levels[0].nonzero for shard in shards]
    known = [count for count in found if count is not None]
    nonzero = sum(known) if len(known) == len(found) else None
    level = replace(first.levels[0], nonzero=nonzero, digest=digest)
    nested = {name: n for shard in shards for name, n in shard.profile.nested.items()}
    return replace(first, levels=(level,), nested=nested)
