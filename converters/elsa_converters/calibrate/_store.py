"""What walks keep between two stretches: in memory up to a limit, beyond it in a temporary file."""

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True)
class Kept:
    """An array that is kept."""

    get: Callable[[], Array]
    drop: Callable[[], None]


class Store:
    """The arrays of all walks through a network, at most so many bytes of them in memory.

    The file has no name, so that nothing is left of it, however the process ends.
    """

    def __init__(self, most: int) -> None:
        self._most, self._used = most, 0
        self._file: Any = None
        self._end, self._count = 0, 0
        self._free: dict[int, list[int]] = {}
        """Places in the file that were given back, by their sizes."""
        self._lock = Lock()

    def put(self, array: Array) -> Kept:
        """Keep an array."""
        array = np.asarray(array, order="C")  # np.ascontiguousarray gives scalars an axis
        size = array.nbytes
        with self._lock:
            if self._used + size <= self._most or array.dtype.hasobject:
                self._used += size
                return Kept(lambda: array, partial(self._drop, size))
            offset = self._place(size)
        data = array.reshape(-1).view(np.uint8).data
        try:
            while data:
                data = data[os.pwrite(self._file.fileno(), data, offset + size - len(data)) :]
        except OSError as error:
            where = f"temporary file in {tempfile.gettempdir()}"
            advice = f"{error.strerror}; set TMPDIR to another place, or raise the limit of memory"
            raise OSError(error.errno, advice, where) from None
        read = partial(self._read, offset, array.dtype, array.shape)
        return Kept(read, partial(self._give_back, size, offset))

    def _drop(self, size: int) -> None:
        with self._lock:
            self._used -= size

    def _place(self, size: int) -> int:
        if self._file is None:
            self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - until it is empty
        self._count += 1
        if self._free.get(size):
            return self._free[size].pop()
        self._end += size
        return self._end - size

    def _read(self, offset: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
        array = np.empty(shape, dtype)
        data = array.reshape(-1).view(np.uint8).data
        while data:
            at = offset + array.nbytes - len(data)
            data = data[os.preadv(self._file.fileno(), [data], at) :]
        return array

    def _give_back(self, size: int, offset: int) -> None:
        with self._lock:
            self._free.setdefault(size, []).append(offset)
            self._count -= 1
            if not self._count:
                self._file.close()
                self._file, self._end, self._free = None, 0, {}
