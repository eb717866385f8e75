"""Where results go: a file that appears whole or not at all, or a stream."""

import contextlib
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any, Protocol, TypeVar

from elsa_format._container.index import is_url
from elsa_format._output.atomic import AtomicFile
from elsa_format._output.streams import Pipe, Spool
from elsa_format._output.together import Unnamed, commit_together
from elsa_format._threads import Progress, no_progress

Target = str | os.PathLike[str] | IO[bytes]
"""A path, the URL of a store, or a writable binary stream such as sys.stdout.buffer."""

COPIED = 1 << 20
"""Bytes of a file that are read at a time."""

T = TypeVar("T")


class Output(Protocol):
    """A place to write bytes at positions; nothing counts before `commit`."""

    def write_at(self, position: int, data: Any) -> None: ...
    def commit(self) -> None: ...
    def discard(self) -> None: ...


@contextlib.contextmanager
def open_output(target: Target, *, force: bool = False, in_order: bool = False) -> Iterator[Output]:
    """The output for a target; discarded unless the block commits it.

    `in_order` promises writes front to back, which lets a stream pass them on at once.
    """
    with contextlib.ExitStack() as stack:
        output: Output
        if isinstance(target, str | os.PathLike) and not is_special(target):
            output = open_unnamed(target, force=force, in_order=in_order)
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


class UnnamedOutput(Output, Unnamed, Protocol):
    """A file, here or in a store."""

    name: str
    """For messages."""


def open_unnamed(
    target: str | os.PathLike[str],
    *,
    force: bool = False,
    in_order: bool = False,
    beside: UnnamedOutput | None = None,
) -> UnnamedOutput:
    """The file at a path or URL, which is in the same store as another that is `beside` it."""
    place = localized(os.fspath(target))
    if not is_url(place):
        return AtomicFile(place, force=force)
    # Imported here, so that those who never write to a URL do not wait for HTTP and TLS.
    from elsa_format._output.store import StoreFile

    neighbour = beside if isinstance(beside, StoreFile) else None
    return StoreFile(place, force=force, in_order=in_order, beside=neighbour)


def copy_file(
    path: str | os.PathLike[str],
    output: Output,
    tick: Callable[[int], object] = lambda size: None,
) -> None:
    """Write a file's bytes into an output, and count them."""
    position = 0
    with open(path, "rb", buffering=0) as file:
        while block := file.read(COPIED):
            output.write_at(position, block)
            position += len(block)
            tick(len(block))


def localized(target: T) -> T | str:
    """The target, or if it is the URL of a file on this machine, its path."""
    if isinstance(target, str) and re.match("(file|local)://", target, re.IGNORECASE):
        from elsa_format._storage.fsspec import find_store

        return find_store(target)[1]
    return target


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


def commit_outputs(
    outputs: Sequence[Output], *, renew: bool = False, progress: Progress = no_progress
) -> None:
    """Let outputs appear that belong together, the last only while all others are there.

    To `renew` it, an old one goes before the others come.
    """
    files = [output for output in outputs if isinstance(output, Unnamed)]
    if len(files) == len(outputs):
        commit_together(files, renew=renew, progress=progress)
        return
    for output in outputs:  # a device or pipe among them
        output.commit()
