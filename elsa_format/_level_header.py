"""What the file of a level will look like, from the network's header alone (spec §9)."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import cached_property

from elsa_format import _level_document
from elsa_format._container import (
    ALIGNMENT,
    LENGTH_BYTES,
    TensorInfo,
    lay_out,
    place,
    serialize,
)
from elsa_format._container.json import dump
from elsa_format._layouts import LAYOUTS, LayoutName
from elsa_format._network import Network
from elsa_format._profile import LevelNumber


def level_tensors(
    network: Network, level: LevelNumber, layout: LayoutName, names: Collection[str] | None = None
) -> dict[str, TensorInfo]:
    """The tensors of a level file, each in its place, from the header alone.

    Those of some `names` only, where the file is a shard.
    """
    infos: list[TensorInfo] = []
    for planned in network.plan(level):
        if planned.name is None or (names is not None and planned.name not in names):
            continue
        info = replace(planned.info, name=planned.name)
        if planned.mask is None:
            infos.append(info)
        else:
            infos += LAYOUTS[layout].parts(info, planned.mask.expected)
    # Dense tensors keep the order they arrive in, so that a pipe needs no memory of them.
    return place(infos) if layout == "dense" else lay_out(infos)


def level_header(
    network: Network, level: LevelNumber, layout: LayoutName, names: Collection[str] | None = None
) -> tuple[bytes, dict[str, TensorInfo]]:
    """The bytes before the data of a level file, and where its tensors go."""
    metadata = network.metadata
    if level != "dense":
        nested = {
            name: network.header.tensors[name]
            for name in network.profile.nested
            if names is None or name in names
        }
        document = describe_level(network, level, layout, nested, shard=names is not None)
        metadata[_level_document.KEY] = document
    placed = level_tensors(network, level, layout, names)
    return serialize(placed, metadata), placed


def describe_level(
    network: Network,
    level: int,
    layout: LayoutName,
    nested: Mapping[str, TensorInfo],
    *,
    shard: bool = False,
) -> str:
    """What the file of a level says of itself; a shard does not know the digest of the whole."""
    whole = not shard and network.profile.shard is None
    entry = network.profile.level(level)
    return _level_document.describe(level, entry, layout, nested, digest=whole)


class LevelSizes:
    """Sizes of the files that `extract` would write, counted from the header without building them.

    Inspecting asks for every level in every layout, so what they share is counted once.
    """

    def __init__(self, network: Network) -> None:
        self.network = network
        self._names = {name: _json_size(name) for name in network.tensors}

    def size(self, level: LevelNumber, layout: LayoutName) -> int:
        """Bytes of the file of a level."""
        if layout == "dense" and not self.network.profile.per_level:
            text, data = self._dense  # levels differ in nothing but their description
        else:
            text, data = self._measure(level, layout)
        end = LENGTH_BYTES + self._metadata(level, layout) + text
        return end + -end % ALIGNMENT + data

    @cached_property
    def _dense(self) -> tuple[int, int]:
        return self._measure("dense", "dense")

    def _measure(self, level: LevelNumber, layout: LayoutName) -> tuple[int, int]:
        """Bytes of the tensors' entries in the header, and of their data."""
        pieces = list(self._pieces(level, layout))
        if layout != "dense":
            pieces.sort(key=lambda piece: -piece[0])  # as lay_out does
        text = position = 0
        for _, fixed, size in pieces:
            text += fixed + len(str(position)) + len(str(position + size))
            position += size
        return text, position

    def _pieces(self, level: LevelNumber, layout: LayoutName) -> Iterator[tuple[int, int, int]]:
        """Of every stored tensor: element width, bytes of its entry but offsets, bytes of data."""
        for planned in self.network.plan(level):
            name, info = planned.name, planned.info
            if name is None:
                continue
            if planned.mask is None or layout == "dense":
                yield info.dtype.size, _entry_size(self._names[name], info), info.nbytes
                continue
            for part in LAYOUTS[layout].parts(info, planned.mask.expected):
                extra = len(part.name) - len(name)  # the prefix needs no escape
                size = _entry_size(self._names[name] + extra, part)
                yield part.dtype.size, size, part.nbytes

    def _metadata(self, level: LevelNumber, layout: LayoutName) -> int:
        """Bytes of everything else in the header."""
        metadata = self.network.metadata
        if level != "dense":
            metadata[_level_document.KEY] = describe_level(self.network, level, layout, {})
        if not metadata:  # then no comma comes before the first tensor
            return len("{}") - bool(self._names)
        nested = self._nested_size if level != "dense" else 0
        return _json_size({"__metadata__": metadata}) + nested

    @cached_property
    def _nested_size(self) -> int:
        """Bytes of the list of nested tensors in a level's description, as a string in JSON."""
        network = self.network
        infos = {name: network.header.tensors[name] for name in network.profile.nested}
        return _json_size(dump(_level_document.describe_nested(infos))) - _json_size("{}")


def _entry_size(name: int, info: TensorInfo) -> int:
    """Bytes of `,"name":{"dtype":"F32","shape":[1,2],"data_offsets":[,]}`."""
    shape = len(str(info.shape)) - max(len(info.shape) - 1, len(info.shape) == 1)
    return name + shape + len(info.dtype.name) + len(',:{"dtype":"","shape":,"data_offsets":[,]}')


def _json_size(value: object) -> int:
    return len(dump(value).encode("utf-8"))
