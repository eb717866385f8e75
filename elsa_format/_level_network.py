"""A level file, or the shards of one, as the network it stands for (spec §9, §10.3).

Its tensors are read as if they were stored dense, so that whatever reads a network reads a level
file too: the parts of a sparse layout are put together block by block.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from elsa_format._container.header import (
    RESERVED,
    Header,
    TensorInfo,
    VirtualHeader,
    check_size,
    lay_out,
)
from elsa_format._errors import InvalidLayout, NoSuchLevel, Truncated
from elsa_format._kept import NOT_ZERO
from elsa_format._layouts import FORMS, Elements, Nested, part_name
from elsa_format._layouts.base import Decoder
from elsa_format._level_document import LevelFile
from elsa_format._network import Network
from elsa_format._profile import Level, LevelLike, Profile, find_level
from elsa_format._storage import Reader, SpooledStorage, Storage
from elsa_format._storage.virtual import TensorBytes, VirtualStorage

VALUES = part_name("values", "")
"""How the parts that every sparse layout has are called."""


@dataclass(frozen=True, eq=False)
class LevelNetwork(Network):
    """One level and nothing else; in its profile it is level 1, whatever its number was."""

    document: LevelFile = field(kw_only=True)
    stored: Header = field(kw_only=True)
    """The header of the file itself."""
    groups: Sequence[Sequence[str]] = field(kw_only=True)
    digests: Sequence[tuple[Sequence[str], str]] = field(kw_only=True)
    """What shards state of their own tensors."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """All of them: no name is reserved in a plain checkpoint."""
        return self.header.tensors

    @property
    def file_size(self) -> int:
        return self.stored.data_start + self.stored.data_size

    def level_number(self, level: LevelLike) -> int | None:
        """1, if that is the level in this file."""
        held, name = self.document.level, self.document.name
        names = [""] * (held - 1) + [name]
        try:
            found = find_level(level, names)
        except NoSuchLevel:
            found = None
        if found != held:
            raise NoSuchLevel(f"{self.name}: no level {level!r}, it holds level {held} ({name})")
        return 1

    def readable(self) -> list[int | None]:
        """The one in this file."""
        return [1]

    def only_level(self) -> int | None:
        """The one in this file."""
        return 1

    def stated(self, level: int | None) -> int:
        return self.document.level

    def nested(self, info: TensorInfo, level: int | None) -> Nested | None:
        """All that is not zero: a level file does not tell τ, and its counters are not checked."""
        counts = self.profile.nested.get(info.name)
        if counts is None:
            return None
        return Nested(info, NOT_ZERO, NOT_ZERO, sum(counts), self.name)

    @property
    def limits(self) -> Sequence[int]:
        """None: all that is not zero is kept."""
        return (NOT_ZERO,)

    def with_counts(self, kept: Mapping[str, int]) -> "LevelNetwork":
        """The same with the profile's counts, which somebody found out."""
        return replace(self, profile=_profile(self.document, kept))


def _profile(document: LevelFile, kept: Mapping[str, int] | None) -> Profile:
    """A profile of one level; without counts, where they or the nested tensors are unknown."""
    names = document.tensors
    nonzero = None if kept is None or names is None else sum(kept.values())
    level = Level(document.name, nonzero, digest=document.digest)
    counts = {name: () if kept is None else (kept[name],) for name in names or {}}
    return Profile(NOT_ZERO, (level,), counts)


def level_network(
    storage: Storage,
    header: Header,
    document: LevelFile | None,
    *,
    groups: Sequence[Sequence[str]] = (),
    digests: Sequence[tuple[Sequence[str], str]] = (),
) -> LevelNetwork:
    """The network of a parsed level file; a checkpoint without a document is one without levels."""
    document = document or LevelFile(1, "", "dense", None, None)
    if document.tensors is None:
        document = replace(document, digest=None)  # which nobody can compute
    seen, kept = header, None
    if document.layout != "dense":
        assert document.tensors is not None
        parts = {name: part_name("values", name) for name in document.tensors}
        kept = {name: header.tensors[part].elements for name, part in parts.items()}
        if storage.size is None:
            storage = SpooledStorage(storage, header.data_start)
            check_size(header, storage.size, storage.name)
        view = SparseView(storage, header, document)
        storage, seen = view, view.header
    return LevelNetwork(
        storage,
        seen,
        _profile(document, kept),
        document=document,
        stored=header,
        groups=groups or [list(seen.tensors)],
        digests=digests,
    )


class SparseView(VirtualStorage):
    """A level in a sparse layout, as if its tensors were dense."""

    def __init__(self, storage: Storage, header: Header, document: LevelFile) -> None:
        assert document.tensors is not None
        self.name, self._storage, self._stored = storage.name, storage, header
        self._form, self._nested = FORMS[document.layout], document.tensors
        self.high_latency = storage.high_latency
        infos = {}
        for stored in header.tensors.values():  # where its values are, there a tensor was
            if stored.name.startswith(VALUES):
                name = stored.name.removeprefix(VALUES)
                infos[name] = self._nested[name]
            elif not stored.name.startswith(RESERVED):
                infos[stored.name] = stored
        self.header: Header = VirtualHeader(
            lay_out(infos.values()), header.metadata, b"", headers_size=header.data_start
        )

    def tensor(self, info: TensorInfo) -> TensorBytes:
        """Put a tensor together of its parts, or read it as it is stored."""
        return self._sparse(info) if info.name in self._nested else self._read(info)

    def _read(self, info: TensorInfo) -> Reader:
        """The bytes of a tensor of the file itself."""
        start = self._stored.data_start + self._stored.tensors[info.name].start
        return self._storage.reader(start, start + info.nbytes)

    def _sparse(self, info: TensorInfo) -> "_SparseTensor":
        kept = self._stored.tensors[part_name("values", info.name)].elements
        parts = self._form.parts(info, kept)
        opened = [(part, self._read(part)) for part in parts]
        return _SparseTensor(f"{self.name}: tensor {info.name!r}", info, opened, self._form.decoder)

    def check_unchanged(self) -> None:
        """Look at the parts of empty tensors, too, which nobody reads."""
        for name in self._nested:
            info = self.header.tensors[name]
            if not info.nbytes:
                with contextlib.closing(self._sparse(info)) as tensor:
                    tensor.finish()
        self._storage.check_unchanged()

    def close(self) -> None:
        self._storage.close()


class _SparseTensor:
    """One tensor, read along."""

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
