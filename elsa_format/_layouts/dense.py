"""The dense layout: a tensor as it is, zeros where a level keeps nothing (spec §9)."""

from collections.abc import Mapping
from typing import Any, NoReturn

from numpy.typing import NDArray

from elsa_format import _kernels
from elsa_format._container.dtypes import Dtype
from elsa_format._container.header import TensorInfo
from elsa_format._kept import NOT_ZERO
from elsa_format._layouts.base import Decoder, Elements, Encoder, Form, Kept, Nested, Piece, Room


class LevelMask:
    """Zeroes in place what a level does not keep."""

    def __init__(self, tensor: Nested) -> None:
        self.bits, self.level = tensor.bits, tensor.level
        self._kept = Kept(tensor)

    def apply(self, words: NDArray[Any]) -> None:
        """Mask the tensor's next weights."""
        if self.bits != NOT_ZERO:
            self._kept.add(_kernels.mask(words, words, self.bits, self.level))

    def finish(self) -> None:
        """Raise CountMismatch unless the profile's number of weights was kept."""
        if self.bits != NOT_ZERO:
            self._kept.finish()


class DenseEncoder(Encoder):
    """The tensor itself, masked in place."""

    def __init__(self, tensor: Nested) -> None:
        self.name, self._mask = tensor.info.name, LevelMask(tensor)

    def encode(self, words: NDArray[Any]) -> list[Piece]:
        self._mask.apply(words)
        return [(self.name, words)]

    def finish(self) -> list[Piece]:
        self._mask.finish()
        return []


class Dense(Form):
    """One part, the tensor."""

    name = "dense"

    def parts(self, name: str, dtype: Dtype, shape: tuple[int, ...], kept: int) -> list[TensorInfo]:
        return [TensorInfo(name, dtype, shape)]

    def encoder(self, tensor: Nested, room: Room | None = None) -> Encoder:
        return DenseEncoder(tensor)

    def decoder(self, info: TensorInfo, parts: Mapping[str, Elements]) -> Decoder:
        _as_it_is()

    def loaded(self, parts: list[NDArray[Any]], shape: tuple[int, ...]) -> Any:
        _as_it_is()


def _as_it_is() -> NoReturn:
    raise AssertionError("dense tensors are read as they are stored")
