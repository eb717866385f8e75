"""A graph in which every layer has a bias and a scale of its own: tensors that levels can vary.

What the graph computes stays the same: biases that are added are zeros, scales are ones.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from elsa_converters._errors import UnsupportedOnnx
from elsa_converters.calibrate import Layer
from elsa_converters.onnx._calibrate.layers import Finder, Product
from elsa_converters.onnx._graph.reach import reaching
from elsa_converters.onnx._graph.simplify import fold_batch_norm
from elsa_converters.onnx._graph.walk import (
    FreshNames,
    all_graphs,
    reads,
    remove_named,
    used,
)
from elsa_converters.onnx._model.read import Model
from elsa_converters.onnx._model.tensors import Weight, header_of
from elsa_converters.onnx._model.write import info_of_array
from elsa_format.levels import Pattern

Array = NDArray[Any]
_FLOATING = {
    TensorProto.UNDEFINED,  # of outputs that do not say
    TensorProto.FLOAT,
    TensorProto.FLOAT16,
    TensorProto.DOUBLE,
    TensorProto.BFLOAT16,
}
_WHOLE = {
    TensorProto.DataType.Value(name)
    for name in ("BOOL", *(f"{u}INT{bits}" for u in ("", "U") for bits in (8, 16, 32, 64)))
}


@dataclass(frozen=True)
class Site:
    """A layer, and where the graph has it."""

    layer: Layer
    product: Product
    bias: str
    beta: float
    """What the graph multiplies the bias with."""
    scale: str | None
    output: str


@dataclass(frozen=True)
class Prepared:
    """A model whose layers can be calibrated."""

    model: Model
    nodes: list[NodeProto]
    sites: list[Site]
    left: dict[str, str]
    """Weights that could carry counters but will not, and why."""
    outputs: list[str]
    """The graph's outputs by which networks are compared."""


def prepare(
    model: Model, left: Mapping[str, str] = {}, levels: Sequence[Fraction | Pattern] = ()
) -> Prepared:
    """Fold batch norm into convolutions, find the layers, and give them biases and scales.

    What is `left` is no layer, nor what cannot have the patterns among the levels.
    """
    outputs = _compared(model)
    model = _folded(model)
    nodes = [_copied(node) for node in model.proto.graph.node]
    finder = Finder(model, nodes, left, levels)
    rewriter = _Rewriter(model, nodes, finder)
    sites = []
    for product in finder.products():
        site = rewriter.site(product)
        if isinstance(site, str):
            finder.left[product.weight.name] = site
        else:
            sites.append(site)
    nested = {site.layer.name for site in sites}
    whole = {
        name: finder.why(name)
        for name in sorted(reaching(model.proto.graph, model.weights))
        if name not in nested
        and model.weights[name].info.dtype.nestable
        and len(model.weights[name].info.shape) >= 2
    }
    return Prepared(rewriter.finished(), rewriter.nodes, sites, whole, outputs)


def _compared(model: Model) -> list[str]:
    """The outputs that hold floating numbers, or else whole ones."""
    types: dict[str, int] = {}
    for value in model.proto.graph.output:
        if value.type.WhichOneof("value") in (None, "tensor_type"):
            types[value.name] = value.type.tensor_type.elem_type
    floating = [name for name, kind in types.items() if kind in _FLOATING]
    if not floating and not (types := {n: t for n, t in types.items() if t in _WHOLE}):
        raise UnsupportedOnnx(f"{model.path}: no output is a tensor of numbers")
    return floating or list(types)


def _copied(node: NodeProto) -> NodeProto:
    copy = NodeProto()
    copy.CopyFrom(node)
    return copy


def _folded(model: Model) -> Model:
    """The model without the batch norms that a convolution can take in."""
    proto = ModelProto()
    proto.CopyFrom(model.proto)
    nodes = [node for graph in all_graphs(proto.graph) for node in graph.node]
    if not any(node.op_type == "BatchNormalization" for node in nodes):
        return Model(model.path, proto, dict(model.weights), model.is_template)
    part = {"BatchNormalization", "Conv", "ConvTranspose", "Transpose"}
    names = {name for node in nodes if node.op_type in part for name in node.input}
    before = {name: model.weights[name].array() for name in names & model.weights.keys()}
    after = dict(before)
    fold_batch_norm(proto, after)
    gone = before.keys() - after.keys()
    weights = {name: weight for name, weight in model.weights.items() if name not in gone}
    for name, array in after.items():
        if before.get(name) is not array:
            weights[name] = _weight(name, array)
            if name not in before:
                proto.graph.initializer.append(header_of(weights[name].info))
    return Model(model.path, proto, weights, model.is_template)


def _weight(name: str, array: Array) -> Weight:
    return Weight(info_of_array(name, array), np.ascontiguousarray(array).tobytes())


