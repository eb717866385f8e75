"""Networks: tensors that are read by name, whatever holds them; one kind a module.

What a path, a URL or a stream holds is opened here: an ELSA file, a level file, a delivery file, or
the shards of any of them.
"""

from collections.abc import Callable

from elsa_format import _profile
from elsa_format._container import Header, Kind, check_size, read_header
from elsa_format._container.index import is_index
from elsa_format._directory import weights_file
from elsa_format._errors import InvalidIndex
from elsa_format._network.base import Network, PlannedTensor, TensorBytes
from elsa_format._network.level import LevelFile, level_network, parse_level
from elsa_format._network.sharded import join_shards
from elsa_format._network.stored import StoredNetwork
from elsa_format._options import Limit, renamed
from elsa_format._profile import Profile
from elsa_format._storage import Source, open_storage
from elsa_format._storage.shards import read_index

__all__ = ["Network", "PlannedTensor", "TensorBytes", "join_shards", "open_level", "open_network"]

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
    parse: ParseLevel = parse_level,
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
        parse_level: ParseLevel = parse_level,
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
        first, kind = self._kind, header.kind
        # As a level file, parsing refuses all others.
        if first != kind and (first == "delivery" or (first == "elsa" and kind == "delivery")):
            raise InvalidIndex(f"{where}: of its shards, some are delivery files, not all")
        return first or kind

    def _parse(self, header: Header, where: str) -> Profile | LevelFile | None:
        return (self._parse_level if self._kind == "level" else _profile.parse)(header, where)
