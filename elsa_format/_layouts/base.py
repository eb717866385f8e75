"""What a layout is: the parts a nested tensor becomes, and the ways there and back (spec §9)."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import numpy as np
from numpy.typing import NDArray

from elsa_format._container import RESERVED, TensorInfo
from elsa_format._counters import count_kept
from elsa_format._errors import CountMismatch, InvalidLayout, Truncated, UnsupportedFeature
from elsa_format._storage import Reader, fill

Piece = tuple[str, NDArray[Any]]
"""A part's name and the next of its content."""

Room = Callable[[str, int, int, Any], NDArray[Any]]
"""Memory for a part, the place of its next element, how many there may be, and their dtype.

It may be for fewer if the part has no more."""


def part_name(part: str, name: str) -> str:
    """The stored name of one part of a tensor."""
    return f"{RESERVED}{part}.{name}"


@dataclass(frozen=True)
class TensorMask:
    """One nested tensor at one level: which words are kept, and how many that must be."""

    info: TensorInfo
    bits: int
    """Of the counters; `NOT_ZERO` where all else is zero already."""
    level: int
    expected: int
    where: str


class Encoder(ABC):
    """Turns one nested tensor, block by block, into the parts of a layout."""

    def __init__(self, tensor: TensorMask, buffer: Room | None = None) -> None:
        """Parts go to the `room`, or to memory that the next block reuses."""
        self.tensor, self.name = tensor, tensor.info.name
        self.bits, self.level = tensor.bits, tensor.level
        self.kept = self.position = 0
        self._buffer = buffer or _Scratch()

    @abstractmethod
    def encode(self, words: NDArray[Any]) -> list[Piece]:
        """What the next words, a multiple of 8 but for the last, add to the parts."""

    def finish(self) -> list[Piece]:
        """What is left to add; raises CountMismatch unless the expected number was kept."""
        if self.kept != self.tensor.expected:
            self._mismatch("")
        return []

    def buffer(self, part: str, start: int, size: int, dtype: Any) -> NDArray[Any]:
        """Memory for the next elements of a part."""
        return self._buffer(part_name(part, self.name), start, size, dtype)

    def took(self, words: NDArray[Any], kept: int) -> None:
        """Count words that were encoded, and compare with the profile's count."""
        self.position += words.size
        self.kept += kept
        if self.kept > self.tensor.expected:
            self._mismatch("at least ")

    def refuse(self, words: NDArray[Any]) -> NoReturn:
        """There was no room for as many as these words keep."""
        self.took(words, count_kept(words, self.bits, self.level))
        raise AssertionError("room for fewer weights than expected")

    def _mismatch(self, qualifier: str) -> NoReturn:
        raise CountMismatch(
            f"{self.tensor.where}: tensor {self.name!r}: level {self.level} "
            f"keeps {qualifier}{self.kept} weights, expected {self.tensor.expected}"
        )


class Decoder(ABC):
    """Turns the parts of one tensor back into its words, in any number at a time."""

    @abstractmethod
    def __init__(self, info: TensorInfo, parts: Mapping[str, "Elements"]) -> None:
        """Get the parts by the first word of their names."""

    @abstractmethod
    def decode(self, words: NDArray[Any]) -> None:
        """Fill in the next words; 8 or a multiple, but for the last."""

    @abstractmethod
    def finish(self) -> None:
        """Raise InvalidLayout unless the parts held as much as was decoded."""


class Layout(ABC):
    """One layout; a new one is a subclass, an entry in `LAYOUTS` and a section of the spec."""

    encoder: ClassVar[type[Encoder]]
    decoder: ClassVar[type[Decoder]]

    @abstractmethod
    def parts(self, info: TensorInfo, kept: int) -> list[TensorInfo]:
        """The tensors that a nested tensor becomes."""

    def loaded(self, parts: list[NDArray[Any]], shape: tuple[int, ...]) -> Any:
        """What `load` returns: the parts as they were listed, as one object."""
        raise NotImplementedError


class _Scratch:
    """Memory that is reused from block to block."""

    def __init__(self) -> None:
        self._held: dict[str, NDArray[Any]] = {}

    def __call__(self, part: str, start: int, size: int, dtype: Any) -> NDArray[Any]:
        held = self._held.get(part)
        if held is None or held.size < size:
            held = self._held[part] = np.empty(size, dtype)
        return held[:size]


class Elements:
    """The elements of a stored part, read along into memory that is reused."""

    def __init__(self, reader: Reader, dtype: "np.dtype[Any]", count: int) -> None:
        self.left = count
        """Elements that were not taken yet."""
        self._reader = reader
        self._buffer = np.empty(0, dtype)
        self._start = self._stop = 0

    def peek(self, count: int) -> NDArray[Any]:
        """The next elements, fewer at the end; the memory is used again by the next call."""
        more = min(count, self.left) - (self._stop - self._start)
        if more > 0:
            held = self._buffer[self._start : self._stop]
            size = held.size + more
            buffer = self._buffer if self._buffer.size >= size else np.empty(size, held.dtype)
            buffer[: held.size] = held.copy() if buffer is self._buffer else held
            self._buffer, self._start, self._stop = buffer, 0, size
            if missing := fill(self._reader, buffer[held.size : size].view(np.uint8).data):
                raise Truncated(f"ends {missing} bytes early")
        return self._buffer[self._start : min(self._start + count, self._stop)]

    def drop(self, count: int) -> None:
        """Be done with the next elements."""
        self._start += count
        self.left -= count

    def take(self, count: int) -> NDArray[Any]:
        """The next elements, for good."""
        found = self.peek(count)
        self.drop(found.size)
        return found


def refuse_zeros(values: NDArray[Any]) -> None:
    """A kept weight has a counter above 0, so a zero would be one that is not kept."""
    if not values.all():
        raise InvalidLayout("a value is zero, which no kept weight is")


def empty_array(shape: tuple[int, ...], dtype: "np.dtype[Any]") -> NDArray[Any]:
    """Memory for an array of any number of dimensions that numpy has."""
    try:
        return np.empty(shape, dtype)
    except ValueError as error:
        raise UnsupportedFeature(f"{len(shape)} dimensions: {error}") from None
