"""Threads for work that releases the interpreter's lock: kernels, hashes, files.

A KeyboardInterrupt can come between any two steps of Python code. So threads are started, woken and
awaited by single calls into C: at no moment is a lock held, or a thread under way, that nobody
knows of, as in `threading.Thread.start` or a Condition.
"""

import _thread
import atexit
import os
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, TypeVar
from weakref import WeakSet

T = TypeVar("T")
R = TypeVar("R")
CORES = os.cpu_count() or 1
PATIENCE = 1.0
"""Seconds that threads are given to stop when their work is no longer wanted."""


Progress = Callable[[int, int], object]
"""Called with the bytes done so far and the bytes in all."""


def no_progress(done: int, total: int) -> None:
    """Show no progress."""


def tell(progress: Progress, doing: str, unit: str | None = None) -> None:
    """Say what is under way, if the progress can show it, and what is counted, if not bytes.

    >>> tell(no_progress, "3 of 12 layers")
    """
    if (show := getattr(progress, "doing", None)) is not None:
        show(doing, unit)


class Stopped(Exception):
    """Another thread failed, so this one need not go on."""


class Meter:
    """Adds up the bytes done in all threads, and is where they learn that they are to stop."""

    def __init__(self, progress: Progress, total: int) -> None:
        self.progress, self.total, self.done = progress, total, 0
        self._lock, self._stopped = _thread.allocate_lock(), False

    def tick(self, size: int) -> None:
        """Count more bytes."""
        if self._stopped:
            raise Stopped
        with self._lock:
            self.done += size
            self.progress(self.done, self.total)

    def stop(self) -> None:
        """Let every thread stop at its next tick."""
        self._stopped = True

    def run(self, function: Callable[[T], R], items: Sequence[T], jobs: int) -> list[R]:
        """Call the function on every item, `jobs` at a time; the first error stops the others."""
        if jobs <= 1 or len(items) <= 1:
            return list(map(function, items))
        return run(function, items, jobs, stop=self.stop)


class Task:
    """A call in another thread."""

    def __init__(self, function: Callable[..., object], *arguments: Any) -> None:
        self._call: tuple[Any, ...] = (function, *arguments)
        self._error: BaseException | None = None
        self._unfinished = _thread.allocate_lock()
        self._unfinished.acquire()

    def __call__(self) -> None:
        """Make the call."""
        try:
            function, *arguments = self._call
            function(*arguments)
        except BaseException as error:
            self._error = error
        finally:
            self._call = ()  # it may hold much memory
            self._unfinished.release()

    def wait(self) -> None:
        """Return when the call has returned; raise what it raised."""
        with self._unfinished:
            pass
        if self._error is not None:
            raise self._error

    def abandon(self, until: float) -> None:
        """Wait no longer than until then, and for the last time."""
        self._unfinished.acquire(timeout=max(until - time.monotonic(), 0))


def _has_thread(task: Task) -> bool:
    """Whether a thread could be had for a task."""
    try:
        _thread.start_new_thread(task, ())
    except RuntimeError:  # a limit of the system
        return False
    return True


class _Pool:
    """Threads that wait for tasks, one for each core."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._lock = _thread.allocate_lock()
        self._threads: list[Task] = []

    def add(self, task: Task) -> None:
        with self._lock:
            if len(self._threads) < CORES and _has_thread(thread := Task(self._serve)):
                self._threads.append(thread)
        if self._threads:
            self._tasks.put(task)
        else:
            task()

    def _serve(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()
            del task  # before the wait for the next

    def end(self) -> None:
        """Let no thread be at work while the interpreter, and what C libraries hold, goes."""
        threads, self._threads = self._threads, []
        for _ in threads:
            self._tasks.put(None)
        until = time.monotonic() + PATIENCE
        for thread in threads:
            thread.abandon(until)


_pool = _Pool()
atexit.register(lambda: _pool.end())


class Renewed(ABC):
    """What a forked child must not keep as it is: locks that are held, work that is under way."""

    def __init__(self) -> None:
        self.renew()
        _renewed.add(self)

    @abstractmethod
    def renew(self) -> None:
        """Have new locks, and no work under way: the parent's threads are not in the child."""


_renewed: WeakSet[Renewed] = WeakSet()


def _renew() -> None:
    global _pool
    _pool = _Pool()
    for state in list(_renewed):
        state.renew()


if hasattr(os, "register_at_fork"):  # a fork has none of its parent's threads
    os.register_at_fork(after_in_child=_renew)


def start(function: Callable[..., object], *arguments: Any) -> Task:
    """Call the function in a thread, while the caller goes on; it must not wait for others."""
    task = Task(function, *arguments)
    _pool.add(task)
    return task


def run(
    function: Callable[[T], R],
    items: Sequence[T],
    jobs: int,
    *,
    stop: Callable[[], object] = lambda: None,
) -> list[R]:
    """Call the function on every item, in `jobs` threads, and return what it returns.

    An error is raised when all threads have ended, which `stop` is called to hasten.
    """
    if jobs <= 1 or len(items) <= 1:
        return list(map(function, items))
    left = deque(enumerate(items))
    results: dict[int, R] = {}
    errors: dict[int, BaseException] = {}

    def give_up() -> None:
        left.clear()
        stop()

    def work() -> None:
        while left:
            try:
                at, item = left.popleft()
            except IndexError:  # another thread was quicker
                return
            try:
                results[at] = function(item)
            except BaseException as error:
                errors[at] = error
                give_up()

    threads: list[Task] = []
    try:
        while len(threads) < min(jobs, len(items)) and _has_thread(thread := Task(work)):
            threads.append(thread)
        if not threads:
            work()
        for thread in threads:
            thread.wait()
    except BaseException:  # Ctrl-C
        give_up()
        until = time.monotonic() + PATIENCE
        for thread in threads:
            thread.abandon(until)
        raise
    for _, error in sorted(errors.items()):
        if not isinstance(error, Stopped):
            raise error
    return [results[at] for at in range(len(items))]
