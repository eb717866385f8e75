"""Whether a graph's first output is of classes, and which layer gives each class its row."""

from collections.abc import Mapping
from typing import Literal

from onnx import NodeProto, helper

from elsa_converters.onnx._calibrate.rewrite import Prepared

Classes = Literal["probabilities", "logits"] | None
_SAME = {"Dropout", "Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"}
_FIRST_OPSET_OF_LAST_AXIS = 13


def find_classes(prepared: Prepared) -> tuple[Classes, str | None]:
    """What the first output holds of classes, and the layer whose outputs they are.

    A softmax says so; without one, only the name "logits" does, as embeddings look the same.
    """
    (output, *_) = (v for v in prepared.model.proto.graph.output if v.name in prepared.outputs)
    sizes = output.type.tensor_type.shape.dim
    makers = {name: node for node in prepared.nodes for name in node.output}
    value = _before(output.name, makers)
    classes: Classes
    node = makers.get(value)
    if node is not None and node.op_type in ("Softmax", "LogSoftmax"):
        if not _over_last(node, len(sizes), prepared.model.opset):
            return None, None
        classes = "probabilities" if node.op_type == "Softmax" else "logits"
        value = _before(node.input[0], makers)
    elif "logits" in output.name.lower():
        classes = "logits"
    else:
        return None, None
    for site in prepared.sites:
        if site.output == value and site.layer.shape[:2] == (1, sizes[-1].dim_value):
            return classes, site.layer.name
    return classes, None


def _before(name: str, makers: Mapping[str, NodeProto]) -> str:
    """The value that another one is, but for its shape."""
    while name in makers and makers[name].op_type in _SAME:
        name = makers[name].input[0]
    return name


def _over_last(node: NodeProto, rank: int, opset: int) -> bool:
    """Whether a softmax is one over the last axis."""
    given = [helper.get_attribute_value(a) for a in node.attribute if a.name == "axis"]
    axis = given[0] if given else (-1 if opset >= _FIRST_OPSET_OF_LAST_AXIS else 1)
    return axis in (-1, rank - 1)
