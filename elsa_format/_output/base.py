"""A place to write: what is common to files, objects of a store, and streams."""

import contextlib
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

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
