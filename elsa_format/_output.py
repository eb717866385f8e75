"""Where results go: a file that appears whole or not at all, or a stream."""

import contextlib
import errno
import os
import shutil
import stat
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Protocol

from elsa_format._errors import OutputExists

Target = str | os.PathLike[str] | IO[bytes]
"""A path, or a writable binary stream such as sys.stdout.buffer."""

_OPEN_FILES = "/proc/self/fd"


class Output(Protocol):
    """A place to write bytes at positions; nothing counts before `commit`."""

    def write_at(self, position: int, data: Any) -> None: ...
    def commit(self) -> None: ...
    def discard(self) -> None: ...


class AtomicFile:
    """A file that takes its name only when complete.

    Linux gives it no name until then (O_TMPFILE), so that even kill -9 leaves nothing behind;
    elsewhere it has a temporary name beside the target.
    """

    def __init__(self, path: str | os.PathLike[str], *, force: bool = False) -> None:
        self.name = os.fspath(path)
        # A symbolic link stays one; its target is replaced.
        self.path = Path(os.path.realpath(path))
        self.force = force
        self._temporary: Path | None = None
        self._lock = threading.Lock()
        with self._naming_output():
            if self.path.is_dir():
                raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
            if self.path.is_symlink():  # links in a circle have no target
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
            if not force and self.path.exists():
                raise OutputExists(f"{path}: exists already; --force replaces it")
            self.fd = self._open()

    def _open(self) -> int:
        folder = self.path.parent
        if hasattr(os, "O_TMPFILE") and hasattr(os, "link") and os.path.exists(_OPEN_FILES):
            with contextlib.suppress(OSError):  # not every file system can
                return os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o666)
        self._temporary = self._unused_name()
        # Without O_BINARY, Windows would write a carriage return before every byte 10.
        flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | getattr(os, "O_BINARY", 0)
        return os.open(self._temporary, flags, 0o666)

    def _unused_name(self) -> Path:
        return self.path.with_name(f".elsa-{os.urandom(8).hex()}.tmp")  # fits any file system

    def write_at(self, position: int, data: Any) -> None:
        """Write all of a buffer at a position of the file."""
        view = memoryview(data).cast("B")
        try:
            while view:
                written = self._write(position, view)
                view, position = view[written:], position + written
        except OSError as error:
            raise self._named(error) from None

    def _write(self, position: int, view: memoryview) -> int:
        if hasattr(os, "pwrite"):
            return os.pwrite(self.fd, view, position)
        with self._lock:  # Windows has one position for all threads
            os.lseek(self.fd, position, os.SEEK_SET)
            return os.write(self.fd, view)

    def commit(self) -> None:
        """Make the bytes durable, then give them their name."""
        with self._naming_output():
            try:
                self._commit()
            except FileExistsError:
                raise OutputExists(
                    f"{self.path.name}: exists already; --force replaces it"
                ) from None

    @contextlib.contextmanager
    def _naming_output(self) -> Iterator[None]:
        """Let errors name the output, not a temporary file or none."""
        try:
            yield
        except OSError as error:
            raise self._named(error) from None

    def _named(self, error: OSError) -> OSError:
        return OSError(error.errno, error.strerror, self.name)

    def _commit(self) -> None:
        os.fsync(self.fd)
        if self._temporary is None:
            self._link()
        else:
            self._close()  # Windows renames and removes no open file
            self._rename(self._temporary)
        self._temporary = None
        self._close()
        with contextlib.suppress(OSError):  # a directory that cannot be synced is still renamed
            folder = os.open(self.path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def _rename(self, temporary: Path) -> None:
        if self.force:
            os.replace(temporary, self.path)
            return
        try:
            os.link(temporary, self.path)  # unlike a rename, it never replaces a file
        except FileExistsError:
            raise
        except (OSError, AttributeError):  # a file system without links, such as FAT
            if os.path.lexists(self.path):
                raise FileExistsError from None
            os.rename(temporary, self.path)
        else:
            os.unlink(temporary)

    def _link(self) -> None:
        if self.force:
            # A link cannot replace a file; a rename can, so the file gets a name for an instant.
            self._temporary = self._unused_name()  # so that discard removes it, if interrupted
            _link_open_file(self.fd, self._temporary)
            os.replace(self._temporary, self.path)
        else:
            _link_open_file(self.fd, self.path)

    def _close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def discard(self) -> None:
        """Close without leaving anything; harmless after `commit`."""
        self._close()
        if self._temporary is not None:
            self._temporary.unlink(missing_ok=True)
            self._temporary = None


def _link_open_file(fd: int, path: Path) -> None:
    # Only with a directory does Python call linkat, which follows the link to the unnamed file.
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.link(f"{_OPEN_FILES}/{fd}", path.name, dst_dir_fd=folder, follow_symlinks=True)
    finally:
        os.close(folder)


@contextlib.contextmanager
def _naming(stream: IO[bytes]) -> Iterator[None]:
    """Let errors name the stream, as far as it has a name."""
    try:
        yield
    except OSError as error:
        raise _named(error, stream) from None


def _named(error: OSError, stream: IO[bytes]) -> OSError:
    name = getattr(stream, "name", None)
    if error.filename is None and error.errno is not None and isinstance(name, str):
        error.filename = name
    return error


class Pipe:
    """A stream that is written front to back."""

    def __init__(self, stream: IO[bytes]) -> None:
        self.stream = stream
        self.position = 0

    def write_at(self, position: int, data: Any) -> None:
        """Write at the end; no other position exists."""
        if position != self.position:
            raise ValueError(f"a pipe cannot write at {position}, it is at {self.position}")
        view = memoryview(data).cast("B")
        self.position += len(view)
        try:
            while view:  # an unbuffered stream may take less than it was given
                view = view[self.stream.write(view) :]
        except OSError as error:
            raise _named(error, self.stream) from None

    def commit(self) -> None:
        """Flush."""
        with _naming(self.stream):
            self.stream.flush()

    def discard(self) -> None:
        """What was written cannot be taken back; the caller's exit code tells."""


class Spool:
    """A stream whose content is written out of order: kept on disk, then copied."""

    def __init__(self, stream: IO[bytes]) -> None:
        self.stream = stream
        self.file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by commit and discard

    def write_at(self, position: int, data: Any) -> None:
        """Write at a position of the temporary file."""
        self.file.seek(position)
        self.file.write(data)

    def commit(self) -> None:
        """Copy everything to the stream."""
        self.file.seek(0)
        with _naming(self.stream):
            shutil.copyfileobj(self.file, self.stream, 1 << 20)
            self.stream.flush()
        self.file.close()

    def discard(self) -> None:
        """Drop the temporary file."""
        self.file.close()


@contextlib.contextmanager
def open_output(target: Target, *, force: bool = False, in_order: bool = False) -> Iterator[Output]:
    """The output for a target; discarded unless the block commits it.

    `in_order` promises writes front to back, which lets a stream pass them on at once.
    """
    with contextlib.ExitStack() as stack:
        if isinstance(target, str | os.PathLike) and _is_special(target):
            target = stack.enter_context(open(target, "wb"))
        output: Output
        if isinstance(target, str | os.PathLike):
            output = AtomicFile(target, force=force)
        else:
            output = Pipe(target) if in_order else Spool(target)
        stack.callback(output.discard)
        yield output


def _is_special(path: str | os.PathLike[str]) -> bool:
    """A device or named pipe (/dev/null): written to, never replaced."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)
