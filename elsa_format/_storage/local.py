"""Files on this machine, and streams that callers hand over."""

import errno
import io
import mmap
import os
import stat
import sys
import tempfile
from _thread import allocate_lock
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from elsa_format._errors import InputChanged
from elsa_format._storage import PositionedStorage, Reader, Storage
from elsa_format._threads import Renewed

COPIED = 1 << 18
"""Bytes taken from a connection or a pipe at a time."""


class InputFile(io.FileIO):
    """A file that is read: errors name it, and that it changes is noticed."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if os.path.isdir(path):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
        super().__init__(path, "rb")
        self._path = os.fspath(path)
        self._opened = self._state()

    def read(self, size: int | None = -1, /) -> bytes | None:  # type: ignore[override]
        """At most `size` bytes."""
        try:
            return super().read(-1 if size is None else size)
        except OSError as error:
            raise self.named(error) from None

    def readinto(self, buffer: Any, /) -> int | None:
        """Fill as much of the buffer as one read gives."""
        try:
            return super().readinto(buffer)
        except OSError as error:
            raise self.named(error) from None

    def named(self, error: OSError) -> OSError:
        """An error of reading that says which file it was."""
        return OSError(error.errno, error.strerror, self._path)

    def check_unchanged(self, *, grows: bool = False) -> None:
        """Compare size and time of change with those when it was opened; a prefix may grow."""
        found, before = self._state(), self._opened
        grown = grows and found is not None and before is not None and found[0] > before[0]
        if found != before and not grown:
            raise InputChanged(f"{self._path}: changed while it was read; run again")

    def _state(self) -> tuple[int, int] | None:
        found = os.fstat(self.fileno())
        return (found.st_size, found.st_mtime_ns) if stat.S_ISREG(found.st_mode) else None


class FileStorage(PositionedStorage, Renewed):
    """A file on disk."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.name = os.fspath(path)
        self._file = InputFile(path)
        super().__init__()
        self.size = os.fstat(self._file.fileno()).st_size
        self._mapped: NDArray[np.uint8] | None = None

    def renew(self) -> None:
        """Be unlocked."""
        self._lock = allocate_lock()

    def read_at(self, position: int, view: memoryview) -> int:
        if hasattr(os, "preadv"):
            try:
                return os.preadv(self._file.fileno(), [view], position)
            except OSError as error:
                raise self._file.named(error) from None
        with self._lock:  # Windows has one position for all threads
            self._file.seek(position)
            return self._file.readinto(view) or 0

    def mapped(self) -> NDArray[np.uint8]:
        """The file that is open, whatever its name belongs to now; writing copies a page."""
        if self._mapped is None:
            self.check_unchanged()
            memory = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_COPY)
            self._mapped = np.frombuffer(memory, np.uint8)
        return self._mapped

    def check_unchanged(self, *, grows: bool = False) -> None:
        self._file.check_unchanged(grows=grows)

    def close(self) -> None:
        self._mapped = None  # which stays as long as tensors in it are used
        self._file.close()


class StreamStorage(PositionedStorage, Renewed):
    """A seekable stream, such as BytesIO; it stays open."""

    size: int
    _offset = 0
    """What the first byte of the stream is at, where those before it are known."""

    def __init__(self, stream: IO[bytes], name: str | None = None) -> None:
        self.name = stream_name(stream) if name is None else name
        self._stream = stream
        super().__init__()
        self.size = stream.seek(0, os.SEEK_END)

    def renew(self) -> None:
        """Be unlocked."""
        self._lock = allocate_lock()

    def read_at(self, position: int, view: memoryview) -> int:
        if _is_plain_file(self._stream):  # whose position a forked child shares
            return os.preadv(self._stream.fileno(), [view], position - self._offset)
        with self._lock:
            self._stream.seek(position - self._offset)
            data = self._stream.read(len(view))
            view[: len(data)] = data
            return len(data)


class PipeStorage(PositionedStorage):
    """A stream that is read once, from where it is to its end."""

    def __init__(self, stream: IO[bytes], name: str | None = None, *, owned: bool = False) -> None:
        self.name = stream_name(stream) if name is None else name
        self._stream, self._owned = stream, owned
        self.position = 0
        """Bytes that were read."""

    def reader(self, start: int, stop: int) -> Reader:
        """Read along, if nothing of the range has gone by."""
        self._refuse_to_seek(start)
        return super().reader(start, stop)

    def read_at(self, position: int, view: memoryview) -> int:
        self._refuse_to_seek(position)
        count = _read_into(self._stream, view)
        self.position += count
        return count

    def _refuse_to_seek(self, position: int) -> None:
        if position != self.position:
            raise io.UnsupportedOperation(f"{self.name}: cannot seek; use elsa_format.stream")

    def close(self) -> None:
        if self._owned:
            self._stream.close()


class SpooledStorage(StreamStorage):
    """What is read front to back, a pipe or a URL, in a temporary file as far as it is needed.

    Some layouts are read at several places at once. A level of a delivery file needs bytes of
    several places for each block, and an upgrade all that came before.
    """

    def __init__(self, upstream: Storage, start: int) -> None:
        """Keep what comes from `start` on; what was before is known."""
        self._upstream, self._offset, self.have = upstream, start, start
        file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - see close
        super().__init__(file, upstream.name)
        self.size: int | None = upstream.size  # type: ignore[assignment]

    def renew(self) -> None:
        """Be unlocked, and not growing."""
        super().renew()
        self._growth = allocate_lock()

    def keep(self, stop: int = sys.maxsize) -> int:
        """Have the bytes up to `stop`, or as many as there are; how many there are."""
        with self._growth:
            if self.have >= stop:
                return self.have
            with self._upstream.reader(self.have, stop) as reader:
                while self.have < stop and (data := reader.read(min(stop - self.have, COPIED))):
                    self._write(self.have - self._offset, memoryview(data))
                    self.have += len(data)
            if self.have < stop and self.size is None:
                self.size = self.have
            return self.have

    def _write(self, position: int, view: memoryview) -> None:
        while view:
            if hasattr(os, "pwrite"):  # a forked child shares the position
                done = os.pwrite(self._stream.fileno(), view, position)
            else:
                with self._lock:
                    self._stream.seek(position)
                    done = self._stream.write(view)
            view, position = view[done:], position + done

    def check_unchanged(self, *, grows: bool = False) -> None:
        """Ask where the bytes come from."""
        self._upstream.check_unchanged(grows=grows)

    def close(self) -> None:
        """Forget them."""
        self._stream.close()
        self._upstream.close()


def stream_name(stream: IO[bytes]) -> str:
    """A name for messages."""
    if stream is getattr(sys.stdin, "buffer", None):
        return "<stdin>"
    name = getattr(stream, "name", None)
    return name if isinstance(name, str) else "<stream>"


def _is_plain_file(stream: IO[bytes]) -> bool:
    """Whether a stream gives the bytes of its file as they are, and the system reads anywhere."""
    raw = stream.raw if type(stream) is io.BufferedReader else stream
    return type(raw) is io.FileIO and hasattr(os, "preadv")


def _read_into(stream: IO[bytes], view: memoryview) -> int:
    """One read into a buffer, of a stream that may know only `read`."""
    if hasattr(stream, "readinto"):
        return stream.readinto(view) or 0
    data = stream.read(len(view)) or b""
    view[: len(data)] = data
    return len(data)
