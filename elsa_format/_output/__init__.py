"""Where results go: files that appear whole, all that belong together, or none; or a stream."""

import contextlib
import os
import re
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, TypeGuard, TypeVar

from elsa_format._container.index import is_url
from elsa_format._output import atomic
from elsa_format._output.atomic import AtomicFile, Output, new_folders
from elsa_format._output.streams import Pipe, SpooledPipe
from elsa_format._threads import Meter, Progress, no_progress

if TYPE_CHECKING:
    from elsa_format._output.store import StoreFile

__all__ = [
    "AtomicFile",
    "Output",
    "Place",
    "Target",
    "Transaction",
    "descriptor",
    "is_special",
    "localized",
    "names_file",
    "new_folders",
    "open_output",
]

Place = str | os.PathLike[str]
"""A path, or the URL of a store."""
Target = Place | IO[bytes]
"""The same, or a writable binary stream such as sys.stdout.buffer."""

T = TypeVar("T")


class Transaction(contextlib.ExitStack):
    """Outputs that are of use only together: all appear, in their order, or none.

    Neither file systems nor stores name several files at once, so the order makes up for it, even
    if the power fails: the last is there only while all others are. If that is an index, an old one
    goes first. What is not committed when the block ends leaves nothing.

    Args:
        force: Replace files that exist.
    """

    def __init__(self, *, force: bool = False) -> None:
        super().__init__()
        self.force = force
        self.outputs: list[Output] = []
        """All but the index, as they were added."""
        self.index: Output | None = None
        self._published: list[Output] = []
        self._in_store: StoreFile | None = None

    def open(self, target: Target, *, in_order: bool = False) -> Output:
        """Add an output.

        `in_order` promises writes front to back, which lets a stream pass them on at once.
        """
        if names_file(target):
            return self.open_file(target)
        if isinstance(target, str | os.PathLike):
            number = descriptor(target)
            place = target if number is None else os.dup(number)
            stream: IO[bytes] = open(place, "wb", buffering=0)  # noqa: SIM115 - closed at the end
            pipe = Pipe(self.enter_context(stream), os.fspath(target))
        else:
            pipe = Pipe(target)
        return self._add(pipe if in_order else SpooledPipe(pipe))

    def open_file(self, place: Place) -> Output:
        """Add a file or, as all of them, an object of a store."""
        return self._add(self._create(place))

    def open_index(self, place: Place) -> Output:
        """Add the file that appears last, and whose old one goes first."""
        self.index = self._create(place)
        self.callback(self.index.discard)
        return self.index

    def _add(self, output: Output) -> Output:
        self.callback(output.discard)
        self.outputs.append(output)
        return output

    def _create(self, place: Place) -> Output:
        place = localized(os.fspath(place))
        if not is_url(place):
            return AtomicFile(place, force=self.force)
        # Imported here, so that those who never write to a URL do not wait for HTTP and TLS.
        from elsa_format._output.store import StoreFile

        self._in_store = StoreFile(place, force=self.force, beside=self._in_store)
        return self._in_store

    def make_folder(self, place: Place) -> None:
        """Make the folder of a file, if that is on this machine; left empty, it goes again."""
        if not is_url(os.fspath(place)):
            self.enter_context(new_folders(Path(place).parent))

    def commit(self, progress: Progress = no_progress) -> None:
        """Let all outputs appear, or none; progress is that of sending them to a store."""
        self.sync(progress)
        outputs = [*self.outputs, *filter(None, [self.index])]
        with atomic.names:
            try:
                self.retire_index()
                self.publish(outputs[:-1])
                self.publish(outputs[-1:])
            except BaseException:
                self.unpublish()
                raise
            for output in outputs:
                output.discard()

    # The steps of `commit`, for processes that take each together.

    def sync(self, progress: Progress = no_progress) -> None:
        """Have all bytes where they will stay."""
        outputs = [*self.outputs, *filter(None, [self.index])]
        meter = Meter(progress, sum(output.waiting for output in outputs))
        for output in outputs:
            output.sync(meter.tick)

    def retire_index(self) -> None:
        """Remove an old index before what it names is replaced."""
        if self.index is not None and self.force:
            self.index.unpublish()
            atomic.settle([self.index])

    def publish(self, outputs: Sequence[Output]) -> None:
        """Let some appear, durably."""
        for output in outputs:
            output.publish()
            self._published.append(output)
        atomic.settle(outputs)

    def unpublish(self) -> None:
        """Take back what has appeared, the last first."""
        for output in reversed(self._published):
            with contextlib.suppress(Exception):  # a store that failed may fail again
                output.unpublish()


@contextlib.contextmanager
def open_output(target: Target, *, force: bool = False, in_order: bool = False) -> Iterator[Output]:
    """The output for a target; discarded unless the block commits it.

    `in_order` promises writes front to back, which lets a stream pass them on at once.
    """
    with Transaction(force=force) as transaction:
        yield transaction.open(target, in_order=in_order)


def localized(target: T) -> T | str:
    """The target, or if it is the URL of a file on this machine, its path."""
    if isinstance(target, str) and re.match("(file|local)://", target, re.IGNORECASE):
        from elsa_format._storage.fsspec import find_store

        return find_store(target)[1]
    return target


def names_file(target: Target) -> TypeGuard[Place]:
    """Whether a target is a path or URL, and neither a stream nor what is special."""
    return isinstance(target, str | os.PathLike) and not is_special(target)


def is_special(path: Place) -> bool:
    """What is written to, never replaced: a device, a named pipe, /dev/stdout whatever that is."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)) or descriptor(path) is not None


def descriptor(path: Place) -> int | None:
    """The number of an open file that a path stands for, such as /dev/stdout or /dev/fd/3."""
    text = os.path.abspath(path)
    if os.path.islink(text) and os.path.dirname(text) == "/dev":
        text = os.path.join("/dev", os.readlink(text))
    folder, name = os.path.split(text)
    own = folder == "/dev/fd" or os.path.realpath(folder) == f"/proc/{os.getpid()}/fd"
    return int(name) if own and name.isdecimal() else None
