"""Several shards at a time: threads that stop together, and one count of what they did."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


class Stopped(Exception):
    """Another shard failed, so this one need not go on."""


class Meter:
    """Adds up the bytes done in all threads, and is where they learn that they are to stop."""

    def __init__(self, progress: Callable[[int, int], object], total: int) -> None:
        self.progress, self.total, self.done = progress, total, 0
        self._lock, self._stop = threading.Lock(), threading.Event()

    def tick(self, size: int) -> None:
        """Count more bytes."""
        if self._stop.is_set():
            raise Stopped
        with self._lock:
            self.done += size
            self.progress(self.done, self.total)

    def run(self, function: Callable[[T], R], items: Sequence[T], jobs: int) -> list[R]:
        """Call the function on every item, `jobs` at a time; the first error stops the others.

        Threads suffice: kernels, hashes and files release the interpreter's lock.
        """
        if jobs <= 1 or len(items) <= 1:
            return [function(item) for item in items]
        with ThreadPoolExecutor(jobs, thread_name_prefix="elsa-job") as pool:
            futures = [pool.submit(function, item) for item in items]
            try:
                wait(futures, return_when=FIRST_EXCEPTION)
            finally:
                # Also when Ctrl-C ends the wait: leaving the pool waits for running threads.
                if not all(future.done() and not future.exception() for future in futures):
                    self._stop.set()
                    pool.shutdown(wait=True, cancel_futures=True)
            errors = [f.exception() for f in futures if not f.cancelled() and f.exception()]
            for error in errors:
                if error is not None and not isinstance(error, Stopped):
                    raise error
            return [future.result() for future in futures]
