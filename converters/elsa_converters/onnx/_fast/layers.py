"""The layers of a graph that a sparse operator could compute, with what it can take in besides.

A convolution or a matrix product with constant weights, and, where its output is used only there,
the bias, another tensor of the same shape that is added (the shortcut of a residual block), a ReLU.
"""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, ValueInfoProto, helper, numpy_helper
from onnx.shape_inference import InferenceError, infer_shapes

from elsa_converters.onnx._graph.behind import behind
from elsa_converters.onnx._graph.walk import Arrays, all_graphs
from elsa_converters.sparse._weights import MOST_COLUMNS, MOST_KERNEL, is_kept

_HALVES = ("bfloat16", "float16")


@dataclass(frozen=True)
class Layer:
    """A convolution or matrix product with constant weights."""

    conv: bool
    nodes: frozenset[int]
    """Which nodes of the graph it stands for."""
    x: str
    weight: str
    order: tuple[int, ...]
    """Axes of the stored weights, outputs first."""
    shape: tuple[int, ...]
    """Of the weights in that order: outputs, inputs, and the kernel's sides."""
    output: str
    sparsity: float
    strides: tuple[int, ...] = ()
    pads: tuple[int, ...] = ()
    bias: str = ""
    add: str = ""
    relu: bool = False
    bits: int = 0
    """Of the integers that the operator computes with, where that is faster; 0 for floats."""

    def matrix(self, arrays: Arrays) -> NDArray[Any]:
        """The weights with a row for each output, as float32 or bfloat16."""
        matrix = np.ascontiguousarray(arrays[self.weight].transpose(self.order))
        if matrix.dtype == np.float16:
            matrix = matrix.astype(np.float32)
        return matrix.reshape(self.shape[0], -1)


def find_layers(proto: ModelProto, arrays: Arrays) -> list[Layer]:
    """Every layer that a sparse operator could compute, in the order of the graph."""
    return _Finder(proto, arrays).layers()


class _Finder:
    def __init__(self, proto: ModelProto, arrays: Arrays) -> None:
        graph = proto.graph
        self.nodes, self.arrays = graph.node, arrays
        self.ranks = {name: array.ndim for name, array in arrays.items()}
        # What the caller of a session may replace is not constant.
        self.inputs = {value.name for value in graph.input}
        self.small = {t.name: t for t in graph.initializer if t.name not in self.inputs}
        self.makers = {name: node for node in graph.node for name in node.output if name}
        self.users: dict[str, int] = {}
        for index, node in enumerate(graph.node):
            self.users.update(dict.fromkeys(node.input, index))
        graphs = list(all_graphs(graph))
        self.uses = Counter(name for g in graphs for node in g.node for name in node.input)
        self.uses.update(value.name for g in graphs for value in g.output)
        self.shapes = _shapes(proto, arrays)
        self.zeros: dict[str, float] = {}

    def layers(self) -> list[Layer]:
        taken: set[int] = set()
        found = []
        for index, node in enumerate(self.nodes):
            layer = None
            if node.domain in ("", "ai.onnx") and len(node.input) > 1:
                layer = self._layer(index, node)
            if layer is None:
                continue
            layer = self._with_users(layer, taken)
            taken |= layer.nodes
            found.append(layer)
        return found

    def _layer(self, index: int, node: NodeProto) -> Layer | None:
        if node.op_type not in ("Conv", "MatMul", "Gemm"):
            return None
        weight = self._weight(node.input[1])
        if weight is None:
            return None
        name, order = weight
        axes = [self.arrays[name].shape[axis] for axis in order]
        conv = node.op_type == "Conv"
        strides: tuple[int, ...] = ()
        pads: tuple[int, ...] = ()
        bias = node.input[2] if len(node.input) > 2 else ""
        values = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        if conv:
            geometry = _geometry(values, axes)
            if geometry is None:
                return None
            strides, pads = geometry
        else:
            if len(axes) != 2 or axes[0] == 0 or axes[1] == 0:
                return None
            if node.op_type == "MatMul" or not values.get("transB", 0):
                axes, order = axes[::-1], order[::-1]
            if values.get("transA", 0) or values.get("alpha", 1.0) != 1:
                return None
            if bias and values.get("beta", 1.0) != 1:
                return None
        if bias and self.bias(bias, axes[0], rows=True) is None:
            return None
        return Layer(
            conv,
            frozenset([index]),
            node.input[0],
            name,
            tuple(order),
            tuple(axes),
            node.output[0],
            self._sparsity(name),
            strides,
            pads,
            bias,
        )

    def _with_users(self, layer: Layer, taken: set[int]) -> Layer:
        """The layer, with the nodes after it that it can take in."""
        while not layer.relu:
            index = self.users.get(layer.output)
            if index is None or index in taken or self.uses[layer.output] != 1:
                break
            node = self.nodes[index]
            if node.domain not in ("", "ai.onnx"):
                break
            more: dict[str, Any]
            if node.op_type == "Relu":
                more = {"relu": True}
            elif node.op_type == "Add":
                other = node.input[1] if node.input[0] == layer.output else node.input[0]
                biased = not layer.conv and not layer.bias
                if biased and self.bias(other, layer.shape[0]) is not None:
                    more = {"bias": other}
                elif not layer.add and self._same_shape(other, layer.output):
                    more = {"add": other}
                else:
                    break
            else:
                break
            layer = replace(layer, nodes=layer.nodes | {index}, output=node.output[0], **more)
        return layer

    def bias(self, name: str, outputs: int, *, rows: bool = False) -> NDArray[Any] | None:
        """A constant that is added to each output."""
        array = self.arrays.get(name)
        if name in self.inputs:
            return None
        if array is None and name in self.small:
            array = numpy_helper.to_array(self.small[name])
        shapes: list[tuple[int, ...]] = [(outputs,), (1,), ()]
        if rows:  # as Gemm may have it
            shapes.append((1, outputs))
        if array is None or array.dtype != np.float32 or array.shape not in shapes:
            return None
        return np.broadcast_to(array.reshape(-1), outputs)

    def _weight(self, name: str) -> tuple[str, list[int]] | None:
        """The array behind a weight, and the order of its axes: some are turned, or were halves."""
        found = behind(name, self.makers, self.ranks)
        if found is None or found.name in self.inputs:
            return None
        kinds = _HALVES if found.widened else ("float32",)
        if self.arrays[found.name].dtype.name not in kinds:
            return None
        return found.name, list(found.order)

    def _same_shape(self, a: str, b: str) -> bool:
        first, second = self.shapes.get(a), self.shapes.get(b)
        return first is not None and None not in first and first == second

    def _sparsity(self, name: str) -> float:
        if name not in self.zeros:
            array = self.arrays[name]
            kept = np.count_nonzero(is_kept(array))
            self.zeros[name] = 1 - kept / array.size if array.size else 0.0
        return self.zeros[name]


