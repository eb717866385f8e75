"""Transposes that undo one another, which is what a converter between axis orders leaves behind."""

from collections import Counter

from onnx import GraphProto, NodeProto

from elsa_converters.onnx._graphs import all_graphs, rename_uses


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
