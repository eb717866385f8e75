"""The layers of a graph: products of what depends on its inputs with constant weights."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from onnx import NodeProto, helper

from elsa_converters.onnx._graph.behind import Behind, behind
from elsa_converters.onnx._graph.walk import all_graphs, reads
from elsa_converters.onnx._model.read import Model
from elsa_format.levels import Pattern

_PRODUCTS = ("Conv", "MatMul", "Gemm")
_RANDOM = {
    "Bernoulli",
    "Dropout",
    "Multinomial",
    "RandomNormal",
    "RandomNormalLike",
    "RandomUniform",
    "RandomUniformLike",
}


@dataclass(frozen=True)
class Product:
    """A node that multiplies columns of its first input with a weight."""

    node: NodeProto
    weight: Behind
    order: tuple[int, ...]
    """Axes of the stored weight, outputs first."""
    shape: tuple[int, ...]
    """Of the weight in that order: outputs, inputs of a group, and the kernel's sides."""
    groups: int
    attributes: dict[str, Any]

    @property
    def conv(self) -> bool:
        """Whether it is a convolution."""
        return bool(self.node.op_type == "Conv")

    @property
    def kernel(self) -> int:
        """Places of the kernel."""
        return int(np.prod(self.shape[2:]))

    @property
    def depthwise(self) -> bool:
        """Whether every channel is by itself."""
        return self.groups > 1 and self.shape[1] == 1


class Finder:
    """Finds the layers of a graph; `left` says of the other weights why they stay whole."""

    def __init__(
        self,
        model: Model,
        nodes: Sequence[NodeProto],
        left: Mapping[str, str],
        levels: Sequence[Fraction | Pattern],
    ) -> None:
        self.model, self.nodes, self.left = model, nodes, dict(left)
        graph = model.proto.graph
        self.patterns = [level for level in levels if isinstance(level, Pattern)]
        self.ranks = {name: len(weight.info.shape) for name, weight in model.weights.items()}
        self.makers = {name: node for node in nodes for name in node.output if name}
        self.interface = {value.name for value in (*graph.input, *graph.output)}
        self.uses = Counter(name for node in nodes for name in reads(node))
        self.constants = constant_values(model, nodes)

    def products(self) -> list[Product]:
        """The layers, in the order of the graph."""
        found = []
        for node in self.nodes:
            if node.domain not in ("", "ai.onnx") or node.op_type not in _PRODUCTS:
                continue
            weight = behind(node.input[1], self.makers, self.ranks)
            if weight is None or self.ranks[weight.name] < 2:
                continue
            product = self._product(node, weight)
            reason = product if isinstance(product, str) else self._refused(product)
            if reason is not None:
                self.left.setdefault(weight.name, reason)
            elif isinstance(product, Product) and weight.name not in self.left:
                found.append(product)
        return found

    def why(self, name: str) -> str:
        """Why a weight is no layer's."""
        if name in self.left:
            return self.left[name]
        for node in self.nodes:
            if name in node.input:
                return f"used by {node.op_type}"
        return "used in a subgraph"

    def _product(self, node: NodeProto, weight: Behind) -> Product | str:
        values = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        stored = self.model.weights[weight.name].info.shape
        order = weight.order
        if node.op_type == "MatMul" and len(order) != 2:
            return "a stack of matrices"
        if node.op_type == "MatMul" or (node.op_type == "Gemm" and not values.get("transB", 0)):
            order = order[::-1]
        shape = tuple(stored[axis] for axis in order)
        return Product(node, weight, order, shape, int(values.get("group", 1)), values)

    def _refused(self, product: Product) -> str | None:
        """Why a product is no layer, if so."""
        names = [product.weight.name, *(node.output[0] for node in product.weight.nodes)]
        times = max(self.uses[name] for name in names)
        if times > 1:
            return f"used {times} times"
        if not self.interface.isdisjoint(names):
            return "an input or output of the graph"
        if product.node.input[0] in self.constants:
            return "multiplies constants"
        info = self.model.weights[product.weight.name].info
        if not info.dtype.nestable:
            return info.dtype.name
        if product.attributes.get("alpha", 1.0) == 0 or product.attributes.get("beta", 1.0) == 0:
            return "multiplied with zero"
        for pattern in self.patterns:
            if not product.depthwise and product.shape[1] % pattern.m:
                return f"{product.shape[1]} inputs, no multiple of {pattern.m}"
        return None


def random_kinds(model: Model) -> list[str]:
    """The kinds of nodes that draw random numbers whenever a graph runs."""
    graphs = all_graphs(model.proto.graph)
    kinds = {node.op_type for graph in graphs for node in graph.node}
    return sorted(kinds & (_RANDOM - {"Dropout"}))


def constant_values(model: Model, nodes: Sequence[NodeProto]) -> set[str]:
    """The values that do not depend on the samples: initializers, and what is made of them.

    Samples leave inputs alone that have an initializer.
    """
    found = {tensor.name for tensor in model.proto.graph.initializer}
    for node in nodes:
        if is_constant(node, found):
            found.update(name for name in node.output if name)
    return found


def is_constant(node: NodeProto, constants: set[str]) -> bool:
    """Whether a node computes the same whatever the inputs are."""
    return node.op_type not in _RANDOM and all(name in constants for name in reads(node))
