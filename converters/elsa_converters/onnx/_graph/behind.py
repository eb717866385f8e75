"""The stored tensor behind a weight that a graph turns or widens before it uses it."""

from collections.abc import Mapping
from dataclasses import dataclass

from onnx import NodeProto, TensorProto, helper


@dataclass(frozen=True)
class Behind:
    """A stored tensor, and what a graph makes of it."""

    name: str
    order: tuple[int, ...]
    """Its axes, in the order of the weight's."""
    widened: bool
    """Whether it is cast to float32."""
    nodes: tuple[NodeProto, ...]
    """What makes the weight of it, in order."""


def behind(name: str, makers: Mapping[str, NodeProto], ranks: Mapping[str, int]) -> Behind | None:
    """What is behind a weight, None if it is not one of the tensors with these ranks.

    Exporters transpose the kernels of flax, and cast the halves of a template.
    """
    nodes: list[NodeProto] = []
    turns: list[list[int] | None] = []
    widened = False
    while name not in ranks:
        node = makers.get(name)
        if node is None or len(node.input) != 1:
            return None
        values = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        if node.op_type == "Transpose":
            turns.append(values.get("perm"))
        elif node.op_type == "Cast" and values.get("to") == TensorProto.FLOAT:
            widened = True
        elif node.op_type != "Identity":
            return None
        nodes.append(node)
        name = node.input[0]
    order = list(range(ranks[name]))
    for turn in reversed(turns):
        axes = list(range(len(order)))
        turn = axes[::-1] if turn is None else turn
        if sorted(turn) != axes:
            return None
        order = [order[axis] for axis in turn]
    return Behind(name, tuple(order), widened, tuple(nodes[::-1]))
