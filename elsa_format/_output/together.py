"""The moment when outputs appear: all that belong together, or none."""

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from elsa_format._threads import Meter, Progress, no_progress

names = threading.RLock()
"""Held while names come and go: who has it finds all as it was, or all as it will be."""


def _renew() -> None:
    global names
    names = threading.RLock()


if hasattr(os, "register_at_fork"):  # a fork has none of its parent's threads
    os.register_at_fork(after_in_child=_renew)


@runtime_checkable
class Unnamed(Protocol):
    """An output that has no name until it is given one."""

    @property
    def path(self) -> Path | None:
        """Where it will be, if that is on this machine."""
        ...

    @property
    def waiting(self) -> int:
        """Bytes that `sync` has to send."""
        ...

    def sync(self, tick: Callable[[int], object] = lambda size: None) -> None:
        """Have all bytes where they will stay; what may take long is done here, and counted."""
        ...

    def take_name(self) -> None:
        """Appear."""
        ...

    def lose_name(self) -> None:
        """Undo `take_name`; what it replaced is gone."""
        ...

    def close(self) -> None:
        """All is well: make the name durable."""
        ...


def commit_together(
    files: Sequence[Unnamed], *, renew: bool = False, progress: Progress = no_progress
) -> None:
    """Let files appear that are of use only together, all or none.

    Neither file systems nor stores name several files at once, so the order makes up for it, even
    if the power fails: the last is there only while all others are, and to `renew` it, an old one
    goes first.
    """
    *others, last = files
    meter = Meter(progress, sum(file.waiting for file in files))
    for file in files:
        file.sync(meter.tick)
    named: list[Unnamed] = []
    with names:
        try:
            if renew:
                last.lose_name()
                settle([last])
            for file in others:
                file.take_name()
                named.append(file)
            settle(others)
            last.take_name()
        except BaseException:
            for file in named:
                with contextlib.suppress(Exception):  # a store that failed may fail again
                    file.lose_name()
            raise
    for file in files:
        file.close()


def settle(files: Sequence[Unnamed]) -> None:
    """Make the names of files durable, as far as they are on this machine."""
    paths = [file.path for file in files if file.path is not None]
    for path in {path.parent: path for path in paths}.values():
        sync_folder(path)


def sync_folder(path: Path) -> None:
    """Make names beside a path durable."""
    with contextlib.suppress(OSError):  # not every directory can be synced
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
