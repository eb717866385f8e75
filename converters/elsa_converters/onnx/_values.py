"""Does a template that has values of its own agree with the ELSA file?"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elsa_converters.onnx._weights import Weight
from elsa_format.plugins import Dtype, TensorInfo


class ValueCheck:
    """Compares the template's own values of a tensor, if it has any, with the stored ones.

    Shared tensors must be equal. Packing changes nested weights by less than 2^bits units in the
    last place. The template may be a level, so its zeros pass; if a `level` is read, those of the
    file pass, too. Weights with batch norm folded in do not.
    """

    def __init__(
        self, weight: Weight, stored: TensorInfo, bits: int, block: int, *, level: bool = False
    ) -> None:
        self.own, self.stored, self.bits, self.level = weight.info, stored, bits, level
        self.blocks: Iterator[NDArray[np.uint8]] | None = None
        if weight.source is not None:
            factor = weight.info.dtype.size // stored.dtype.size  # 2 if the graph widens
            self.blocks = weight.blocks(block * factor)
        self.position = self.different = 0
        self.first = ("", "")

    def update(self, block: NDArray[np.uint8]) -> None:
        """Compare the next stored bytes."""
        if self.blocks is None:
            return
        own, words = self._as_stored(next(self.blocks)), self.stored.dtype.words
        wrong = self._wrong(own.view(words), block.view(words))
        if wrong.size and not self.different:
            index = int(wrong[0])
            place = self.position // words.itemsize + index
            found, expected = (_values(x, self.stored.dtype)[index] for x in (own, block))
            self.first = (f"{found!s} at {place}", str(expected))
        self.different += wrong.size
        self.position += block.size

    def row(self) -> tuple[str, str, str] | None:
        """A line for the table of differences, or None if the values agree."""
        if not self.different:
            return None
        found, expected = self.first
        return self.stored.name, f"{found}, {self.different} values differ", expected

    def _as_stored(self, own: NDArray[np.uint8]) -> NDArray[np.uint8]:
        if self.own.dtype == self.stored.dtype:
            return own
        return _values(own, self.own.dtype).astype(self.stored.dtype.numpy).view(np.uint8)

    def _wrong(self, own: NDArray[Any], stored: NDArray[Any]) -> NDArray[np.intp]:
        if not self.bits:
            return np.flatnonzero(own != stored)
        magnitude = own.dtype.type((1 << (self.stored.dtype.size - 1)) - 1)
        a, b = own & magnitude, stored & magnitude
        distance = np.where(a > b, a - b, b - a)
        changed = (distance >= own.dtype.type(1 << self.bits)) | (own ^ stored > magnitude)
        compared = (a != 0) & (b != 0) if self.level else a != 0
        return np.flatnonzero(changed & compared)


def _values(content: NDArray[np.uint8], dtype: Dtype) -> NDArray[Any]:
    assert dtype.numpy is not None  # every dtype that ONNX shares has one
    return content.view(dtype.numpy)
