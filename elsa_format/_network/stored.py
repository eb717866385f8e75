"""Tensors as a file stores them: an ELSA file, and what every file has in common."""

import sys
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from elsa_format._container import TensorInfo
from elsa_format._errors import TrailingData
from elsa_format._network.base import Network, TensorBytes
from elsa_format._profile import LevelNumber
from elsa_format._storage import Reader, Storage
from elsa_format._storage.local import SpooledStorage


@dataclass(frozen=True, eq=False)
class StoredNetwork(Network):
    """A network in one file, a stream or at a URL."""

    storage: Storage = field(kw_only=True)

    def open(self, level: LevelNumber = "dense", only: TensorInfo | None = None) -> TensorBytes:
        first, last = (only.start, only.stop) if only else (0, self.header.data_size)
        return StoredBytes(self.storage, self.header.data_start, first, last)

    def place(self, stored: str) -> tuple[str, int]:
        header = self.stored_header
        return self.name, header.data_start + header.tensors[stored].start

    def mapped(self, stored: str) -> NDArray[np.uint8] | None:
        memory, (_, start) = self.storage.mapped(), self.place(stored)
        nbytes = self.stored_header.tensors[stored].nbytes
        return None if memory is None else memory[start : start + nbytes]

    @property
    def high_latency(self) -> bool:
        return self.storage.high_latency

    def rereadable(self) -> Self:
        if self.storage.size is not None:
            return self
        storage = SpooledStorage(self.storage, self.header.data_start)
        storage.keep()
        return replace(self, storage=storage)

    def check_unchanged(self) -> None:
        self.storage.check_unchanged()

    def close(self) -> None:
        """Close the file."""
        self.storage.close()


class StoredBytes(TensorBytes):
    """A range of the data section of a file."""

    def __init__(self, storage: Storage, data_start: int, first: int, last: int) -> None:
        self._name, self._data_start = storage.name, data_start
        self._endless = storage.size is None  # what follows the last tensor must be seen, too
        stop = sys.maxsize if self._endless else data_start + last
        self._reader = storage.reader(data_start + first, stop)

    def seek(self, info: TensorInfo) -> Reader:
        start = self._data_start + info.start
        if self._reader.position != start:
            self._reader.seek(start)
        return self._reader

    def finish(self) -> None:
        if self._endless and self._reader.read(1):
            raise TrailingData(f"{self._name}: bytes follow the last tensor")

    def close(self) -> None:
        self._reader.close()
