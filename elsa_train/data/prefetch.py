"""Batches made ahead of their use."""

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self

DEPTH = 2
"""Batches ahead of the one in use, each in memory."""


class Prefetch:
    """What each of some calls returns, in their order; two are always under way or done.

    With two threads, one batch is on its way to the devices while the next is decoded. Close it to
    end them.
    """

    def __init__(self, calls: Iterable[Callable[[], Any]], threads: int = 1) -> None:
        """Start the threads and the first calls."""
        self._calls = iter(calls)
        self._threads = ThreadPoolExecutor(threads, "prefetch")
        self._ahead: deque[Future[Any]] = deque()
        for _ in range(DEPTH):
            self._start()

    def _start(self) -> None:
        for call in self._calls:
            self._ahead.append(self._threads.submit(call))
            return

    def __iter__(self) -> Self:
        """Return itself."""
        return self

    def __next__(self) -> Any:
        """Return the next item, or raise what making it raised."""
        if not self._ahead:
            raise StopIteration
        item = self._ahead.popleft().result()
        self._start()
        return item

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(cancel_futures=True)

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the threads."""
        self.close()
