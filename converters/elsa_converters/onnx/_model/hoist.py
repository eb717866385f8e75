"""Weights out of Constant nodes and control-flow bodies, into initializers of the main graph."""

from collections import Counter
from collections.abc import Iterator

from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, helper

from elsa_converters.onnx._graph.walk import (
    all_graphs,
    defined,
    remove_named,
    rename_uses,
    subgraphs,
)
from elsa_converters.onnx._model.tensors import FROM_ONNX, element_count
from elsa_converters.onnx._model.wire import LARGE
from elsa_format.plugins import Dtype


def is_weight(tensor: TensorProto) -> bool:
    """Whether a tensor is data of the network, not a constant of its graph.

    Single numbers stay in the graph: they are exponents, bounds and epsilons, which optimizers
    look for. Integers do too unless they are large (quantized weights, tables).
    """
    dtype = FROM_ONNX.get(tensor.data_type)
    if dtype is None or not tensor.dims:
        return False
    elements = element_count(tensor)
    if dtype.nestable:
        return elements > 1
    return _bytes(dtype, elements) >= LARGE


def _bytes(dtype: Dtype, elements: int) -> int:
    return elements * dtype.size // 8


def hoist(model: ModelProto) -> None:
    """Make every weight an initializer of the main graph, under a name nothing else has."""
    graph = model.graph
    names = Counter(name for inner in all_graphs(graph) for name in defined(inner))
    fresh = _FreshNames(names)
    _hoist_from(graph, graph, fresh, "")
    _rename_reserved(graph, fresh)


class _FreshNames:
    def __init__(self, taken: Counter[str]) -> None:
        self.taken = taken

    def moved(self, name: str, scope: str, *, keep: bool) -> str:
        """A name for a weight that leaves its scope: its own if nothing else is called so."""
        if keep and self.taken[name] == 1 and not is_reserved(name):
            return name
        return self.new(f"{scope}.{name}" if scope else name)

    def new(self, name: str) -> str:
        candidate = name if not is_reserved(name) else f"onnx.{name}"
        base, number = candidate, 1
        while self.taken[candidate]:
            number += 1
            candidate = f"{base}.{number}"
        self.taken[candidate] += 1
        return candidate


def is_reserved(name: str) -> bool:
    """Names that safetensors or ELSA files use for themselves."""
    return name == "__metadata__" or name.startswith("__elsa__.")


def _hoist_from(graph: GraphProto, main: GraphProto, fresh: _FreshNames, scope: str) -> None:
    for node in graph.node:
        for index, inner in enumerate(subgraphs(node)):
            path = inner.name or f"{node.name or node.op_type}.{index}"
            _hoist_from(inner, main, fresh, path)
    renamed: dict[str, str] = {}
    moved = list(_taken_constants(graph))
    if graph is not main:
        moved += _taken_initializers(graph)
    outputs = {value.name for value in graph.output}
    for tensor in moved:
        old = tensor.name
        if graph is not main:
            tensor.name = fresh.moved(old, scope, keep=old not in outputs)
        renamed[old] = tensor.name
        main.initializer.append(tensor)
    rename_uses(graph, {old: new for old, new in renamed.items() if old != new})
    if graph is not main:
        # A body must compute its outputs itself, so one that was a constant becomes a copy of it.
        for name in outputs & renamed.keys():
            graph.node.append(helper.make_node("Identity", [renamed[name]], [name]))
        # The description of a value that is gone from here would be a dangling name.
        remove_named(graph.value_info, renamed.keys())


def _taken_constants(graph: GraphProto) -> Iterator[TensorProto]:
    """Remove the Constant nodes that hold weights and give the tensors, named as their outputs."""
    kept: list[NodeProto] = []
    taken = False
    for node in graph.node:
        tensor = _constant(node)
        if tensor is None or not is_weight(tensor):
            kept.append(node)
            continue
        taken = True
        copy = TensorProto()
        copy.CopyFrom(tensor)
        copy.name = node.output[0]
        yield copy
    if taken:
        nodes = [_copied(node) for node in kept]
        del graph.node[:]
        graph.node.extend(nodes)


def _copied(node: NodeProto) -> NodeProto:
    copy = NodeProto()
    copy.CopyFrom(node)
    return copy


def _constant(node: NodeProto) -> TensorProto | None:
    if node.op_type != "Constant" or node.domain not in ("", "ai.onnx") or len(node.output) != 1:
        return None
    for attribute in node.attribute:
        if attribute.name == "value" and attribute.type == AttributeProto.TENSOR:
            value: TensorProto = attribute.t
            return value
    return None


def _taken_initializers(graph: GraphProto) -> Iterator[TensorProto]:
    inputs = {value.name for value in graph.input}
    moved = [t for t in graph.initializer if t.name not in inputs and is_weight(t)]
    for tensor in moved:
        copy = TensorProto()
        copy.CopyFrom(tensor)
        yield copy
    remove_named(graph.initializer, {tensor.name for tensor in moved})


def _rename_reserved(graph: GraphProto, fresh: _FreshNames) -> None:
    interface = {value.name for value in [*graph.input, *graph.output]}
    renamed = {}
    for tensor in graph.initializer:
        if is_reserved(tensor.name) and tensor.name not in interface:
            renamed[tensor.name] = tensor.name = fresh.new(tensor.name)
    rename_uses(graph, renamed)
