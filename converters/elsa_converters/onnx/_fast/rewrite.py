"""Let sparse operators compute layers of a graph: their weights shrink to what is kept of them."""

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from elsa_converters._errors import UnsupportedOnnx
from elsa_converters.onnx._fast.functions import (
    DOMAIN,
    FIRST_IR,
    FIRST_OPSET,
    VERSION,
    function,
    operator,
)
from elsa_converters.onnx._fast.layers import Layer, find_layers
from elsa_converters.onnx._graph.simplify import fold_batch_norm
from elsa_converters.onnx._graph.walk import Arrays, FreshNames, remove_named, used
from elsa_converters.onnx._model.read import opset_versions
from elsa_converters.sparse._weights import parts_of, to_csr, to_pattern

_PASSED_ON = ("Cast", "Transpose", "Identity")


def prepare(proto: ModelProto, arrays: Arrays, where: str) -> list[Layer]:
    """Fold batch norm as ONNX Runtime would, and find the layers; changes both arguments."""
    if next(opset_versions(proto)) < FIRST_OPSET:
        raise UnsupportedOnnx(
            f"{where}: opset {next(opset_versions(proto))}, sparse operators need {FIRST_OPSET}"
            " or newer (onnx.version_converter makes it so)"
        )
    _widen_kernels(proto, arrays)
    fold_batch_norm(proto, arrays)
    return find_layers(proto, arrays)


def use_sparse(
    proto: ModelProto, arrays: Arrays, layers: Iterable[Layer]
) -> tuple[ModelProto, Arrays]:
    """A model in which sparse operators compute these layers, and its tensors."""
    made = _Rewriter(proto, arrays)
    for layer in layers:
        made.replace(layer)
    return made.finish()


def _widen_kernels(proto: ModelProto, arrays: Arrays) -> None:
    """Let convolutions read float32: batch norm is folded into that."""
    kernels = {node.input[1] for node in proto.graph.node if node.op_type == "Conv"}
    for index in reversed(range(len(proto.graph.node))):
        node = proto.graph.node[index]
        if node.op_type != "Cast" or node.output[0] not in kernels or node.input[0] not in arrays:
            continue
        if any(a.name == "to" and a.i == TensorProto.FLOAT for a in node.attribute):
            arrays[node.output[0]] = arrays[node.input[0]].astype(np.float32)
            del proto.graph.node[index]
    left = used(proto.graph)
    for name in [name for name in arrays if name not in left]:
        del arrays[name]


