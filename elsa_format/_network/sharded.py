"""The shards of a network, of whatever kind, as one network (spec §10)."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from elsa_format._container import Header, Kind, TensorInfo, VirtualHeader
from elsa_format._container.index import Index
from elsa_format._errors import CountMismatch, InvalidIndex
from elsa_format._layouts import LayoutName
from elsa_format._network.base import Network, TensorBytes
from elsa_format._network.level import KEY, LevelFile, LevelNetwork, level_of_index
from elsa_format._profile import LevelNumber, Profile, join_profiles
from elsa_format._storage import Fillable, Source
from elsa_format._storage.shards import shard_source


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


# --- Opening -------------------------------------------------------------------------------------


def join_shards(
    source: Source, index: Index, where: str, open_shard: Callable[[Source], Network]
) -> Network:
    """The network of an index that was read: its shards fit it and each other."""
    sources = {file: shard_source(source, file) for file in index.files}
    for file, path in sources.items():
        if isinstance(path, Path) and not os.path.isfile(path):
            raise InvalidIndex(f"{where}: shard {file!r} does not exist")
    shards: dict[str, Network] = {}
    try:
        for file, path in sources.items():
            shards[file] = open_shard(path)
        _check_map(index, shards, where)
        levels = {f: shard for f, shard in shards.items() if isinstance(shard, LevelNetwork)}
        joined = (
            _join_levels(where, levels, index) if levels else _join_networks(where, shards, index)
        )
        return replace(joined, extra_metadata=index.extra_metadata)
    except BaseException:
        for shard in shards.values():
            shard.close()
        raise


def _check_map(index: Index, shards: Mapping[str, Network], where: str) -> None:
    stored = {}
    for file, shard in shards.items():
        for name in shard.stored_header.tensors:
            listed = index.weight_map.get(name)
            if listed is None:
                raise InvalidIndex(f"{where}: tensor {name!r} of {file!r} is not in the index")
            if listed != file:
                raise InvalidIndex(
                    f"{where}: tensor {name!r} is in {file!r}, the index says {listed!r}"
                )
            stored[name] = file
    for name, file in index.weight_map.items():
        if name not in stored:
            raise InvalidIndex(f"{where}: tensor {name!r} is not in {file!r}")


def _check_total_size(index: Index, shards: Mapping[str, Network], where: str) -> None:
    """Compare the size that the index states, if it does, with that of the tensors."""
    found = sum(shard.stored_header.data_size for shard in shards.values())
    stated = index.metadata.get("total_size", found)
    if type(stated) is not int or stated != found:
        raise InvalidIndex(f"{where}: total_size {stated!r}, but the tensors have {found} bytes")


def _join_networks(where: str, shards: Mapping[str, Network], index: Index) -> ShardedNetwork:
    """The shards of an ELSA network by their numbers, and the profile of the whole."""
    count, (first_file, first) = len(shards), next(iter(shards.items()))
    numbers: dict[int, Network] = {}
    for file, shard in shards.items():
        profile = shard.profile
        number, of = profile.shard or (0, 0)
        if of != count or number in numbers:
            raise InvalidIndex(
                f"{where}: {file!r} is shard {number} of {of}, expected 1..{count} "
                f"of {count}, each once"
            )
        numbers[number] = shard
        if (profile.bits, profile.levels) != (first.profile.bits, first.profile.levels):
            raise InvalidIndex(f"{where}: {file!r} has other levels than {first_file!r}")
    _check_total_size(index, shards, where)
    ordered = [numbers[number] for number in sorted(numbers)]
    profile = join_profiles([shard.profile for shard in ordered])
    for t, level in enumerate(profile.levels):
        kept = sum(counts[t] for counts in profile.nested.values())
        if kept != level.nonzero:
            raise CountMismatch(
                f"{where}: level {t + 1}: nonzero {level.nonzero}, but its tensors keep {kept}"
            )
    own = [replace(shard, profile=profile) for shard in ordered]
    return ShardedNetwork(where, join_headers(own), profile, shards=own)


def _join_levels(where: str, shards: Mapping[str, LevelNetwork], index: Index) -> ShardedNetwork:
    """The level, or checkpoint, that shards sorted by file name hold together (spec §10.3)."""
    stated = level_of_index(index, where)
    documents = [shard.document for shard in shards.values()]
    whole = stated or next(filter(None, documents), None)
    homes: dict[str, str] = {}
    for file, shard in shards.items():
        if whole is not None:
            _refuse_other(shard.document, whole, f"{where}: {file!r}")
        for name in shard.tensors:
            if homes.setdefault(name, file) != file:
                raise InvalidIndex(
                    f"{where}: tensor {name!r} is in both {homes[name]!r} and {file!r}"
                )
    if whole is not None:
        _check_total_size(index, shards, where)
    told = all(document and document.tensors is not None for document in documents)
    digest = stated.digest if stated and told else None
    own = list(shards.values())
    return ShardedNetwork(where, join_headers(own), join_levels(own, digest), shards=own)


def _refuse_other(level: LevelFile | None, whole: LevelFile, where: str) -> None:
    """Refuse a shard that holds something else than the others."""
    if level is None:
        raise InvalidIndex(f"{where} has no {KEY}, which all shards of a level have")
    if (level.level, level.name, level.layout) != (whole.level, whole.name, whole.layout):
        raise InvalidIndex(
            f"{where} holds level {level.level} {level.name!r} as {level.layout}, "
            f"expected level {whole.level} {whole.name!r} as {whole.layout}"
        )
