"""Binding a template to an ELSA file: the same names, shapes, dtypes and, where shared, values."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper

from elsa_converters._errors import TemplateMismatch, UnsupportedOnnx
from elsa_converters.onnx._graph.walk import (
    FreshNames,
    compute_first,
    remove_named,
    rename_uses,
)
from elsa_converters.onnx._model.read import (
    LEVEL_KEY,
    LEVELS_KEY,
    TEMPLATE_KEY,
    Model,
    drop_metadata,
)
from elsa_converters.onnx._model.tensors import TO_ONNX, Weight
from elsa_format.plugins import Dtype, LevelNumber, Network, TensorInfo

_NOTHING = "nothing"
_FIRST_OPSET_WITH_BF16 = 13


@dataclass(frozen=True)
class Binding:
    """A template and an ELSA file that fit each other."""

    model: Model
    network: Network
    proto: ModelProto
    """The template's graph without the initializers that come from elsewhere."""
    names: frozenset[str]
    """The file's tensors that the graph uses, each an initializer of the same name."""
    rest: dict[str, Weight]
    """Weights that only the template has."""

    def info(self, name: str) -> TensorInfo:
        """The initializer of a tensor, dtype and shape as stored."""
        return self.network.header.tensors[name]

    def kept(self, name: str, level: LevelNumber) -> int | None:
        """How many weights a level keeps of a tensor; None if all, as it is not a nested one."""
        profile = self.network.profile
        if level == "dense" or name not in profile.nested:
            return None
        return profile.kept(name, level)


def bind(model: Model, network: Network) -> Binding:
    """Check that the template is of this file's network, and let its graph take stored tensors.

    Integers that the graph has no use for (step counters) may be missing from the template.
    """
    _compare(model, network)
    header = network.header
    proto = ModelProto()
    proto.CopyFrom(model.proto)
    remove_named(proto.graph.initializer, model.weights.keys())
    for key in (TEMPLATE_KEY, LEVEL_KEY, LEVELS_KEY):  # what the template was
        drop_metadata(proto, key)
    fresh = FreshNames(proto.graph)
    fresh.taken |= model.weights.keys()
    names = [name for name in network.tensors if name in model.weights]
    widened = {}
    for name in names:
        dtype = header.tensors[name].dtype
        if dtype.name not in TO_ONNX:
            raise UnsupportedOnnx(f"{model.path}: tensor {name!r}: ONNX has no {dtype.name}")
        if model.weights[name].info.dtype != dtype:
            widened[name] = fresh(f"{name}.float")
    rename_uses(proto.graph, widened)
    remove_named(proto.graph.input, widened)  # an input of another dtype it cannot be
    compute_first(proto.graph, [_cast_to_float(*pair) for pair in widened.items()])
    rest = {name: w for name, w in model.weights.items() if name not in header.tensors}
    return Binding(model, network, proto, frozenset(names), rest)


def _compare(model: Model, network: Network) -> None:
    rows = []
    for name, info in network.tensors.items():
        weight = model.weights.get(name)
        if weight is None:
            if info.dtype.nestable:
                folded = " (folded away?)" if name in network.profile.per_level else ""
                rows.append((name, _NOTHING + folded, describe(info)))
        elif weight.info.shape != info.shape or not _fits(weight.info, info, model):
            rows.append((name, describe(weight.info), describe(info)))
    for name, weight in model.weights.items():
        if weight.source is None and name not in network.header.tensors:
            rows.append((name, describe(weight.info), _NOTHING))
    if rows:
        raise TemplateMismatch(str(model.path), rows)


def describe(info: TensorInfo) -> str:
    """dtype and shape, as the table shows them.

    >>> from elsa_format.plugins import DTYPES
    >>> describe(TensorInfo("w", DTYPES["F32"], (3, 4)))
    'F32 [3, 4]'
    """
    return f"{info.dtype.name} {list(info.shape)}"


def _fits(wanted: TensorInfo, stored: TensorInfo, model: Model) -> bool:
    """Whether the dtypes are the same, or 16 stored bits that the graph can cast to its float32."""
    if wanted.dtype == stored.dtype:
        return True
    if wanted.dtype.name != "F32" or any(v.name == wanted.name for v in model.proto.graph.output):
        return False
    return stored.dtype.name == "F16" or (
        stored.dtype.name == "BF16" and model.opset >= _FIRST_OPSET_WITH_BF16
    )


def _cast_to_float(stored: str, result: str) -> NodeProto:
    return helper.make_node("Cast", [stored], [result], to=TensorProto.FLOAT)


class ValueCheck:
    """Compares the template's own values of a tensor, if it has any, with the stored ones.

    Shared tensors must be equal. Packing changes nested weights by less than 2^bits units in the
    last place. Zeros of nested weights pass: the template may be a level, and so may what is read,
    also the dense network of a file. Weights with batch norm folded in do not.
    """

    def __init__(self, weight: Weight, stored: TensorInfo, bits: int, block: int) -> None:
        self.own, self.stored, self.bits = weight.info, stored, bits
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
        return np.flatnonzero(changed & (a != 0) & (b != 0))


def _values(content: NDArray[np.uint8], dtype: Dtype) -> NDArray[Any]:
    assert dtype.numpy is not None  # every dtype that ONNX shares has one
    return content.view(dtype.numpy)
