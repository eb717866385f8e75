"""Open a network: an ELSA file, a level file, a delivery file, or the shards of any of them."""

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from elsa_format import _level_document, _profile
from elsa_format._container import Header, check_size, read_header
from elsa_format._container.index import Index, is_index
from elsa_format._delivery.document import is_delivery
from elsa_format._directory import weights_file
from elsa_format._errors import CountMismatch, InvalidIndex
from elsa_format._level_document import LevelFile
from elsa_format._network.base import Kind, Network
from elsa_format._network.level import LevelNetwork, level_network
from elsa_format._network.sharded import ShardedNetwork, join_headers, join_levels
from elsa_format._network.stored import StoredNetwork
from elsa_format._options import Limit, renamed
from elsa_format._profile import KEY, Profile, join_profiles
from elsa_format._storage import Source, open_storage
from elsa_format._storage.shards import read_index, shard_source

ParseLevel = Callable[[Header, str], LevelFile | None]


def open_network(
    source: Source,
    *,
    sequential: bool = False,
    max_bytes: int | None = None,
    along: bool | None = None,
) -> Network:
    """The network at a path or URL, of a file, an index or a model directory, or in a stream.

    A stream that is read sequentially need not seek. Headers, or tensors, of more than `max_bytes`
    are refused before there is memory for them.
    """
    if along is not None:
        renamed("along=", "sequential=")
        sequential = along
    return _open(source, _Opener(Limit(max_bytes), sequential=sequential))


def open_level(
    source: Source,
    parse: ParseLevel = _level_document.parse,
    *,
    sequential: bool = False,
    max_bytes: int | None = None,
) -> Network:
    """A level file, or a plain checkpoint, and nothing else."""
    return _open(source, _Opener(Limit(max_bytes), "level", parse, sequential=sequential))


def _open(source: Source, opener: "_Opener") -> Network:
    source = weights_file(source)
    if is_index(source):
        network = join_shards(source, *read_index(source, opener.limit), opener)
    else:
        network = opener(source)
    try:
        opener.limit.tensors(network.header.data_size, network.name)
    except BaseException:
        network.close()
        raise
    return network


class _Opener:
    """Opens files; those after the first as what the first of them is."""

    def __init__(
        self,
        limit: Limit,
        kind: Kind | None = None,
        parse_level: ParseLevel = _level_document.parse,
        *,
        sequential: bool = False,
    ) -> None:
        self.limit, self._kind = limit, kind
        self._parse_level, self._sequential = parse_level, sequential

    def __call__(self, source: Source) -> Network:
        storage = open_storage(source, sequential=self._sequential)
        try:
            header = read_header(storage.front(), storage.name, self.limit)
            self._kind = self._check_kind(header, storage.name)
            if self._kind == "delivery":
                from elsa_format._network.delivery import delivery_network  # most files are none

                return delivery_network(storage, header, self.limit)
            parsed = self._parse(header, storage.name)
            check_size(header, storage.size, storage.name)
            if isinstance(parsed, Profile):
                return StoredNetwork(storage.name, header, parsed, storage=storage)
            return level_network(storage, header, parsed)
        except BaseException:
            storage.close()
            raise

    def _check_kind(self, header: Header, where: str) -> Kind:
        if self._kind == "level":  # parsing refuses all others
            return "level"
        delivered = is_delivery(header)
        if self._kind is not None and delivered != (self._kind == "delivery"):
            raise InvalidIndex(f"{where}: of its shards, some are delivery files, not all")
        if self._kind is not None or delivered:
            return self._kind or "delivery"
        level = KEY not in header.metadata and _level_document.KEY in header.metadata
        return "level" if level else "elsa"

    def _parse(self, header: Header, where: str) -> Profile | LevelFile | None:
        return (self._parse_level if self._kind == "level" else _profile.parse)(header, where)


# --- Shards --------------------------------------------------------------------------------------


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
    stated = _level_document.of_index(index, where)
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
        key = _level_document.KEY
        raise InvalidIndex(f"{where} has no {key}, which all shards of a level have")
    if (level.level, level.name, level.layout) != (whole.level, whole.name, whole.layout):
        raise InvalidIndex(
            f"{where} holds level {level.level} {level.name!r} as {level.layout}, "
            f"expected level {whole.level} {whole.name!r} as {whole.layout}"
        )