class _Rewriter:
    def __init__(self, proto: ModelProto, arrays: Arrays) -> None:
        self.proto = ModelProto()
        self.proto.CopyFrom(proto)
        self.arrays = dict(arrays)
        self.small = {t.name: t for t in proto.graph.initializer}
        self.fresh = FreshNames(proto.graph)
        self.fresh.taken |= arrays.keys()
        self.encoded: dict[tuple[str, tuple[int, ...]], list[tuple[str, list[str], Any]]] = {}
        self.instead: dict[int, list[NodeProto]] = {}
        self.gone: set[int] = set()
        self.operators: dict[str, bool] = {}
        """Whether one of their nodes computes with integers."""

    def replace(self, layer: Layer) -> None:
        """Compute a layer sparsely, where the last of its nodes was: there all inputs are known."""
        parts = self._weights(layer)
        nodes: list[NodeProto] = []
        bias, add = self._bias(layer), layer.add
        for index, (kind, weights, attributes) in enumerate(parts):
            last = index == len(parts) - 1
            name = operator(kind, add=bool(add), relu=layer.relu and last)
            x = layer.x if len(parts) == 1 else self._part(layer, index, nodes)
            output = layer.output if last else self.fresh(f"{layer.output}.part")
            inputs = [x, *weights, bias, *([add] if add else [])]
            if layer.conv:
                attributes = attributes | {"strides": layer.strides, "pads": layer.pads}
            if layer.bits:
                attributes = attributes | {"bits": layer.bits}
            node_name = self.proto.graph.node[min(layer.nodes)].name
            nodes.append(
                helper.make_node(name, inputs, [output], node_name, domain=DOMAIN, **attributes)
            )
            self.operators[name] = self.operators.get(name, False) or bool(layer.bits)
            # What follows is added to what there is; the bias was the first's.
            bias, add = self._zeros(layer), output
        self.gone |= layer.nodes
        self.instead[max(layer.nodes)] = nodes

    def finish(self) -> tuple[ModelProto, Arrays]:
        """The model, without what nothing uses any more."""
        graph, opset = self.proto.graph, next(opset_versions(self.proto))
        nodes = [
            node
            for index, old in enumerate(graph.node)
            for node in self.instead.get(index, [] if index in self.gone else [old])
        ]
        kept = [NodeProto.FromString(node.SerializeToString()) for node in nodes]
        del graph.node[:]
        graph.node.extend(kept)
        self._drop_unused()
        if self.operators:
            self.proto.functions.extend(
                function(name, opset, integers=integers)
                for name, integers in sorted(self.operators.items())
            )
            self.proto.opset_import.append(helper.make_opsetid(DOMAIN, VERSION))
            self.proto.ir_version = max(self.proto.ir_version, FIRST_IR)
        return self.proto, self.arrays

    def _drop_unused(self) -> None:
        graph = self.proto.graph
        left = used(graph)
        for index in reversed(range(len(graph.node))):
            node = graph.node[index]
            if node.op_type in _PASSED_ON and not left & set(node.output):
                del graph.node[index]
                left = used(graph)
        made = {name for node in graph.node for name in node.output}
        made |= {value.name for value in graph.input}
        remove_named(graph.value_info, {v.name for v in graph.value_info} - made)
        for name in [name for name in self.arrays if name not in left]:
            del self.arrays[name]
        remove_named(graph.initializer, {t.name for t in graph.initializer} - left)

    def _weights(self, layer: Layer) -> list[tuple[str, list[str], Any]]:
        """Operator, inputs and attributes; several for a wide product."""
        key = layer.weight, layer.order
        if key in self.encoded:
            return self.encoded[key]
        matrix = layer.matrix(self.arrays)
        found = []
        columns = matrix.shape[1]
        for start, end in [(0, columns)] if layer.conv else parts_of(columns):
            part = np.ascontiguousarray(matrix[:, start:end])
            pattern = None if layer.conv else to_pattern(part)
            if pattern is not None:
                tensors = {"values": pattern.values, "codes": pattern.codes}
                attributes: dict[str, Any] = {
                    "pattern": [pattern.n, pattern.m],
                    "scales": pattern.scales,
                }
            else:
                csr = to_csr(part)
                tensors = {"values": csr.values, "indices": csr.indices, "indptr": csr.indptr}
                attributes = {}
            kind = "SparseConv" if layer.conv else "SparseMatMul" if pattern is None else "NMMatMul"
            attributes["shape"] = layer.shape if layer.conv else part.shape
            names = [self._store(f"{layer.weight}.{n}", array) for n, array in tensors.items()]
            found.append((kind, names, attributes))
        self.encoded[key] = found
        return found

    def _bias(self, layer: Layer) -> str:
        if not layer.bias:
            return self._zeros(layer)
        array = self.arrays.get(layer.bias)
        if array is None:
            array = numpy_helper.to_array(self.small[layer.bias])
        if array.shape == (layer.shape[0],) and layer.bias in self.arrays:
            return layer.bias
        wide = np.broadcast_to(array.reshape(-1), layer.shape[0])
        return self._store(f"{layer.weight}.bias", wide.astype(np.float32))

    def _zeros(self, layer: Layer) -> str:
        return self._store(f"{layer.weight}.no_bias", np.zeros(layer.shape[0], np.float32))

    def _part(self, layer: Layer, index: int, nodes: list[NodeProto]) -> str:
        bounds = (*parts_of(layer.shape[1])[index], -1)
        names = [self._store(f"{layer.weight}.bound", np.array([b], np.int64)) for b in bounds]
        nodes.append(helper.make_node("Slice", [layer.x, *names], [self.fresh(f"{layer.x}.part")]))
        return str(nodes[-1].output[0])

    def _store(self, wanted: str, array: NDArray[Any]) -> str:
        name = self.fresh(wanted)
        self.arrays[name] = array
        return name
