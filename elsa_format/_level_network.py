"""A level file, or the shards of one, as the network it stands for (spec §9, §10.3).

Its tensors are read as if they were stored dense, so that whatever reads a network reads a level
file too: the parts of a sparse layout are put together block by block.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from elsa_format import _level_document
from elsa_format._container.header import (
    RESERVED,
    Header,
    Readable,
    TensorInfo,
    VirtualHeader,
    check_size,
    lay_out,
)
from elsa_format._errors import InvalidLayout, NoSuchLevel, Truncated
from elsa_format._kept import NOT_ZERO
from elsa_format._layouts import FORMS, Elements, Layout, Nested, part_name
from elsa_format._layouts.base import Decoder
from elsa_format._level_document import LevelFile
from elsa_format._memory import give_block, take_block
from elsa_format._network import Network
from elsa_format._profile import Level, LevelLike, Profile, find_level
from elsa_format._storage import Reader, SpooledStorage, Storage, fill

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
    counted: bool = field(kw_only=True)
    """Whether the profile's counts hold; in the dense layout only the data tells."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """All of them: no name is reserved in a plain checkpoint."""
        return self.header.tensors

    @property
    def file_size(self) -> int:
        """Bytes of the file, or of all shards."""
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

    def only_level(self) -> int | None:
        """The one in this file."""
        return 1

    def stated(self, level: int | None) -> int:
        """The level as it is told to people."""
        return self.document.level

    def nested(self, info: TensorInfo, level: int | None) -> Nested | None:
        """All that is not zero: a level file does not tell τ, and its counters are not checked."""
        counts = self.profile.nested.get(info.name)
        if counts is None:
            return None
        return Nested(info, NOT_ZERO, NOT_ZERO, counts[0], self.name)

    @property
    def limits(self) -> Sequence[int]:
        """None: all that is not zero is kept."""
        return (NOT_ZERO,)

    def describe(self, level: int, layout: Layout, nested: Mapping[str, TensorInfo]) -> str:
        """What the file of this level in another layout says of itself."""
        entry, whole = self.profile.levels[0], self.profile.shard is None
        return _level_document.describe(self.document.level, entry, layout, nested, digest=whole)

    def count(self) -> "LevelNetwork":
        """The same with the profile's counts, for which a dense file is read once more."""
        if self.counted:
            return self
        storage = self.storage
        if storage.size is None:
            storage = SpooledStorage(storage, self.header.data_start)
        kept = dict.fromkeys(self.profile.nested, 0)
        block = take_block()
        for name in kept:
            info = self.header.tensors[name]
            start = self.header.data_start + info.start
            reader = storage.reader(start, start + info.nbytes)
            for at in range(0, info.nbytes, block.size):
                part = block[: min(info.nbytes - at, block.size)]
                fill(reader, part.data)  # what is missing is noticed when it is read again
                kept[name] += int(np.count_nonzero(part.view(info.dtype.words)))
            reader.close()
        give_block(block)
        return replace(self, storage=storage, profile=_profile(self.document, kept), counted=True)


def _profile(document: LevelFile, kept: Mapping[str, int]) -> Profile:
    level = Level(document.name, sum(kept.values()), digest=document.digest)
    return Profile(NOT_ZERO, (level,), {name: (count,) for name, count in kept.items()})


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
    tensors = document.tensors or {}
    dense = document.layout == "dense"
    kept = dict.fromkeys(tensors, 0)
    seen = header
    if not dense:
        kept = {name: header.tensors[part_name("values", name)].elements for name in tensors}
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
        counted=not dense or not tensors,
    )


