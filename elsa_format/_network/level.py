"""A level file: what it says of itself (spec §9.1), and the network it stands for.

Its tensors are read as if they were stored dense, so that whatever reads a network reads a level
file too: the parts of a sparse layout are put together block by block.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from elsa_format._container import (
    RESERVED,
    Header,
    Kind,
    TensorInfo,
    VirtualHeader,
    check_size,
    lay_out,
)
from elsa_format._container.dtypes import DTYPES
from elsa_format._container.index import Index
from elsa_format._container.json import MAX_OFFSET, check_version, parse_document
from elsa_format._counters import MAX_LEVELS, NOT_ZERO
from elsa_format._errors import (
    FormatError,
    InvalidIndex,
    InvalidLayout,
    InvalidOption,
    NotElsa,
    Truncated,
)
from elsa_format._layouts import LAYOUT_NAMES, LAYOUTS, Elements, LayoutName, part_name
from elsa_format._layouts.base import Decoder
from elsa_format._network.base import TensorBytes
from elsa_format._network.stored import StoredNetwork
from elsa_format._profile import DIGEST, Level, LevelNumber, Profile
from elsa_format._profile import KEY as PROFILE_KEY
from elsa_format._storage import Closing, Reader, Storage
from elsa_format._storage.local import SpooledStorage

VALUES = part_name("values", "")
"""How the parts that every sparse layout has are called."""

KEY = "elsa_level"
_OTHERS = {PROFILE_KEY: "an ELSA file", "elsa_delivery": "a delivery file"}


@dataclass(frozen=True)
class LevelFile:
    """What a level file says about itself, or the index of its shards about the whole."""

    level: int
    name: str
    layout: LayoutName
    digest: str | None
    tensors: dict[str, TensorInfo] | None
    """The nested tensors, dense; None if they are not told, and no digest can be."""


def parse_level(header: Header, where: str) -> LevelFile | None:
    """The description in a header, checked against the tensors; None for a plain checkpoint."""
    for key, kind in _OTHERS.items():
        if key in header.metadata:
            raise InvalidLayout(
                f"{where}: is {kind}, not a level file; elsa_format.open(...).load(level) gives a "
                "level of it"
            )
    text = header.metadata.get(KEY)
    if text is None:
        for name in header.tensors:
            if name.startswith(RESERVED):
                raise NotElsa(
                    f"{where}: tensor {name!r} has a reserved name, but the metadata has no {KEY}: "
                    "neither a level file nor a checkpoint"
                )
        return None
    document = parse_document(text, f"{where}: {KEY}")
    level, name, layout, digest = _fields(document, f"{where}: {KEY}", InvalidLayout)
    entries: Any = document.get("tensors", {} if layout == "dense" else None)
    if not isinstance(entries, dict):
        raise InvalidLayout(f"{where}: {KEY}: tensors is not an object")
    tensors = {key: _entry(key, entry, where) for key, entry in entries.items()}
    expected = set()
    for key, tensor in tensors.items():
        values = header.tensors.get(part_name("values", key))
        kept = values.elements if values else 0
        for info in LAYOUTS[layout].parts(tensor, kept):
            found = header.tensors.get(info.name)
            if found is None or (found.dtype, found.shape) != (info.dtype, info.shape):
                raise InvalidLayout(
                    f"{where}: tensor {key!r}: part {info.name!r} is missing or has another shape"
                )
            expected.add(info.name)
    for stored in header.tensors:
        if stored not in expected and (stored.startswith(RESERVED) or stored in tensors):
            raise InvalidLayout(f"{where}: tensor {stored!r} is not part of a sparse tensor")
    return LevelFile(level, name, layout, digest, tensors if "tensors" in document else None)


def _fields(
    document: Mapping[str, Any], where: str, malformed: type[FormatError]
) -> tuple[int, str, LayoutName, str | None]:
    """Level, name, layout and digest, of a level file or in the index of its shards."""
    check_version(document, where, malformed)
    level, name = document.get("level"), document.get("name")
    layout, digest = document.get("layout"), document.get("digest")
    if layout not in LAYOUT_NAMES or type(level) is not int or not 1 <= level <= MAX_LEVELS:
        raise malformed(f"{where} needs a level 1..{MAX_LEVELS} and one of {LAYOUT_NAMES}")
    if not isinstance(name, str) or not name:
        raise malformed(f"{where}: name is not a non-empty string")
    if "digest" in document and not (isinstance(digest, str) and DIGEST.fullmatch(digest)):
        raise malformed(f"{where}: digest is not sha256: and 64 hex digits")
    return level, name, layout, digest


def _entry(name: str, entry: Any, where: str) -> TensorInfo:
    dtype = DTYPES.get(str(entry.get("dtype"))) if isinstance(entry, dict) else None
    shape = entry.get("shape") if dtype else None
    if (
        dtype is None
        or not dtype.nestable
        or not isinstance(shape, list)
        or not all(type(n) is int and n >= 0 for n in shape)
        or name.startswith(RESERVED)
    ):
        raise InvalidLayout(f"{where}: tensor {name!r}: expected a floating dtype and a shape")
    if math.prod(n for n in shape if n) * dtype.size > MAX_OFFSET:
        raise InvalidLayout(f"{where}: tensor {name!r}: shape overflows")
    return TensorInfo(name, dtype, tuple(shape))


def level_of_index(index: Index, where: str) -> LevelFile | None:
    """What the index of a level's shards says about the whole, if it does."""
    if KEY not in index.metadata:
        return None
    document = index.metadata[KEY]
    if not isinstance(document, dict):
        raise InvalidIndex(f"{where}: {KEY} is not an object")
    return LevelFile(*_fields(document, f"{where}: {KEY}", InvalidIndex), None)


