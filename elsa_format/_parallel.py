"""Threads for loops that release the GIL: hashing, kernels, file reads."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from typing import TypeVar

T = TypeVar("T")
CORES = os.cpu_count() or 1
WORTH_IT = 1 << 18
"""Bytes from which handing a block to a thread costs less than it saves."""


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(CORES, thread_name_prefix="elsa")


class Task:
    """A call that runs in a thread, or at once if that is not asked for; always waited for."""

    def __init__(self, function: Callable[[], object], *, parallel: bool) -> None:
        self._future = _pool().submit(function) if parallel and CORES > 1 else None
        if self._future is None:
            function()

    def wait(self) -> None:
        """Return when it has ended, whatever came of it."""
        if self._future is not None:
            wait([self._future])

    def finish(self) -> None:
        """Return when it has ended, and raise what it raised."""
        if self._future is not None:
            self._future.result()


def each(function: Callable[[T], object], items: Sequence[T], *, parallel: bool) -> None:
    """Call the function on every item, in threads if asked; the first error is raised."""
    if parallel and len(items) > 1 and CORES > 1:
        for _ in _pool().map(function, items):
            pass
    else:
        for item in items:
            function(item)
