"""Where results go: a file that appears whole or not at all, or a stream."""

import contextlib
import errno
import os
import stat
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

from elsa_format._errors import OutputExists

Target = str | os.PathLike[str] | IO[bytes]
"""A path, or a writable binary stream such as sys.stdout.buffer."""

_OPEN_FILES = "/proc/self/fd"

_names = threading.RLock()
"""Held while names come and go: who has it finds all as it was, or all as it will be."""
_temporary: set[Path] = set()


def leave_nothing(seconds: float) -> None:
    """Remove what has a temporary name, and let no name come or go any more: the process ends."""
    _names.acquire(timeout=seconds)
    for path in _temporary:
        path.unlink(missing_ok=True)


def _renew() -> None:
    global _names
    _names = threading.RLock()


if hasattr(os, "register_at_fork"):  # a fork has none of its parent's threads
    os.register_at_fork(after_in_child=_renew)


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
                raise FileExistsError
            self.fd = self._open()

    def _open(self) -> int:
        folder = self.path.parent
        if hasattr(os, "O_TMPFILE") and hasattr(os, "link") and os.path.exists(_OPEN_FILES):
            with contextlib.suppress(OSError):  # not every file system can
                return os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o666)
        # Without O_BINARY, Windows would write a carriage return before every byte 10.
        flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | getattr(os, "O_BINARY", 0)
        with _names:
            try:
                return os.open(self._take_temporary(), flags, 0o666)
            except BaseException:
                self._remove_temporary()
                raise

    def _take_temporary(self) -> Path:
        self._temporary = self.path.with_name(f".elsa-{os.urandom(8).hex()}.tmp")  # fits any system
        _temporary.add(self._temporary)
        return self._temporary

    def _remove_temporary(self) -> None:
        if self._temporary is not None:
            self._temporary.unlink(missing_ok=True)
            _temporary.discard(self._temporary)
            self._temporary = None

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
        commit_together([self])

    def sync(self) -> None:
        """Make the bytes durable."""
        with self._naming_output():
            os.fsync(self.fd)

    def take_name(self) -> None:
        """Give the bytes their name; what may take long comes before and after."""
        with self._naming_output():
            if self._temporary is None:
                self._link()
            else:
                self._close()  # Windows renames and removes no open file
                self._rename(self._temporary)
            self._remove_temporary()

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

    def _link(self) -> None:
        if self.force:
            # A link cannot replace a file; a rename can, so the file gets a name for an instant.
            temporary = self._take_temporary()
            _link_open_file(self.fd, temporary)
            os.replace(temporary, self.path)
        else:
            _link_open_file(self.fd, self.path)

    def lose_name(self) -> None:
        """Undo `take_name`; what it replaced is gone."""
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Make the name durable."""
        self._close()
        _sync_folder(self.path)

    def _close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    @contextlib.contextmanager
    def _naming_output(self) -> Iterator[None]:
        """Let errors name the output, not a temporary file or none."""
        try:
            yield
        except FileExistsError:
            exists = f"{self.name}: exists already"
            raise OutputExists(exists, "{force} replaces it", force=True) from None
        except OSError as error:
            raise self._named(error) from None

    def _named(self, error: OSError) -> OSError:
        return OSError(error.errno, error.strerror, self.name)

    def discard(self) -> None:
        """Close without leaving anything; harmless after `commit`."""
        self._close()
        with _names:
            self._remove_temporary()


def commit_together(files: Sequence[AtomicFile], *, instead_of: Path | None = None) -> None:
    """Let files appear that are of use only together, all or none.

    No file system names several files at once, so the order makes up for it, even if the power
    fails: the last is there only while all others are, and an old one goes first.
    """
    *others, last = files
    for file in files:
        file.sync()
    named: list[AtomicFile] = []
    with _names:
        try:
            if instead_of is not None:
                instead_of.unlink(missing_ok=True)
                _sync_folder(instead_of)
            for file in others:
                file.take_name()
                named.append(file)
            if others:
                _sync_folder(last.path)
            last.take_name()
        except BaseException:
            for file in named:
                file.lose_name()
            raise
    for file in files:
        file.close()


def commit_outputs(outputs: Sequence[Output]) -> None:
    """Let outputs appear that belong together, the last only while all others are there."""
    files = [output for output in outputs if isinstance(output, AtomicFile)]
    if len(files) == len(outputs):
        commit_together(files)
        return
    for output in outputs:  # a device or pipe among them
        output.commit()


def _sync_folder(path: Path) -> None:
    with contextlib.suppress(OSError):  # not every directory can be synced
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _link_open_file(fd: int, path: Path) -> None:
    # Only with a directory does Python call linkat, which follows the link to the unnamed file.
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.link(f"{_OPEN_FILES}/{fd}", path.name, dst_dir_fd=folder, follow_symlinks=True)
    finally:
        os.close(folder)


class Pipe:
    """A stream that is written front to back."""

    def __init__(self, stream: IO[bytes], name: str | None = None) -> None:
        self.stream, self.position = stream, 0
        own = getattr(stream, "name", None)
        self.name = name or (own if isinstance(own, str) else None)

    def write_at(self, position: int, data: Any) -> None:
        """Write at the end; no other position exists."""
        if position != self.position:
            raise ValueError(f"a pipe cannot write at {position}, it is at {self.position}")
        view = memoryview(data).cast("B")
        self.position += len(view)
        with _naming(self.name):
            while view:  # an unbuffered stream may take less than it was given
                view = view[self.stream.write(view) :]

    def commit(self) -> None:
        """Flush."""
        with _naming(self.name):
            self.stream.flush()

    def discard(self) -> None:
        """What was written cannot be taken back; the caller's exit code tells."""


