"""Random access to the bytes of a file."""

import io
import os
import threading
from typing import IO, Protocol

from elsa_format._blocks import stream_name
from elsa_format._errors import Truncated
from elsa_format._header import Readable


class Storage(Protocol):
    """Bytes that can be read anywhere, from several threads."""

    name: str

    @property
    def size(self) -> int | None:
        """Bytes in all, None where only the end would tell."""
        ...

    def cursor(self) -> Readable: ...
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

    def cursor(self) -> Readable:
        """Read from the front."""
        return _Cursor(self, self.size)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class StreamStorage:
    """A seekable stream, such as BytesIO; it stays open."""

    def __init__(self, stream: IO[bytes]) -> None:
        self.name = stream_name(stream)
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

    def cursor(self) -> Readable:
        """Read from the front."""
        return _Cursor(self, self.size)

    def close(self) -> None:
        """Leave the stream to its owner."""


class PipeStorage:
    """A stream that cannot seek: good for the header, and no more."""

    size: int | None = None

    def __init__(self, stream: IO[bytes], name: str) -> None:
        self.stream, self.name = stream, name

    def cursor(self) -> Readable:
        """Read from the front."""
        return self.stream

    def read_into(self, position: int, view: memoryview) -> None:
        """Refuse: the bytes may have gone by."""
        raise io.UnsupportedOperation(f"{self.name}: cannot seek; use elsa_format.stream")

    def close(self) -> None:
        """Leave the stream to its owner."""


class _Cursor:
    """A storage read front to back."""

    def __init__(self, storage: Storage, size: int) -> None:
        self.storage, self.size, self.position = storage, size, 0

    def read(self, size: int, /) -> bytes:
        """At most `size` bytes."""
        size = min(size, self.size - self.position)
        buffer = bytearray(max(size, 0))
        self.storage.read_into(self.position, memoryview(buffer))
        self.position += len(buffer)
        return bytes(buffer)


def open_storage(source: str | os.PathLike[str] | IO[bytes]) -> Storage:
    """Storage for a path or a stream."""
    if isinstance(source, str | os.PathLike):
        return FileStorage(source)
    return StreamStorage(source) if source.seekable() else PipeStorage(source, stream_name(source))
