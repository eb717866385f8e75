"""The bitmask layout: one bit per weight, then the kept values (spec §9.2)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elsa_format import _kernels
from elsa_format._container import TensorInfo
from elsa_format._container.dtypes import DTYPES
from elsa_format._counters import compact
from elsa_format._errors import InvalidLayout
from elsa_format._layouts.base import (
    Decoder,
    Elements,
    Encoder,
    Layout,
    Piece,
    empty_array,
    part_name,
    refuse_zeros,
)


@dataclass(frozen=True)
class Bitmask:
    """A sparse tensor as one bit per element (least significant first) and the kept values.

    >>> tensor = Bitmask(np.array([0b1010], np.uint8), np.array([1.5, 2.5], np.float32), (2, 2))
    >>> tensor.to_dense().tolist()
    [[0.0, 1.5], [0.0, 2.5]]
    """

    bitmask: NDArray[np.uint8]
    values: NDArray[Any]
    shape: tuple[int, ...]

    def to_dense(self) -> NDArray[Any]:
        """The tensor with zeros; raises InvalidLayout if bits and values disagree."""
        dense = empty_array(self.shape, self.values.dtype)
        words = np.dtype(f"<u{dense.itemsize}")
        flat, values = dense.reshape(-1).view(words), self.values.view(words)
        used = _expand(self.bitmask, values, flat)
        _check_used(used, values.size)
        return dense


def _expand(bitmask: NDArray[np.uint8], values: NDArray[Any], words: NDArray[Any]) -> int:
    try:
        return _kernels.expand(bitmask, values, words)
    except ValueError as error:
        raise InvalidLayout(f"bitmask: {error}") from None


def _check_used(used: int, there: int) -> None:
    if used != there:
        raise InvalidLayout(f"bitmask: {used} bits set for {there} values")


class BitmaskEncoder(Encoder):
    """Compacts the kept words of each block."""

    def encode(self, words: NDArray[Any]) -> list[Piece]:
        bitmask = self.buffer("bitmask", self.position // 8, -(-words.size // 8), np.uint8)
        values = self.buffer("values", self.kept, words.size, words.dtype)
        try:
            kept = compact(words, self.bits, self.level, bitmask, values)
        except ValueError:
            self.refuse(words)
        self.took(words, kept)
        return [
            (part_name("bitmask", self.name), bitmask),
            (part_name("values", self.name), values[:kept]),
        ]


class BitmaskDecoder(Decoder):
    """Takes as many values as bits are set."""

    def __init__(self, info: TensorInfo, parts: Mapping[str, Elements]) -> None:
        self._bitmask, self._values = parts["bitmask"], parts["values"]
        self._used, self._all = 0, self._values.left

    def decode(self, words: NDArray[Any]) -> None:
        values = self._values.peek(words.size)
        used = _expand(self._bitmask.take(-(-words.size // 8)), values, words)
        refuse_zeros(values[:used])
        self._values.drop(used)
        self._used += used

    def finish(self) -> None:
        _check_used(self._used, self._all)


class BitmaskLayout(Layout):
    """Two parts: the bits, the values."""

    encoder, decoder = BitmaskEncoder, BitmaskDecoder

    def parts(self, info: TensorInfo, kept: int) -> list[TensorInfo]:
        mask_bytes = -(-info.elements // 8)
        return [
            TensorInfo(part_name("bitmask", info.name), DTYPES["U8"], (mask_bytes,)),
            TensorInfo(part_name("values", info.name), info.dtype, (kept,)),
        ]

    def loaded(self, parts: list[NDArray[Any]], shape: tuple[int, ...]) -> Bitmask:
        bitmask, values = parts
        return Bitmask(bitmask, values, shape)