def _geometry(
    values: dict[str, Any], axes: list[int]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Strides and pads of a convolution, None if it is not one for the operator."""
    kernel = axes[2:]
    sides = len(kernel)
    if sides not in (1, 2) or min(axes) < 1 or max(kernel) > MOST_KERNEL:
        return None
    if axes[1] * np.prod(kernel) > MOST_COLUMNS or values.get("group", 1) != 1:
        return None
    if any(step != 1 for step in values.get("dilations", [])):
        return None
    strides = tuple(values.get("strides", [1] * sides))
    pads = tuple(values.get("pads", [0] * 2 * sides))
    padding = values.get("auto_pad", b"NOTSET")
    if padding in (b"SAME_UPPER", b"SAME_LOWER"):
        if any(step != 1 for step in strides):
            return None  # then it depends on the input
        less = tuple((side - 1) // 2 for side in kernel)
        more = tuple(side // 2 for side in kernel)
        pads = less + more if padding == b"SAME_UPPER" else more + less
    elif padding == b"VALID":
        pads = (0,) * 2 * sides
    if len(strides) != sides or len(pads) != 2 * sides or min(strides) < 1 or min(pads) < 0:
        return None
    return strides, pads


def _shapes(proto: ModelProto, arrays: Arrays) -> dict[str, list[int | str | None]]:
    """Shapes of the values in a graph, as far as they can be told."""
    copy = ModelProto()
    copy.CopyFrom(proto)
    given = {value.name for value in copy.graph.input}
    for name, array in arrays.items():
        if name not in given:
            code = helper.np_dtype_to_tensor_dtype(array.dtype)
            copy.graph.input.append(helper.make_tensor_value_info(name, code, array.shape))
    try:
        graph = infer_shapes(copy, data_prop=True).graph
    except InferenceError:  # then what is added stays by itself
        return {}
    return {v.name: _dimensions(v) for v in [*graph.value_info, *graph.input, *graph.output]}


def _dimensions(value: ValueInfoProto) -> list[int | str | None]:
    if not value.type.tensor_type.HasField("shape"):
        return [None]
    return [
        d.dim_param or None
        if d.HasField("dim_param")
        else d.dim_value
        if d.HasField("dim_value")
        else None
        for d in value.type.tensor_type.shape.dim
    ]