class Spool:
    """A pipe whose content is written out of order: kept on disk, then copied."""

    def __init__(self, pipe: Pipe) -> None:
        self.pipe = pipe
        with _naming(tempfile.gettempdir()):
            self.file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - see commit, discard

    def write_at(self, position: int, data: Any) -> None:
        """Write at a position of the temporary file."""
        view = memoryview(data).cast("B")
        with _naming(tempfile.gettempdir()):
            self.file.seek(position)
            while view:
                view = view[self.file.write(view) :]

    def commit(self) -> None:
        """Copy everything to the stream."""
        self.file.seek(0)
        while block := self.file.read(1 << 20):
            self.pipe.write_at(self.pipe.position, block)
        self.pipe.commit()
        self.file.close()

    def discard(self) -> None:
        """Drop the temporary file."""
        self.file.close()


@contextlib.contextmanager
def _naming(name: str | None) -> Iterator[None]:
    """Let errors name what cannot be written, if it has a name."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None and name is not None:
            error.filename = name
        raise


@contextlib.contextmanager
def open_output(target: Target, *, force: bool = False, in_order: bool = False) -> Iterator[Output]:
    """The output for a target; discarded unless the block commits it.

    `in_order` promises writes front to back, which lets a stream pass them on at once.
    """
    with contextlib.ExitStack() as stack:
        output: Output
        if isinstance(target, str | os.PathLike) and not is_special(target):
            output = AtomicFile(target, force=force)
        else:
            if isinstance(target, str | os.PathLike):
                number = descriptor(target)
                place = target if number is None else os.dup(number)
                stream: IO[bytes] = stack.enter_context(open(place, "wb", buffering=0))
                pipe = Pipe(stream, os.fspath(target))
            else:
                pipe = Pipe(target)
            output = pipe if in_order else Spool(pipe)
        stack.callback(output.discard)
        yield output


def is_special(path: str | os.PathLike[str]) -> bool:
    """What is written to, never replaced: a device, a named pipe, /dev/stdout whatever that is."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)) or descriptor(path) is not None


def descriptor(path: str | os.PathLike[str]) -> int | None:
    """The number of an open file that a path stands for, such as /dev/stdout or /dev/fd/3."""
    text = os.path.abspath(path)
    if os.path.islink(text) and os.path.dirname(text) == "/dev":
        text = os.path.join("/dev", os.readlink(text))
    folder, name = os.path.split(text)
    own = folder == "/dev/fd" or os.path.realpath(folder) == f"/proc/{os.getpid()}/fd"
    return int(name) if own and name.isdecimal() else None
