"""The same function with fewer operators: fold batch norm, cancel transposes that undo another."""

from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, NodeProto, helper, numpy_helper

from elsa_converters.onnx._graph.walk import (
    Arrays,
    FreshNames,
    all_graphs,
    remove_named,
    rename_uses,
    used,
)

_EPSILON = 1e-5
_WEIGHTED = ("Conv", "ConvTranspose")


def fold_batch_norm(proto: ModelProto, arrays: Arrays) -> int:
    """Fold in place wherever a convolution feeds batch norm alone; give the number of folds.

    Computed in float64 and rounded once. A weight that is zero stays zero, so a level keeps its
    sparsity.
    """
    folder = _Folder(proto.graph, arrays)
    folded = sum(folder.fold_in(graph) for graph in all_graphs(proto.graph))
    if folded:
        left = used(proto.graph)
        for name in [name for name in arrays if name not in left]:
            del arrays[name]
        remove_named(proto.graph.initializer, {t.name for t in proto.graph.initializer} - left)
    return folded


class _Folder:
    def __init__(self, main: GraphProto, arrays: Arrays) -> None:
        self.arrays = arrays
        # Inputs of the graph may be changed by the caller, so they are not constants to fold.
        self.inputs = {value.name for value in main.input}
        self.small = {t.name: t for t in main.initializer}
        self.fresh = FreshNames(main)
        self.fresh.taken |= arrays.keys()
        graphs = list(all_graphs(main))
        self.uses = Counter(name for g in graphs for node in g.node for name in node.input)
        self.uses.update(value.name for g in graphs for value in g.output)
        self.transposes = {
            n.output[0]: n for n in main.node if n.op_type == "Transpose" and n.input
        }

    def fold_in(self, graph: GraphProto) -> int:
        makers = {name: node for node in graph.node for name in node.output}
        folded = set()
        for norm in graph.node:
            convolution = makers.get(norm.input[0]) if norm.input else None
            if convolution is not None and self._fold(convolution, norm):
                folded.add(norm.output[0])
        for index in reversed(range(len(graph.node))):
            node = graph.node[index]
            if node.op_type == "BatchNormalization" and folded & set(node.output):
                convolution = makers[node.input[0]]
                remove_named(graph.value_info, {node.input[0]})
                convolution.output[0] = node.output[0]
                del graph.node[index]
        return len(folded)

    def _fold(self, convolution: NodeProto, norm: NodeProto) -> bool:
        if norm.op_type != "BatchNormalization" or convolution.op_type not in _WEIGHTED:
            return False
        if len(convolution.input) < 2 or len(norm.input) != 5:
            return False
        if len([name for name in norm.output if name]) != 1 or _attribute(norm, "training_mode", 0):
            return False
        weight, order = self._weight(convolution.input[1])
        if weight is None or self.uses[convolution.output[0]] != 1 or self.uses[weight] != 1:
            return False
        kernel = self.arrays[weight].transpose(order)
        groups = int(_attribute(convolution, "group", 1))
        channels = kernel.shape[0] if convolution.op_type == "Conv" else kernel.shape[1] * groups
        names = norm.input[1:5]
        if _has_bias(convolution):
            names = [*names, convolution.input[2]]
        known = [self._constant(name, channels) for name in names]
        constants = [array for array in known if array is not None]
        if len(constants) != len(names):
            return False
        scale, shift, mean, variance, *bias = constants
        factor = scale / np.sqrt(variance + _attribute(norm, "epsilon", _EPSILON))
        scaled = _scaled(kernel, factor, convolution.op_type, groups)
        self.arrays[weight] = np.ascontiguousarray(scaled.transpose(np.argsort(order)))
        moved = ((bias[0] if bias else 0) - mean) * factor + shift
        self._set_bias(convolution, moved.astype(kernel.dtype))
        return True

    def _weight(self, name: str) -> tuple[str | None, list[int]]:
        """The initializer behind a kernel, and the order of its axes: flax's kernels are turned."""
        made = self.transposes.get(name)
        order: list[int] = []
        if made is not None and self.uses[name] == 1:
            name = made.input[0]
            order = next((list(a.ints) for a in made.attribute if a.name == "perm"), order)
        if name in self.inputs or name not in self.arrays:
            return None, []
        axes = range(self.arrays[name].ndim)
        order = order or list(axes if made is None else axes[::-1])
        return (name if sorted(order) == list(axes) and len(axes) > 2 else None), order

    def _set_bias(self, convolution: NodeProto, bias: NDArray[Any]) -> None:
        name = self.fresh(f"{convolution.input[1]}.bias")
        self.arrays[name] = bias
        if _has_bias(convolution):
            convolution.input[2] = name
        else:
            del convolution.input[2:]
            convolution.input.append(name)

    def _constant(self, name: str, channels: int) -> NDArray[np.float64] | None:
        if name in self.inputs:
            return None
        array = self.arrays.get(name)
        if array is None and name in self.small:
            array = numpy_helper.to_array(self.small[name])
        if array is None or array.shape != (channels,):
            return None
        return array.astype(np.float64)


def _scaled(kernel: NDArray[Any], factor: NDArray[Any], op: str, groups: int) -> NDArray[Any]:
    """Multiply each output channel by its factor; + 0.0 turns negative zeros into the usual one."""
    wide = kernel.astype(np.float64)
    rest = (1,) * (kernel.ndim - 2)
    if op == "Conv":
        scaled = wide * factor.reshape(-1, 1, *rest)
    else:  # [inputs, outputs / groups, …]: the inputs of a group share its outputs' factors
        grouped = wide.reshape(groups, kernel.shape[0] // groups, *kernel.shape[1:])
        scaled = grouped * factor.reshape(groups, 1, -1, *rest)
    return np.asarray(scaled.reshape(kernel.shape) + 0.0).astype(kernel.dtype)


def _has_bias(convolution: NodeProto) -> bool:
    return len(convolution.input) > 2 and convolution.input[2] != ""


def _attribute(node: NodeProto, name: str, default: float) -> float:
    for attribute in node.attribute:
        if attribute.name == name:
            return float(helper.get_attribute_value(attribute))
    return default


def cancel_transposes(graph: GraphProto) -> None:
    """Let a graph read what was transposed there and back from before the first of the two."""
    outputs = {value.name for value in graph.output}
    orders: dict[str, tuple[str, list[int]]] = {}
    same: dict[str, str] = {}
    for node in graph.node:
        order = _order(node)
        if order is None:
            continue
        source = same.get(node.input[0], node.input[0])
        before = orders.get(source)
        undone = before is not None and [before[1][axis] for axis in order] == sorted(order)
        if undone and before is not None and node.output[0] not in outputs:
            same[node.output[0]] = before[0]
        orders[node.output[0]] = (source, order)
    rename_uses(graph, same)
    _remove_unused(graph)


def _order(node: NodeProto) -> list[int] | None:
    if node.op_type != "Transpose" or len(node.input) != 1:
        return None
    return next((list(a.ints) for a in node.attribute if a.name == "perm"), None)


def _remove_unused(graph: GraphProto) -> None:
    uses = Counter(
        name for inner in all_graphs(graph) for node in inner.node for name in node.input
    )
    uses.update(v.name for inner in all_graphs(graph) for v in inner.output)
    for index in reversed(range(len(graph.node))):
        node = graph.node[index]
        if node.op_type == "Transpose" and not uses[node.output[0]]:
            uses.subtract(node.input)
            del graph.node[index]
