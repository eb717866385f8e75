"""Which weights are nested by default: those that multiply activations (or are looked up)."""

from collections import ChainMap
from collections.abc import Iterable

from onnx import GraphProto, NodeProto

from elsa_converters.onnx._graph.walk import subgraphs

_WEIGHT_INPUTS: dict[str, tuple[int, ...]] = {
    "Conv": (1,),
    "ConvTranspose": (1,),
    "Gemm": (0, 1),
    "MatMul": (0, 1),
    "Gather": (0,),
    "LSTM": (1, 2),
    "GRU": (1, 2),
    "RNN": (1, 2),
}
_PASSED_ON = {"Identity", "Transpose", "Reshape", "Cast", "Slice", "Squeeze", "Unsqueeze"}
_STANDARD = ("", "ai.onnx")

_Origins = frozenset[str]
_NONE: _Origins = frozenset()


def reaching(graph: GraphProto, weights: Iterable[str]) -> set[str]:
    """The weights that arrive at a weight input, unchanged but for their shape or dtype."""
    reached: set[str] = set()
    _follow(graph, ChainMap({name: frozenset([name]) for name in weights}), reached)
    return reached


def _follow(
    graph: GraphProto, origins: ChainMap[str, _Origins], reached: set[str]
) -> list[_Origins]:
    """Record what is reached in one graph; give the origins of its outputs."""
    for node in graph.node:
        bodies = []
        for inner in subgraphs(node):
            # What a body receives or defines itself hides an outer value of the same name.
            own = {value.name: _NONE for value in inner.input}
            own |= {tensor.name: _NONE for tensor in inner.initializer}
            bodies.append(_follow(inner, origins.new_child(own), reached))
        if node.domain in _STANDARD:
            for index in _WEIGHT_INPUTS.get(node.op_type, ()):
                if index < len(node.input):
                    reached |= origins.get(node.input[index], _NONE)
        for index, name in enumerate(node.output):
            origins[name] = _passed(node, index, origins, bodies)
    return [origins.get(value.name, _NONE) for value in graph.output]


def _passed(
    node: NodeProto, index: int, origins: ChainMap[str, _Origins], bodies: list[list[_Origins]]
) -> _Origins:
    if node.domain in _STANDARD and node.op_type in _PASSED_ON and index == 0 and node.input:
        return origins.get(node.input[0], _NONE)
    if node.domain in _STANDARD and node.op_type == "Concat":
        # Exporters reorder the gates of an LSTM so; with an activation it is not a weight any more.
        parts = [origins.get(name, _NONE) for name in node.input]
        return _NONE.union(*parts) if all(parts) else _NONE
    if node.domain in _STANDARD and node.op_type == "If":
        return _NONE.union(*(body[index] for body in bodies if index < len(body)))
    return _NONE
