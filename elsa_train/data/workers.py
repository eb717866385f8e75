"""Batches made by worker processes, which write them into memory that they share with this one.

Who asks for a batch gets the bits that the data itself would give, whatever the number of workers.
"""

import mmap
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from tempfile import TemporaryFile
from typing import Any, NoReturn, Self

import numpy as np
from numpy.typing import NDArray

from elsa_train._errors import BadData, BadRecipe, TrainError
from elsa_train._own import blaming
from elsa_train.data.protocol import Data, Split, take_batch

LARGEST = 32
"""Examples of a task, if a batch has as many for each worker: one costs this process 0.1 ms."""
START = "import sys; sys.path[:] = {}; from elsa_train.data.workers import work; work({})"

Place = tuple[int, int]
"""Where a batch lies in the shared memory, and the size of its slot."""


class Workers:
    """Data whose batches are made in `count` processes; they end with this object or process."""

    concurrent = True

    def __init__(self, data: Data, count: int) -> None:
        """Start the processes, and send them the data, by pickle."""
        if os.name != "posix":
            raise BadRecipe(f"workers: found {count}, expected 0 on this system")
        try:
            content = pickle.dumps(data, protocol=5)
        except Exception as error:
            raise BadRecipe(
                f"workers: {type(data).__name__} can't be sent to worker processes "
                f"({blaming(error)}); use --workers 0"
            ) from None
        self._data, self._count = data, count
        self.num_classes, self.mean, self.std = data.num_classes, data.mean, data.std
        self._like: dict[Split, tuple[NDArray[Any], NDArray[np.int32]]] = {}
        self._slots = _Slots()
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        workers = [_Worker(self._slots.file, content) for _ in range(count)]
        for worker in workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(count, "data worker")
        self.close = weakref.finalize(self, _close, workers, self._threads)
        """End the processes."""

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the processes."""
        self.close()

    def __getattr__(self, name: str) -> Any:
        # What only some data has: identity, label_shape.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._data, name)

    def size(self, split: Split) -> int:
        """Return the number of examples."""
        return self._data.size(split)

    def shape(self) -> tuple[int, ...]:
        """Return the shape of an example."""
        return self._data.shape()

    def batch(
        self, split: Split, indices: NDArray[np.int64], seed: int
    ) -> tuple[NDArray[Any], NDArray[np.int32]]:
        """Return the examples at these indices; their memory is used again when they are gone."""
        if split not in self._like:
            self._like[split] = take_batch(self._data, split, indices[:1], seed)
        like, label = self._like[split]
        shape = (len(indices), *like.shape[1:])
        place, examples = self._slots.take(shape, like.dtype)
        labels = np.empty((len(indices), *label.shape[1:]), np.int32)
        each = min(LARGEST, -(-len(indices) // self._count))

        def ask(first: int) -> None:
            chunk = slice(first, first + each)
            worker = self._idle.get()
            try:
                task = (place, shape, like.dtype, first, split, indices[chunk], seed)
                labels[chunk] = worker.ask(task)
            finally:
                self._idle.put(worker)

        asked = [self._threads.submit(ask, first) for first in range(0, len(indices), each)]
        wait(asked)  # all: the slot must not be written to when an error has freed it
        for future in asked:
            future.result()
        return examples, labels


class _Worker:
    """A process, and the pipe to it."""

    def __init__(self, shared: int, content: bytes) -> None:
        here, there = Pipe()
        command = START.format(sys.path, there.fileno())
        # It decodes images: an accelerator is not for it to hold, if somebody's data imports JAX.
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", command],
            stdin=subprocess.DEVNULL,
            stdout=2,  # what this process prints is for programs, too
            pass_fds=(there.fileno(), shared),
            env=environment,
        )
        there.close()
        self.pipe = here
        try:
            here.send((os.getcwd(), shared))
            here.send_bytes(content)
        except OSError:
            self._ended()

    def ask(self, task: Any) -> NDArray[np.int32]:
        """Return the labels of a chunk, whose examples are in the shared memory then."""
        try:
            self.pipe.send(task)
            labels, error = self.pipe.recv()
        except (OSError, EOFError):
            self._ended()
        if error is not None:
            raise error
        found: NDArray[np.int32] = labels
        return found

    def _ended(self) -> NoReturn:
        code = self.process.wait()
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        raise TrainError(f"a data worker ended {how}; --workers 0 reads the data without them")


def _close(workers: Sequence[_Worker], threads: ThreadPoolExecutor) -> None:
    threads.shutdown()
    for worker in workers:
        worker.pipe.close()
    for worker in workers:
        worker.process.wait()


class _Slots:
    """Shared memory in slots of one batch each; one is free when its array is gone.

    A file without a name, in memory: containers often have 64 MB of the other kind, /dev/shm.
    """

    def __init__(self) -> None:
        if hasattr(os, "memfd_create"):
            self.file = os.memfd_create("batches")
        else:
            with TemporaryFile() as file:
                self.file = os.dup(file.fileno())
        weakref.finalize(self, os.close, self.file)
        self._size = 0
        self._free: list[tuple[Place, mmap.mmap]] = []
        self._lock = threading.Lock()

    def take(self, shape: tuple[int, ...], dtype: "np.dtype[Any]") -> tuple[Place, NDArray[Any]]:
        """Return an array in a slot that is free, or in a new one, and where it lies."""
        count = int(np.prod(shape))
        needed = max(1, count * dtype.itemsize)
        with self._lock:
            fits = [slot for slot in self._free if slot[0][1] >= needed]
            if fits:
                slot = min(fits, key=lambda slot: slot[0][1])
                self._free.remove(slot)
            else:
                slot = self._grow(-(-needed // mmap.PAGESIZE) * mmap.PAGESIZE)
        place, memory = slot
        # Views of an array keep it, and JAX keeps what it has not copied yet.
        whole = np.frombuffer(memory, dtype, count)
        weakref.finalize(whole, self._free.append, slot).atexit = False
        return place, whole.reshape(shape)

    def _grow(self, size: int) -> tuple[Place, mmap.mmap]:
        place = self._size, size
        self._size += size
        os.ftruncate(self.file, self._size)
        return place, mmap.mmap(self.file, size, offset=place[0])


def work(fd: int) -> None:
    """Make chunks of batches for the process at the other end of a pipe, until it closes that."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # of the whole group: who asks decides
    pipe = Connection(fd)
    try:
        folder, shared = pipe.recv()
        os.chdir(folder)
        content = pipe.recv_bytes()
    except EOFError:
        return
    data: Any = None
    mapped: dict[int, mmap.mmap] = {}
    while True:
        try:
            place, shape, dtype, first, split, indices, seed = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            data = pickle.loads(content) if data is None else data
            examples, labels = take_batch(data, split, indices, seed)
            start, size = place
            if start not in mapped:
                mapped[start] = mmap.mmap(shared, size, offset=start)
            if examples.dtype != dtype or examples.shape[1:] != shape[1:]:
                raise BadData(f"{split} examples are {examples.dtype}, others {dtype}")
            whole = np.frombuffer(mapped[start], dtype, int(np.prod(shape))).reshape(shape)
            whole[first : first + len(indices)] = examples
            answer: Any = (labels, None)
        except Exception as error:
            answer = (None, _sendable(error))
        with suppress(OSError):
            pipe.send(answer)


def _sendable(error: Exception) -> Exception:
    """Return the error, or, where another process could not make it again, what it says."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return TrainError(traceback.format_exception_only(error)[-1].strip())
    return error