# --- The network ---------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class LevelNetwork(StoredNetwork):
    """One level and nothing else, its tensors dense."""

    document: LevelFile | None = field(kw_only=True)
    """What the file says of itself; a plain checkpoint says nothing."""

    @property
    def kind(self) -> Kind:
        return "level"

    def with_counts(self, kept: Mapping[str, int]) -> Self:
        if self.document is None or self.document.tensors is None:
            return self  # which tensors are nested, it does not tell
        counts = {name: kept[name] for name in self.profile.nested}
        level = replace(self.profile.levels[0], nonzero=sum(counts.values()))
        nested = {name: (count,) for name, count in counts.items()}
        return replace(self, profile=replace(self.profile, levels=(level,), nested=nested))


@dataclass(frozen=True, eq=False)
class SparseNetwork(LevelNetwork):
    """One level whose nested tensors are stored in a sparse layout."""

    document: LevelFile = field(kw_only=True)
    own_header: Header = field(kw_only=True)

    @property
    def layout(self) -> LayoutName:
        return self.document.layout

    @property
    def stored_header(self) -> Header:
        return self.own_header

    @property
    def file_size(self) -> int:
        return self.own_header.data_start + self.own_header.data_size

    def place(self, stored: str) -> tuple[str, int]:
        if stored in self.profile.nested:
            raise InvalidOption(
                f"{self.name}: holds {stored!r} as {self.layout}; elsa-extract --layout dense "
                "gives a file that has it as it is"
            )
        return super().place(stored)

    def mapped(self, stored: str) -> NDArray[np.uint8] | None:
        return None if stored in self.profile.nested else super().mapped(stored)

    def open(self, level: LevelNumber = "dense", only: TensorInfo | None = None) -> TensorBytes:
        return _SparseBytes(self)


