"""Fold batch norm into the convolution before it: the same function with fewer operators."""

from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, NodeProto, helper, numpy_helper

from elsa_converters.onnx._bind import FreshNames
from elsa_converters.onnx._graphs import all_graphs, used
from elsa_converters.onnx._hoist import remove_named

Arrays = dict[str, NDArray[Any]]
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
        weight = convolution.input[1]
        if self.uses[convolution.output[0]] != 1 or self.uses[weight] != 1:
            return False
        if len([name for name in norm.output if name]) != 1 or _attribute(norm, "training_mode", 0):
            return False
        constants = [self._constant(name) for name in norm.input[1:5]]
        kernel = self.arrays.get(weight)
        bias = self._constant(convolution.input[2]) if _has_bias(convolution) else np.zeros(1)
        if kernel is None or weight in self.inputs or bias is None:
            return False
        known = [c.astype(np.float64) for c in constants if c is not None]
        if len(known) != 4:
            return False
        scale, shift, mean, variance = known
        factor = scale / np.sqrt(variance + _attribute(norm, "epsilon", _EPSILON))
        groups = _attribute(convolution, "group", 1)
        self.arrays[weight] = _scaled(kernel, factor, convolution.op_type, int(groups))
        self._set_bias(convolution, ((bias - mean) * factor + shift).astype(kernel.dtype))
        return True

    def _set_bias(self, convolution: NodeProto, bias: NDArray[Any]) -> None:
        name = self.fresh(f"{convolution.input[1]}.bias")
        self.arrays[name] = bias
        if _has_bias(convolution):
            convolution.input[2] = name
        else:
            del convolution.input[2:]
            convolution.input.append(name)

    def _constant(self, name: str) -> NDArray[Any] | None:
        if name in self.inputs:
            return None
        if name in self.arrays:
            return self.arrays[name]
        tensor = self.small.get(name)
        return None if tensor is None else numpy_helper.to_array(tensor)


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
