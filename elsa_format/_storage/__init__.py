"""Where bytes come from: what all storages have in common, and opening one; one kind a module."""

import os
import sys
from abc import ABC, abstractmethod
from typing import IO, Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from elsa_format._container import Readable
from elsa_format._container.index import is_url

Source = str | os.PathLike[str] | IO[bytes]
"""A path, a URL, or a readable binary stream, which need not seek."""


class Closing:
    """A context that closes itself."""

    def close(self) -> None:
        """Give back what is held."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


class Fillable(Protocol):
    """What a buffer is filled from."""

    def readinto(self, buffer: Any, /) -> int: ...


def fill(reader: Fillable, view: memoryview) -> int:
    """Fill a buffer from short reads, and say how many bytes are missing at the end."""
    while view:
        count = reader.readinto(view)
        if not count:
            break
        view = view[count:]
    return len(view)


class Reader(Closing, ABC):
    """Bytes read along; short reads are allowed, and none means the end."""

    position: int

    @abstractmethod
    def readinto(self, buffer: Any, /) -> int:
        """Fill as much of the buffer as one read gives."""

    @abstractmethod
    def seek(self, position: int, /) -> None:
        """Go on elsewhere."""

    def read(self, size: int, /) -> bytes:
        """At most `size` bytes, and a mebibyte."""
        buffer = bytearray(min(size, 1 << 20))
        return bytes(buffer[: self.readinto(buffer)])


class Storage(Closing, ABC):
    """Bytes that can be read anywhere, from several threads."""

    name: str
    size: int | None = None
    """Bytes in all, None where only the end would tell."""
    high_latency = False
    """Whether every new position costs a round trip."""

    @abstractmethod
    def front(self) -> Readable:
        """The first bytes, to read the header from."""

    @abstractmethod
    def reader(self, start: int, stop: int) -> Reader:
        """The bytes of a range."""

    def mapped(self) -> NDArray[np.uint8] | None:
        """All bytes, not read yet, of a file on this machine; of all others None."""
        return None

    def check_unchanged(self, *, grows: bool = False) -> None:
        """Raise InputChanged if the bytes are no longer those that were opened.

        With `grows`, more may follow them: a delivery file that is upgraded.
        """


class PositionedStorage(Storage):
    """Storage that reads at any position by itself."""

    @abstractmethod
    def read_at(self, position: int, view: memoryview) -> int:
        """Fill as much of the buffer as one read gives from a position."""

    def front(self) -> Readable:
        """The first bytes, whatever size the system states: some files have none."""
        return self.reader(0, sys.maxsize)

    def reader(self, start: int, stop: int) -> Reader:
        return Window(self, start, stop)


class Window(Reader):
    """A range of a storage, read along."""

    def __init__(self, storage: PositionedStorage, start: int, stop: int) -> None:
        self.storage, self.position, self.stop = storage, start, stop

    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer)[: max(self.stop - self.position, 0)]
        count = self.storage.read_at(self.position, view) if view else 0
        self.position += count
        return count

    def seek(self, position: int, /) -> None:
        self.position = position


def open_storage(source: Source, *, sequential: bool = False) -> Storage:
    """Storage for a path, a URL or a stream, which is only read sequentially, from where it is."""
    from elsa_format._storage.local import FileStorage, InputFile, PipeStorage, StreamStorage

    if isinstance(source, str) and is_url(source):
        return open_url(source)
    if isinstance(source, str | os.PathLike):
        if os.path.exists(source) and not os.path.isfile(source):  # a named pipe: `<(command)`
            return PipeStorage(InputFile(source), os.fspath(source), owned=True)
        return FileStorage(source)
    if not hasattr(source, "read"):
        raise TypeError(f"source {source!r}, expected a path, a URL or a binary stream")
    if not sequential and source.seekable():
        return StreamStorage(source)
    return PipeStorage(source)


def open_url(url: str, first: int | None = None) -> Storage:
    """Storage for a URL; of one that costs a round trip, so many bytes are fetched at once."""
    # Imported here, so that those who never read a URL do not wait for HTTP and TLS.
    if url.partition("://")[0].lower() in ("http", "https"):
        from elsa_format._storage.http import HEAD, HttpStorage, RetryPolicy

        first = HEAD if first is None else min(first, HEAD)
        return HttpStorage(url, RetryPolicy.from_environment(), first)
    from elsa_format._storage.fsspec import FsspecStorage

    return FsspecStorage(url, first)
