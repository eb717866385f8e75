"""The dense layout: a tensor as it is, zeros where a level keeps nothing (spec §9)."""

from typing import Any

from numpy.typing import NDArray

from elsa_format import _kernels
from elsa_format._container import TensorInfo
from elsa_format._counters import NOT_ZERO
from elsa_format._layouts.base import Encoder, Layout, Piece


class DenseEncoder(Encoder):
    """Zeroes in place what a level does not keep; in a level file, that is zero already."""

    def encode(self, words: NDArray[Any]) -> list[Piece]:
        if self.bits != NOT_ZERO:
            self.took(words, _kernels.mask(words, words, self.bits, self.level))
        return [(self.name, words)]

    def finish(self) -> list[Piece]:
        return [] if self.bits == NOT_ZERO else super().finish()


class Dense(Layout):
    """One part, the tensor; it is read as it is stored."""

    encoder = DenseEncoder

    def parts(self, info: TensorInfo, kept: int) -> list[TensorInfo]:
        return [TensorInfo(info.name, info.dtype, info.shape)]
