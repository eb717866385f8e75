"""Open a network: an ELSA file, a level file, or the shards of either, from whatever holds it."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from elsa_format import _level_document, _profile
from elsa_format._container.header import RESERVED, Header, TensorInfo, check_size, read_header
from elsa_format._container.index import Index, is_index
from elsa_format._delivery.document import is_delivery
from elsa_format._errors import CountMismatch, InvalidIndex, TooLarge
from elsa_format._level_document import LevelFile
from elsa_format._level_network import LevelNetwork, level_network
from elsa_format._network import Network
from elsa_format._options import whole
from elsa_format._profile import KEY, Profile, join_profiles
from elsa_format._storage import Source, Storage, open_storage
from elsa_format._storage.directory import weights_file
from elsa_format._storage.shards import Shard, Shards, check_total_size, open_parsed

Parsed = Profile | LevelFile | Network | None
Parse = Callable[[Header, str], Profile | LevelFile | None]


def open_network(source: Source, *, along: bool = False, max_bytes: int | None = None) -> Network:
    """The network at a path or URL, of a file, an index or a model directory, or in a stream.

    A stream that is read `along` need not seek. A header, or tensors, of more than `max_bytes` are
    refused before there is memory for them.
    """
    return _open(source, None, along, max_bytes)


def open_level(
    source: Source,
    parse: Callable[[Header, str], LevelFile | None] = _level_document.parse,
    *,
    along: bool = False,
    max_bytes: int | None = None,
) -> LevelNetwork:
    """A level file, or a plain checkpoint, and nothing else."""
    network = _open(source, parse, along, max_bytes)
    assert isinstance(network, LevelNetwork)
    return network


def _open(source: Source, parse: Parse | None, along: bool, max_bytes: int | None) -> Network:
    if max_bytes is not None:
        max_bytes = whole("max_bytes", max_bytes, low=0)
    source = weights_file(source)
    if is_index(source):
        return _limited(_open_shards(source, parse), max_bytes)
    storage, header, parsed = _open_file(source, parse, along=along, max_bytes=max_bytes)
    try:
        network: Network
        if isinstance(parsed, Network):
            network = parsed
        elif isinstance(parsed, Profile):
            network = Network(storage, header, parsed)
        else:
            network = level_network(storage, header, parsed)
    except BaseException:
        storage.close()
        raise
    return _limited(network, max_bytes)


def _open_file(
    source: Source,
    parse: Parse | None,
    *,
    delivery: bool | None = None,
    along: bool = False,
    max_bytes: int | None = None,
) -> tuple[Storage, Header, Parsed]:
    """A file: its bytes, its header, and what that says; by itself if nobody says what to expect.

    Of a delivery file it is the bytes and the header of what it was made of; among shards, all are
    delivery files or none is (delivery-1.0 ELSA-D-042).
    """
    storage = open_storage(source, along=along)
    try:
        header = read_header(storage.front(), storage.name, max_bytes)
        elsa = KEY in header.metadata
        delivered = is_delivery(header) and parse in (None, _profile.parse)
        if delivery not in (None, delivered):
            raise InvalidIndex(f"{storage.name}: of its shards, some are delivery files, not all")
        if delivered:
            from elsa_format._delivery.network import delivery_network  # most files are none

            network = delivery_network(storage, header)
            return network.storage, network.header, network
        if parse is None:
            level = not elsa and _level_document.KEY in header.metadata
            parse = _level_document.parse if level else _profile.parse
        parsed = parse(header, storage.name)
        check_size(header, storage.size, storage.name)
    except BaseException:
        storage.close()
        raise
    return storage, header, parsed


class _Kind:
    """Opens shards as what the first of them is."""

    def __init__(self, parse: Parse | None) -> None:
        self._parse = parse
        self._delivery: bool | None = None

    def __call__(self, source: Source) -> tuple[Storage, Header, Parsed]:
        opened = _open_file(source, self._parse, delivery=self._delivery)
        self._delivery = isinstance(opened[2], Network)
        if self._parse is None:
            level = isinstance(opened[2], LevelFile)
            self._parse = _level_document.parse if level else _profile.parse
        return opened


def _limited(network: Network, max_bytes: int | None) -> Network:
    if max_bytes is None:
        return network
    size = network.header.data_size
    if size > max_bytes:
        network.close()
        raise TooLarge.of(f"{network.name}: tensors of {size} bytes", max_bytes)
    return network


def _open_shards(source: Source, parse: Parse | None) -> Network:
    shards, index, parsed = open_parsed(source, _Kind(parse))
    try:
        return replace(_join(shards, index, parsed), about=index.about)
    except BaseException:
        shards.close()
        raise


def _join(shards: Shards, index: Index, parsed: Mapping[str, Parsed]) -> Network:
    """The network that shards are, whatever they are."""
    deliveries = {file: it for file, it in parsed.items() if isinstance(it, Network)}
    if deliveries:
        return _join_deliveries(shards, index, deliveries)
    profiles = {file: it for file, it in parsed.items() if isinstance(it, Profile)}
    if profiles:
        return _join_networks(shards, index, profiles)
    levels = {f: it for f, it in parsed.items() if it is None or isinstance(it, LevelFile)}
    return _join_levels(shards, index, levels)


def _join_deliveries(shards: Shards, index: Index, files: Mapping[str, Network]) -> Network:
    """Delivery files in the place of shards (delivery-1.0 ELSA-D-042)."""
    from elsa_format._delivery.network import DeliveryShards

    whole = _join_networks(shards, index, {file: it.profile for file, it in files.items()})
    assert isinstance(whole.storage, Shards)
    order = [shard.file for shard in whole.storage.shards]
    own = tuple(replace(files[file], profile=whole.profile) for file in order)
    return DeliveryShards(whole.storage, whole.header, whole.profile, own, files=order)


def _join_networks(shards: Shards, index: Index, profiles: Mapping[str, Profile]) -> Network:
    """The shards of an ELSA network by their numbers, and the profile of the whole."""
    where, count = shards.name, len(shards.shards)
    first = profiles[shards.shards[0].file]
    numbers: dict[int, Shard] = {}
    for shard in shards.shards:
        profile = profiles[shard.file]
        number, of = profile.shard or (0, 0)
        if of != count or number in numbers:
            raise InvalidIndex(
                f"{where}: {shard.file!r} is shard {number} of {of}, expected 1..{count} "
                f"of {count}, each once"
            )
        numbers[number] = shard
        if (profile.bits, profile.levels) != (first.bits, first.levels):
            raise InvalidIndex(
                f"{where}: {shard.file!r} has other levels than {shards.shards[0].file!r}"
            )
    check_total_size(index, shards)
    ordered = [numbers[number] for number in sorted(numbers)]
    profile = join_profiles([profiles[shard.file] for shard in ordered])
    for t, level in enumerate(profile.levels):
        kept = sum(counts[t] for counts in profile.nested.values())
        if kept != level.nonzero:
            raise CountMismatch(
                f"{where}: level {t + 1}: nonzero {level.nonzero}, but its tensors keep {kept}"
            )
    joined = Shards(where, ordered)
    files = tuple(Network(shard.storage, shard.header, profile) for shard in ordered)
    return Network(joined, joined.header, profile, files)


def _join_levels(
    shards: Shards, index: Index, documents: Mapping[str, LevelFile | None]
) -> LevelNetwork:
    """The level, or checkpoint, that shards sorted by file name hold together (spec §10.3)."""
    where = shards.name
    stated = _level_document.of_index(index, where)
    whole = stated or next(filter(None, documents.values()), None)
    homes: dict[str, str] = {}
    nested: dict[str, TensorInfo] = {}
    groups, digests = [], []
    for shard in shards.shards:
        file, level = shard.file, documents[shard.file]
        if whole is not None:
            _refuse_other(level, whole, f"{where}: {file!r}")
        own = (level and level.tensors) or {}
        plain = [name for name in shard.header.tensors if not name.startswith(RESERVED)]
        names = list(dict.fromkeys((*plain, *own)))
        for name in names:
            if homes.setdefault(name, file) != file:
                raise InvalidIndex(
                    f"{where}: tensor {name!r} is in both {homes[name]!r} and {file!r}"
                )
        groups.append(names)
        nested |= own
        if level and level.digest and level.tensors is not None:
            digests.append((names, level.digest))
    if whole is not None:
        check_total_size(index, shards)
        told = all(level and level.tensors is not None for level in documents.values())
        digest = stated.digest if stated else None
        whole = replace(whole, digest=digest, tensors=nested if told else None)
    return level_network(shards, shards.header, whole, groups=groups, digests=digests)


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