class SparseView:
    """Storage of a level in a sparse layout, as if its tensors were dense and one by one."""

    def __init__(self, storage: Storage, header: Header, document: LevelFile) -> None:
        assert document.tensors is not None
        self.name, self._storage, self._stored = storage.name, storage, header
        self._form = FORMS[document.layout]
        self.nested = document.tensors
        infos = {}
        for stored in header.tensors.values():  # where its values are, there a tensor was
            if stored.name.startswith(VALUES):
                name = stored.name.removeprefix(VALUES)
                infos[name] = TensorInfo(name, *self.nested[name])
            elif not stored.name.startswith(RESERVED):
                infos[stored.name] = stored
        self.header = VirtualHeader(
            lay_out(infos.values()), header.metadata, b"", headers_size=header.data_start
        )
        self.size = self.header.data_start + self.header.data_size
        self.high_latency = storage.high_latency

    def front(self) -> Readable:
        """Nobody parses the header once more."""
        raise AssertionError("the header is known")

    def reader(self, start: int, stop: int) -> Reader:
        """Read along a range, which starts with a tensor."""
        return _SparseReader(self, start)

    def stored(self, info: TensorInfo) -> Reader:
        """The bytes of a tensor of the file itself."""
        start = self._stored.data_start + self._stored.tensors[info.name].start
        return self._storage.reader(start, start + info.nbytes)

    def decoder(self, info: TensorInfo, opened: list[Reader]) -> Decoder:
        """Puts a tensor together of parts, which are opened."""
        kept = self._stored.tensors[part_name("values", info.name)].elements
        parts = {}
        for part in self._form.parts(info.name, info.dtype, info.shape, kept):
            kind = part.name.split(".", 2)[1]
            dtype = part.dtype.words if kind == "values" else part.dtype.numpy
            assert dtype is not None
            opened.append(self.stored(part))
            parts[kind] = Elements(opened[-1], dtype, part.elements)
        with self.naming(info):
            return self._form.decoder(info, parts)

    @contextlib.contextmanager
    def naming(self, info: TensorInfo) -> Iterator[None]:
        """Let errors say which tensor it is."""
        try:
            yield
        except (InvalidLayout, Truncated) as error:
            raise type(error)(f"{self.name}: tensor {info.name!r}: {error}") from None

    def check_unchanged(self) -> None:
        """Ask the file; and look at the parts of empty tensors, which nobody reads."""
        with contextlib.closing(_SparseReader(self, 0)) as reader:
            for name in self.nested:
                if not self.header.tensors[name].nbytes:
                    reader.check(self.header.tensors[name])
        self._storage.check_unchanged()

    def close(self) -> None:
        """Close the file."""
        self._storage.close()


class _SparseReader:
    """Goes from tensor to tensor."""

    def __init__(self, view: SparseView, position: int) -> None:
        self._view = view
        infos = view.header.tensors.values()
        start = view.header.data_start
        self._starts = {start + info.start: info for info in infos if info.nbytes}
        self._opened: list[Reader] = []
        self._decoder: Decoder | None = None
        self.seek(position)

    def seek(self, position: int, /) -> None:
        """Go on at the start of another tensor."""
        self._position, self._left = position, 0

    def readinto(self, buffer: Any, /) -> int:
        """As much of the buffer as the tensor has left."""
        if not self._left:
            if self._position not in self._starts:
                return 0  # the end
            self._begin(self._starts[self._position])
        view = memoryview(buffer).cast("B")[: self._left]
        count = len(view)
        if self._decoder is None:
            count -= fill(self._opened[0], view)
        else:
            words = np.frombuffer(view, np.uint8).view(self._info.dtype.words)
            with self._view.naming(self._info):
                self._decoder.decode(words)
                if count == self._left:
                    self._decoder.finish()
        self._left -= count
        self._position += count
        return count

    def check(self, info: TensorInfo) -> None:
        """Look at the parts of an empty tensor."""
        self._begin(info)
        assert self._decoder is not None
        with self._view.naming(info):
            self._decoder.finish()

    def _begin(self, info: TensorInfo) -> None:
        self.close()
        self._info, self._left = info, info.nbytes
        if info.name in self._view.nested:
            self._decoder = self._view.decoder(info, self._opened)
        else:
            self._decoder = None
            self._opened.append(self._view.stored(info))

    def read(self, size: int, /) -> bytes:
        """At most `size` bytes."""
        buffer = bytearray(size)
        return bytes(buffer[: self.readinto(buffer)])

    def close(self) -> None:
        """Close the parts."""
        for reader in self._opened:
            reader.close()
        self._opened.clear()
