"""Threads for loops that release the GIL: hashing, kernels, file reads."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")
CORES = os.cpu_count() or 1


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(CORES, thread_name_prefix="elsa")


if hasattr(os, "register_at_fork"):  # a fork has none of its parent's threads
    os.register_at_fork(after_in_child=_pool.cache_clear)


def start(function: Callable[..., object], *arguments: Any) -> "Future[object]":
    """Call the function in a thread, while the caller goes on."""
    return _pool().submit(function, *arguments)


def each(function: Callable[[T], object], items: Sequence[T], *, parallel: bool) -> None:
    """Call the function on every item, in threads if asked; the first error is raised."""
    if parallel and len(items) > 1 and CORES > 1:
        for _ in _pool().map(function, items):
            pass
    else:
        for item in items:
            function(item)