def level_network(storage: Storage, header: Header, document: LevelFile | None) -> LevelNetwork:
    """The network of a parsed level file; a checkpoint without a document is one without levels."""
    stated = document or LevelFile(1, "", "dense", None, None)
    nested = stated.tensors or {}
    digest = None if stated.tensors is None else stated.digest  # which else nobody can compute
    level = Level(stated.name, None, digest=digest, number=stated.level)
    profile = Profile(NOT_ZERO, (level,), dict.fromkeys(nested, ()))
    if document is None or document.layout == "dense":
        return LevelNetwork(storage.name, header, profile, storage=storage, document=document)
    if storage.size is None:
        storage = SpooledStorage(storage, header.data_start)
        check_size(header, storage.keep(), storage.name)
    network = SparseNetwork(
        storage.name,
        _dense_header(header, nested),
        profile,
        storage=storage,
        document=document,
        own_header=header,
    )
    values = {name: header.tensors[part_name("values", name)] for name in nested}
    return network.with_counts({name: info.elements for name, info in values.items()})


def _dense_header(header: Header, nested: Mapping[str, TensorInfo]) -> Header:
    """The tensors of a sparse layout as if they were dense, where their values are."""
    infos = []
    for stored in header.tensors.values():
        if stored.name.startswith(VALUES):
            infos.append(nested[stored.name.removeprefix(VALUES)])
        elif not stored.name.startswith(RESERVED):
            infos.append(stored)
    return VirtualHeader(lay_out(infos), header.metadata, b"", headers_size=header.data_start)


class _SparseBytes(TensorBytes):
    """Puts a tensor together of its parts, or reads it as it is stored."""

    def __init__(self, network: SparseNetwork) -> None:
        self._network, self._form = network, LAYOUTS[network.layout]
        self._tensor: _SparseTensor | Reader | None = None

    def seek(self, info: TensorInfo) -> "_SparseTensor | Reader":
        self.close()
        nested = info.name in self._network.profile.nested
        self._tensor = self._sparse(info) if nested else self._read(info)
        return self._tensor

    def _read(self, info: TensorInfo) -> Reader:
        """The bytes of a tensor of the file itself."""
        header = self._network.own_header
        start = header.data_start + header.tensors[info.name].start
        return self._network.storage.reader(start, start + info.nbytes)

    def _sparse(self, info: TensorInfo) -> "_SparseTensor":
        (kept,) = self._network.profile.nested[info.name]
        opened = [(part, self._read(part)) for part in self._form.parts(info, kept)]
        where = f"{self._network.name}: tensor {info.name!r}"
        return _SparseTensor(where, info, opened, self._form.decoder)

    def finish(self) -> None:
        """Look at the parts of empty tensors, too, which nobody reads."""
        for name in self._network.profile.nested:
            info = self._network.header.tensors[name]
            if not info.nbytes:
                with self._sparse(info) as tensor:
                    tensor.finish()

    def close(self) -> None:
        if self._tensor is not None:
            self._tensor.close()
            self._tensor = None


class _SparseTensor(Closing):
    """One tensor, read sequentially."""

    def __init__(
        self,
        where: str,
        info: TensorInfo,
        opened: Sequence[tuple[TensorInfo, Reader]],
        decoder: type[Decoder],
    ) -> None:
        self._where, self._words, self._left = where, info.dtype.words, info.nbytes
        self._opened, elements = opened, {}
        for part, reader in opened:
            kind = part.name.split(".", 2)[1]
            dtype = part.dtype.words if kind == "values" else part.dtype.numpy
            assert dtype is not None
            elements[kind] = Elements(reader, dtype, part.elements)
        with self._naming():
            self._decoder = decoder(info, elements)

    def readinto(self, buffer: Any, /) -> int:
        """The next words, which fill the buffer."""
        words = np.frombuffer(buffer, np.uint8).view(self._words)
        with self._naming():
            self._decoder.decode(words)
        self._left -= words.nbytes
        if not self._left:
            self.finish()
        return words.nbytes

    def finish(self) -> None:
        """See that the parts hold no more."""
        with self._naming():
            self._decoder.finish()

    @contextlib.contextmanager
    def _naming(self) -> Iterator[None]:
        """Let errors say which tensor it is."""
        try:
            yield
        except (InvalidLayout, Truncated) as error:
            raise type(error)(f"{self._where}: {error}") from None

    def close(self) -> None:
        for _, reader in self._opened:
            reader.close()
