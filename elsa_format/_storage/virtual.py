"""Tensors that are put together while they are read, as if a file held them one by one."""

from abc import ABC, abstractmethod
from typing import Any, Protocol

from elsa_format._container.header import Header, Readable, TensorInfo
from elsa_format._storage.base import Reader


class TensorBytes(Protocol):
    """The bytes of one tensor, read along."""

    def readinto(self, buffer: Any, /) -> int: ...
    def close(self) -> None: ...


class VirtualStorage(ABC):
    """Storage of tensors that no file holds as they are read."""

    name: str
    header: Header
    """Where the tensors would be."""
    high_latency = False

    @property
    def size(self) -> int:
        """Bytes that the file would have."""
        return self.header.data_start + self.header.data_size

    def front(self) -> Readable:
        """Nobody parses the header once more."""
        raise AssertionError("the header is known")

    def reader(self, start: int, stop: int) -> Reader:
        """Read along a range, which starts with a tensor."""
        return TensorReader(self, start)

    @abstractmethod
    def tensor(self, info: TensorInfo) -> "TensorBytes":
        """The bytes of a tensor, from the first on."""

    @abstractmethod
    def check_unchanged(self) -> None:
        """Raise InputChanged if what the tensors are made of is no longer what was opened."""

    @abstractmethod
    def close(self) -> None:
        """Close what the tensors are made of."""


class TensorReader(Reader):
    """Goes from tensor to tensor."""

    def __init__(self, storage: VirtualStorage, position: int) -> None:
        self._storage = storage
        header = storage.header
        infos = header.tensors.values()
        self._starts = {header.data_start + info.start: info for info in infos if info.nbytes}
        self._tensor: TensorBytes | None = None
        self.seek(position)

    def seek(self, position: int, /) -> None:
        """Go on at the start of another tensor."""
        self._position, self._left = position, 0

    def readinto(self, buffer: Any, /) -> int:
        if not self._left:
            if self._position not in self._starts:
                return 0  # the end
            info = self._starts[self._position]
            self.close()
            self._tensor, self._left = self._storage.tensor(info), info.nbytes
        assert self._tensor is not None
        count = self._tensor.readinto(memoryview(buffer).cast("B")[: self._left])
        self._left -= count
        self._position += count
        return count

    def close(self) -> None:
        if self._tensor is not None:
            self._tensor.close()
            self._tensor = None
