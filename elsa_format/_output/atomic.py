"""What an output is; and the one that most are: a file that appears whole or not at all."""

import contextlib
import errno
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from elsa_format._errors import OutputExists

Tick = Callable[[int], object]
"""Called with bytes that were sent."""

names = threading.RLock()
"""Held while names come and go: who has it finds all as it was, or all as it will be."""


def _renew() -> None:
    global names
    names = threading.RLock()


if hasattr(os, "register_at_fork"):  # a fork has none of its parent's threads
    os.register_at_fork(after_in_child=_renew)


class Output(ABC):
    """A place to write bytes at positions; nothing counts before `commit`."""

    name = ""
    """For messages, if it has one."""
    path: Path | None = None
    """Where it will be, if that is a file on this machine."""
    waiting = 0
    """Bytes that `sync` has to send."""

    @abstractmethod
    def write_at(self, position: int, data: Any) -> None:
        """Write all of a buffer at a position."""

    def commit(self) -> None:
        """Let it appear by itself; several that belong together are a `Transaction`."""
        self.sync()
        with names:
            self.publish()
        settle([self])
        self.discard()

    def sync(self, tick: Tick = lambda size: None) -> None:  # noqa: B027
        """Have all bytes where they will stay; what may take long is done here, and counted."""

    def put_away(self) -> None:
        """Wait, with all bytes written, as a process can have only so many files open."""
        self.sync()

    def publish(self) -> None:  # noqa: B027
        """Appear, after `sync`."""

    def unpublish(self) -> None:  # noqa: B027
        """Undo `publish`; what it replaced is gone."""

    def discard(self) -> None:  # noqa: B027
        """Leave nothing; what was published stays."""


def settle(outputs: Iterable[Output]) -> None:
    """Make the names of files durable, as far as they are on this machine."""
    for folder in {output.path.parent for output in outputs if output.path is not None}:
        with contextlib.suppress(OSError):  # not every directory can be synced
            opened = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(opened)
            finally:
                os.close(opened)


# --- Files ---------------------------------------------------------------------------------------

_OPEN_FILES = "/proc/self/fd"

unfinished: set[Path] = set()
"""What goes when the process ends: temporary names, and outputs that hold nothing yet."""
_folders: list[Path] = []
"""Made for files that have no name yet."""


def leave_nothing(seconds: float) -> None:
    """Remove what is unfinished, and let no name come or go any more: the process ends."""
    names.acquire(timeout=seconds)
    for path in [*unfinished]:
        path.unlink(missing_ok=True)
    for folder in reversed(_folders):
        _remove_empty(folder)


@contextlib.contextmanager
def new_folders(path: Path) -> Iterator[None]:
    """Make a folder, and those it is in, for files; what holds none at the end goes again."""
    missing = [path, *path.parents]
    missing = missing[: next((n for n, p in enumerate(missing) if p.is_dir()), len(missing))]
    made: list[Path] = []
    try:
        for folder in reversed(missing):
            with names:
                folder.mkdir(exist_ok=True)
                made.append(folder)
                _folders.append(folder)
        yield
    finally:
        with names:
            for folder in reversed(made):
                _remove_empty(folder)
                _folders.remove(folder)


def _remove_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()


class AtomicFile(Output):
    """A file that takes its name only when complete.

    Linux gives it no name until then (O_TMPFILE), so that even kill -9 leaves nothing behind;
    elsewhere it has a temporary name beside the target.
    """

    path: Path

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
        with names:
            try:
                return os.open(self._take_temporary(), flags, 0o666)
            except BaseException:
                self._remove_temporary()
                raise

    def _take_temporary(self) -> Path:
        self._temporary = self.path.with_name(f".elsa-{os.urandom(8).hex()}.tmp")  # fits any system
        unfinished.add(self._temporary)
        return self._temporary

    def _remove_temporary(self) -> None:
        if self._temporary is not None:
            self._temporary.unlink(missing_ok=True)
            unfinished.discard(self._temporary)
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

    def sync(self, tick: Tick = lambda size: None) -> None:
        """Make the bytes durable."""
        with self._naming_output():
            if self.fd >= 0:
                os.fsync(self.fd)

    def put_away(self) -> None:
        """Wait under a temporary name."""
        self.sync()
        with self._naming_output():
            if self._temporary is None:
                with names:
                    _link_open_file(self.fd, self._take_temporary())
            self._close()

    def publish(self) -> None:
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

    def unpublish(self) -> None:
        """Remove the file, or what has its name."""
        self.path.unlink(missing_ok=True)

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
        """Close; what has only a temporary name goes."""
        self._close()
        with names:
            self._remove_temporary()


def _link_open_file(fd: int, path: Path) -> None:
    # Only with a directory does Python call linkat, which follows the link to the unnamed file.
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.link(f"{_OPEN_FILES}/{fd}", path.name, dst_dir_fd=folder, follow_symlinks=True)
    finally:
        os.close(folder)
