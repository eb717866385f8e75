"""What holds bytes: the interface of all storages, and how a range of one is read."""

import os
import sys
from abc import ABC, abstractmethod
from typing import IO, Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from elsa_format._container import Readable

Source = str | os.PathLike[str] | IO[bytes]
"""A path, a URL, or a readable binary stream, which need not seek."""


class Closing:
    """A context that closes itself."""

    def close(self) -> None:
        """Give back what is held."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


class Reader(Protocol):
    """Bytes read along; short reads are allowed, and none means the end."""

    position: int

    def readinto(self, buffer: Any, /) -> int: ...
    def seek(self, position: int, /) -> None: ...
    def close(self) -> None: ...

    def read(self, size: int, /) -> bytes:
        """At most `size` bytes, and a mebibyte."""
        buffer = bytearray(min(size, 1 << 20))
        return bytes(buffer[: self.readinto(buffer)])


class Storage(Protocol):
    """Bytes that can be read anywhere, from several threads."""

    name: str

    @property
    def size(self) -> int | None:
        """Bytes in all, None where only the end would tell."""
        ...

    @property
    def high_latency(self) -> bool:
        """Whether every new position costs a round trip."""
        ...

    def front(self) -> Readable:
        """The first bytes, to read the header from."""
        ...

    def reader(self, start: int, stop: int) -> Reader:
        """The bytes of a range."""
        ...

    def mapped(self) -> NDArray[np.uint8] | None:
        """All bytes, not read yet, of a file on this machine; of all others None."""
        ...

    def check_unchanged(self, *, grows: bool = False) -> None:
        """Raise InputChanged if the bytes are no longer those that were opened.

        With `grows`, more may follow them: a delivery file that is upgraded.
        """
        ...

    def close(self) -> None: ...


class PositionedStorage(ABC):
    """Storage that reads at any position by itself, and has nothing to compare or to close."""

    name: str
    size: int | None
    high_latency = False

    @abstractmethod
    def read_at(self, position: int, view: memoryview) -> int:
        """Fill as much of the buffer as one read gives from a position."""

    def front(self) -> Readable:
        """The first bytes, whatever size the system states: some files have none."""
        return self.reader(0, sys.maxsize)

    def reader(self, start: int, stop: int) -> Reader:
        """The bytes of a range."""
        return Window(self, start, stop)

    def mapped(self) -> NDArray[np.uint8] | None:
        """All bytes, not read yet, of a file on this machine."""
        return None

    def check_unchanged(self, *, grows: bool = False) -> None:  # noqa: B027 - its owner's
        """Raise InputChanged if the bytes are no longer those that were opened."""

    def close(self) -> None:  # noqa: B027
        """Close what was opened here."""


class Window(Reader):
    """A range of a storage, read along."""

    def __init__(self, storage: PositionedStorage, start: int, stop: int) -> None:
        self.storage, self.position, self.stop = storage, start, stop

    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer)[: max(self.stop - self.position, 0)]
        count = self.storage.read_at(self.position, view) if view else 0
        self.position += count
        return count

    def seek(self, position: int, /) -> None:
        self.position = position

    def close(self) -> None:
        """Nothing is held."""


class Fillable(Protocol):
    """What a buffer is filled from."""

    def readinto(self, buffer: Any, /) -> int: ...


def fill(reader: Fillable, view: memoryview) -> int:
    """Fill a buffer from short reads, and say how many bytes are missing at the end."""
    while view:
        count = reader.readinto(view)
        if not count:
            break
        view = view[count:]
    return len(view)


def stream_name(stream: IO[bytes]) -> str:
    """A name for messages."""
    if stream is getattr(sys.stdin, "buffer", None):
        return "<stdin>"
    name = getattr(stream, "name", None)
    return name if isinstance(name, str) else "<stream>"
