"""Where results go: a file that appears whole or not at all, or a stream."""

import contextlib
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

from elsa_format._output.atomic import AtomicFile, commit_together
from elsa_format._output.streams import Pipe, Spool

Target = str | os.PathLike[str] | IO[bytes]
"""A path, or a writable binary stream such as sys.stdout.buffer."""


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


def commit_outputs(outputs: Sequence[Output], *, instead_of: Path | None = None) -> None:
    """Let outputs appear that belong together, the last only while all others are there."""
    files = [output for output in outputs if isinstance(output, AtomicFile)]
    if len(files) == len(outputs):
        commit_together(files, instead_of=instead_of)
        return
    for output in outputs:  # a device or pipe among them
        output.commit()
