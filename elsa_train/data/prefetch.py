"""Batches made ahead of their use."""

import queue
import threading
from collections.abc import Iterator
from typing import Any, Self


class Prefetch:
    """An iterator whose items are made in a thread; close it to end the thread."""

    def __init__(self, items: Iterator[Any], depth: int = 2) -> None:
        """Start the thread."""
        self._queue: queue.Queue[Any] = queue.Queue(depth)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._fill, args=(items,), daemon=True)
        self._thread.start()

    def _fill(self, items: Iterator[Any]) -> None:
        try:
            for item in items:
                if not self._put((item, None)):
                    return
            self._put((None, StopIteration()))
        except BaseException as error:  # handed to the consumer, who raises it
            self._put((None, error))

    def _put(self, entry: Any) -> bool:
        while not self._closed.is_set():
            try:
                self._queue.put(entry, timeout=0.1)
            except queue.Full:
                continue
            return True
        return False

    def __iter__(self) -> Self:
        """Return itself."""
        return self

    def __next__(self) -> Any:
        """Return the next item, or raise what making it raised."""
        item, error = self._queue.get()
        if error is not None:
            raise error
        return item

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._thread.join()
