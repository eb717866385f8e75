"""Random access to the bytes of a file."""

import os
import threading
from typing import IO, Any, Protocol

from elsa_format._errors import Truncated


class Storage(Protocol):
    """Bytes that can be read anywhere, from several threads."""

    name: str
    size: int

    def read_into(self, position: int, view: memoryview) -> None: ...
    def close(self) -> None: ...


class FileStorage:
    """A file on disk."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.name = os.fspath(path)
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 - closed by close()
        self.size = os.fstat(self._file.fileno()).st_size

    def read_into(self, position: int, view: memoryview) -> None:
        """Fill the buffer from a position."""
        while view:
            count = os.preadv(self._file.fileno(), [view], position)
            if not count:
                raise Truncated(f"{self.name}: ends at byte {position}, expected {len(view)} more")
            view, position = view[count:], position + count

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class StreamStorage:
    """A seekable stream, such as BytesIO; it stays open."""

    def __init__(self, stream: IO[bytes]) -> None:
        name = getattr(stream, "name", None)
        self.name = name if isinstance(name, str) else "<stream>"
        self._stream, self._lock = stream, threading.Lock()
        self.size = stream.seek(0, os.SEEK_END)

    def read_into(self, position: int, view: memoryview) -> None:
        """Fill the buffer from a position."""
        with self._lock:
            self._stream.seek(position)
            while view:
                data = self._stream.read(len(view))
                if not data:
                    raise Truncated(f"{self.name}: ends early, expected {len(view)} bytes more")
                view[: len(data)] = data
                view = view[len(data) :]

    def close(self) -> None:
        """Leave the stream to its owner."""


class Cursor:
    """A storage read front to back, for the header."""

    def __init__(self, storage: Storage) -> None:
        self.storage, self.position = storage, 0

    def read(self, size: int) -> bytes:
        """At most `size` bytes."""
        size = min(size, self.storage.size - self.position)
        buffer = bytearray(max(size, 0))
        self.storage.read_into(self.position, memoryview(buffer))
        self.position += len(buffer)
        return bytes(buffer)


def open_storage(source: str | os.PathLike[str] | IO[bytes] | Any) -> Storage:
    """Storage for a path or a seekable stream."""
    if isinstance(source, str | os.PathLike):
        return FileStorage(source)
    return StreamStorage(source)