class _Rewriter:
    def __init__(self, model: Model, nodes: list[NodeProto], finder: Finder) -> None:
        self.model, self.nodes, self.finder = model, nodes, finder
        graph = model.proto.graph
        self.fresh = FreshNames(graph)
        self.small = {t.name: t for t in graph.initializer if t.name not in model.weights}
        self.weights = dict(model.weights)
        self.users: dict[str, list[NodeProto]] = {}
        for node in nodes:
            for name in reads(node):
                self.users.setdefault(name, []).append(node)
        self.added: dict[str, NodeProto] = {}
        """Nodes of our own, by what they take in."""

    def site(self, product: Product) -> Site | str:
        """Give a layer what it lacks; or say why that cannot be."""
        info = self.model.weights[product.weight.name].info
        assert info.dtype.numpy is not None
        dtype = np.dtype(np.float32) if product.weight.widened else info.dtype.numpy
        given = self._bias(product, dtype)
        if given is None:
            return "its bias is computed"
        last, bias = given
        scale = None
        if not product.depthwise:
            sides = len(product.shape) - 2
            ones = np.ones((product.shape[0],) + (1,) * sides, dtype)
            scale = self._store(f"{info.name}.scale", ones)
            last = self._append(last, "Mul", scale)
        layer = Layer(
            info.name,
            info.dtype.numpy,
            product.groups,
            product.shape[0] // product.groups,
            product.shape[1] * product.kernel,
            product.kernel,
            scale=scale is not None,
            nested=not product.depthwise,
        )
        beta = float(product.attributes.get("beta", 1.0))
        return Site(layer, product, bias, beta, scale, last.output[0])

    def finished(self) -> Model:
        """The model with all that was added."""
        graph = self.model.proto.graph
        self.nodes = [one for node in self.nodes for one in self._with_added(node)]
        del graph.node[:]
        graph.node.extend(self.nodes)
        unused = self.weights.keys() - used(graph)
        self.weights = {n: weight for n, weight in self.weights.items() if n not in unused}
        remove_named(graph.initializer, unused)
        return Model(self.model.path, self.model.proto, self.weights, self.model.is_template)

    def _with_added(self, node: NodeProto) -> Iterator[NodeProto]:
        yield node
        added = self.added.get(node.output[0])
        if added is not None:
            yield from self._with_added(added)

    def _bias(self, product: Product, dtype: np.dtype[Any]) -> tuple[NodeProto, str] | None:
        """The node that adds the layer's bias, and the tensor, which only it uses."""
        node, rows = product.node, product.shape[0]
        name = f"{product.weight.name}.bias"
        if node.op_type == "MatMul":
            add, at = self._added(node.output[0], rows)
            if add is None:
                bias = self._store(name, np.zeros(rows, dtype))
                return self._append(node, "Add", bias), bias
            add.input[at] = self._own(add.input[at], name, rows)
            return add, add.input[at]
        if len(node.input) < 3 or not node.input[2]:
            del node.input[2:]
            node.input.append(self._store(name, np.zeros(rows, dtype)))
        elif self._vector(node.input[2], rows) is None:
            return None
        else:
            node.input[2] = self._own(node.input[2], name, rows)
        return node, node.input[2]

    def _added(self, product: str, rows: int) -> tuple[NodeProto | None, int]:
        """The node that adds a constant to a product, and at which of its inputs."""
        users = self.users.get(product, [])
        if len(users) == 1 and users[0].op_type == "Add" and product not in self.finder.interface:
            for at, name in enumerate(users[0].input):
                vector = self._vector(name, rows)
                if vector is not None and vector.shape[-1:] == (rows,):
                    return users[0], at
        return None, 0

    def _own(self, name: str, wanted: str, rows: int) -> str:
        """A bias, or a copy of it if it has other users or another shape."""
        vector = self._vector(name, rows)
        assert vector is not None
        if len(self.users[name]) > 1 or vector.size != rows:
            return self._store(wanted, np.broadcast_to(vector.reshape(-1), (rows,)))
        if name in self.small:  # a single number, which no weight is
            self.weights[name] = _weight(name, vector)
            self.small.pop(name).CopyFrom(header_of(self.weights[name].info))
        return name

    def _vector(self, name: str, rows: int) -> Array | None:
        """A constant with a number for each output, or one for all."""
        if name in self.finder.interface:
            return None
        array: Array
        if name in self.small:
            array = numpy_helper.to_array(self.small[name])
        elif name in self.model.weights and self.model.weights[name].info.elements <= rows:
            array = self.model.weights[name].array()
        else:
            return None
        return array if array.size == 1 or (rows,) == (array.size,) == array.shape[-1:] else None

    def _store(self, wanted: str, array: Array) -> str:
        name = self.fresh(wanted)
        self.weights[name] = _weight(name, array)
        self.model.proto.graph.initializer.append(header_of(self.weights[name].info))
        return name

    def _append(self, node: NodeProto, op: str, constant: str) -> NodeProto:
        """Let a node of our own do something to another's output, under the name of that."""
        result = node.output[0]
        node.output[0] = self.fresh(f"{result}.raw")
        added = helper.make_node(op, [node.output[0], constant], [result])
        self.added[node.output[0]] = added
        return added
