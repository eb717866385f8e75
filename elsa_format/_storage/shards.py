"""The shards of a network, read as if they were one file (spec §10).

All headers first, then the data sections one after the other: so every reader of a file reads
shards too, by positions that no file has.
"""

import io
import os
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from elsa_format._container.header import (
    MAX_HEADER,
    Header,
    Readable,
    TensorInfo,
    VirtualHeader,
    read_exactly,
)
from elsa_format._container.index import Index, is_url
from elsa_format._container.index import parse as parse_index
from elsa_format._errors import InvalidIndex, UnsafePath
from elsa_format._storage import open_storage
from elsa_format._storage.base import Reader, Source, Storage

T = TypeVar("T")


@dataclass(frozen=True)
class Shard:
    """One open file of a network."""

    file: str
    storage: Storage
    header: Header


class Shards:
    """Storage of several files, as one."""

    def __init__(self, name: str, shards: Sequence[Shard]) -> None:
        self.name, self.shards = name, tuple(shards)
        tensors: dict[str, TensorInfo] = {}
        metadata: dict[str, str] = {}
        position, self._starts = 0, list[int]()
        for shard in self.shards:
            self._starts.append(position)
            for info in shard.header.tensors.values():
                tensors[info.name] = replace(info, start=position + info.start)
            # Of two values the first shard's counts (spec §10.1).
            metadata = {**shard.header.metadata, **metadata}
            position += shard.header.data_size
        self._starts.append(position)
        headers = sum(shard.header.data_start for shard in self.shards)
        self.header = VirtualHeader(tensors, metadata, b"", headers_size=headers)
        self.size = self.header.data_start + self.header.data_size
        self.high_latency = any(shard.storage.high_latency for shard in self.shards)

    def front(self) -> Readable:
        """Refuse: no file has the joined header."""
        raise io.UnsupportedOperation(f"{self.name}: shards have no header in common")

    def reader(self, start: int, stop: int) -> Reader:
        return _JoinedReader(self, start, stop)

    def at(self, position: int) -> tuple[Shard, int, int]:
        """The shard that holds a position, the position in its file, and the bytes from there."""
        position -= self.header.data_start
        number = bisect_right(self._starts, position) - 1
        inside = position - self._starts[number]
        shard, left = self.shards[number], self._starts[number + 1] - position
        return shard, shard.header.data_start + inside, left

    def check_unchanged(self) -> None:
        for shard in self.shards:
            shard.storage.check_unchanged()

    def close(self) -> None:
        for shard in self.shards:
            shard.storage.close()


class _JoinedReader(Reader):
    """Goes from one shard's data section to the next."""

    def __init__(self, shards: Shards, start: int, stop: int) -> None:
        self.shards, self.position, self.stop = shards, start, stop
        self._shard: Shard | None = None
        self._inner: Reader | None = None
        self._inside = 0

    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer)[: max(self.stop - self.position, 0)]
        if not view:
            return 0
        shard, inside, left = self.shards.at(self.position)
        if self._inner is None or shard is not self._shard:
            self.close()
            self._shard, self._inner = shard, shard.storage.reader(inside, inside + left)
        elif inside != self._inside:
            self._inner.seek(inside)
        count = self._inner.readinto(view[:left])
        self.position += count
        self._inside = inside + count
        return count

    def seek(self, position: int, /) -> None:
        self.position = position

    def close(self) -> None:
        if self._inner is not None:
            self._inner.close()
            self._inner = None


def read_index(source: Source) -> tuple[Index, str]:
    """The index at a path or URL, and its name for messages; no shard is opened."""
    storage = open_storage(source)
    try:
        raw = read_exactly(storage.front(), MAX_HEADER + 1)
        where = storage.name
    finally:
        storage.close()
    if len(raw) > MAX_HEADER:
        raise InvalidIndex(f"{where}: more than {MAX_HEADER} bytes")
    return parse_index(raw, where), where


def shard_path(index: Path, name: str) -> Path:
    """The file of a shard, which must be in the index's directory even if it is a link.

    An index that is a link itself has two directories, the link's and its target's: in a download
    cache all files of a network are links into one directory.
    """
    path = index.parent / name
    # realpath, as resolve raises where links go in a circle; such a shard does not exist.
    folders = (os.path.realpath(index.parent), os.path.dirname(os.path.realpath(index)))
    if os.path.dirname(os.path.realpath(path)) not in folders:
        raise UnsafePath(f"{index}: shard {name!r} is a link that leaves the directory")
    return path


def shard_source(source: Source, file: str) -> Source:
    """The path or URL of a shard: the index's, with another file name."""
    if isinstance(source, str) and is_url(source):
        before, mark, query = source.partition("#")[0].partition("?")
        scheme, _, rest = before.partition("://")
        if scheme.lower() not in ("http", "https"):
            if "::" in file:  # fsspec would go to another store
                from elsa_format._storage.http_client import (
                    redact,  # here, as by whoever opened the index
                )

                raise UnsafePath(f"{redact(source)}: shard {file!r} is outside its directory")
            return f"{before.rpartition('/')[0]}/{file}"
        host, _, path = rest.partition("/")
        folder = "".join(f"/{part}" for part in path.split("/")[:-1])
        # The query stays, for stores whose signature covers a directory; it goes to the same host.
        return f"{scheme}://{host}{folder}/{quote(file)}{mark}{query}"
    if not isinstance(source, str | os.PathLike):
        raise TypeError("an index is a path or a URL")
    return shard_path(Path(source), file)


def open_parsed(
    source: Source, open_shard: Callable[[Source], tuple[Storage, Header, T]]
) -> tuple[Shards, Index, dict[str, T]]:
    """Shards sorted by file name, their index, and by file what is parsed of each."""
    index, where = read_index(source)
    sources = {file: shard_source(source, file) for file in index.files}
    for file, path in sources.items():
        if isinstance(path, Path) and not os.path.isfile(path):
            raise InvalidIndex(f"{where}: shard {file!r} does not exist")
    opened: list[Shard] = []
    parsed = {}
    try:
        for file, path in sources.items():
            storage, header, parsed[file] = open_shard(path)
            opened.append(Shard(file, storage, header))
        _check_map(index, opened, where)
    except BaseException:
        for shard in opened:
            shard.storage.close()
        raise
    return Shards(where, opened), index, parsed


def _check_map(index: Index, shards: Sequence[Shard], where: str) -> None:
    stored = {}
    for shard in shards:
        for name in shard.header.tensors:
            listed = index.weight_map.get(name)
            if listed is None:
                raise InvalidIndex(
                    f"{where}: tensor {name!r} of {shard.file!r} is not in the index"
                )
            if listed != shard.file:
                raise InvalidIndex(
                    f"{where}: tensor {name!r} is in {shard.file!r}, the index says {listed!r}"
                )
            stored[name] = shard.file
    for name, file in index.weight_map.items():
        if name not in stored:
            raise InvalidIndex(f"{where}: tensor {name!r} is not in {file!r}")


def check_total_size(index: Index, shards: Shards) -> None:
    """Compare the size that the index states, if it does, with that of the tensors."""
    found = shards.header.data_size
    stated = index.metadata.get("total_size", found)
    if type(stated) is not int or stated != found:
        raise InvalidIndex(
            f"{shards.name}: total_size {stated!r}, but the tensors have {found} bytes"
        )
