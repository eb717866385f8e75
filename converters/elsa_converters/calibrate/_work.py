"""Threads for the arithmetic of calibration: the same bits, however many there are."""

import ctypes
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")
R = TypeVar("R")
_trim = None if os.name == "nt" else getattr(ctypes.CDLL(None), "malloc_trim", None)
ROWS = 128
"""Rows of a product computed at a time: fixed, as their number can change the last bits."""


class Work:
    """A few threads, each of which runs a library for matrices that has one thread."""

    def __init__(self, threads: int | None = None) -> None:
        self.threads = threads or len(os.sched_getaffinity(0))
        self._pool = None
        if self.threads > 1:
            self._pool = ThreadPoolExecutor(self.threads, initializer=_quiet)

    def map(self, function: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """The function's results, in order."""
        if self._pool is None:
            return [function(item) for item in items]
        return list(self._pool.map(function, items))

    def product(self, one: NDArray[Any], other: NDArray[Any]) -> NDArray[Any]:
        """`one @ other`, some rows at a time."""
        if len(one) <= ROWS:
            return np.asarray(one @ other)
        result = np.empty((len(one), other.shape[1]), np.result_type(one, other))
        starts = range(0, len(one), ROWS)
        self.map(lambda at: np.matmul(one[at : at + ROWS], other, result[at : at + ROWS]), starts)
        return result

    def products(self, ones: NDArray[Any], others: NDArray[Any]) -> NDArray[Any]:
        """The product of each of several matrices with its own other."""
        return np.stack([self.product(*pair) for pair in zip(ones, others, strict=True)])

    def trim(self) -> None:
        """Give the system the memory that freed arrays left: glibc keeps it for each thread."""
        if _trim is not None:
            _trim(0)

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


def _quiet() -> None:
    np.seterr(all="ignore")


@contextmanager
def working(threads: int | None = None) -> Iterator[Work]:
    """Threads of our own; the matrix library gets one thread for as long."""
    from threadpoolctl import threadpool_limits

    work = Work(threads)
    try:
        # What cannot be computed is refused in words.
        with threadpool_limits(1, "blas"), np.errstate(all="ignore"):
            yield work
    finally:
        work.close()
