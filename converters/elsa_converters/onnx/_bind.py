"""Binding a template to an ELSA file: the same names, shapes, dtypes and, where shared, values."""

from dataclasses import dataclass

from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper

from elsa_converters._errors import TemplateMismatch, UnsupportedOnnx
from elsa_converters.onnx._graphs import all_graphs, defined, rename_uses
from elsa_converters.onnx._hoist import remove_named
from elsa_converters.onnx._model import (
    LEVEL_KEY,
    LEVELS_KEY,
    TEMPLATE_KEY,
    Model,
    drop_metadata,
)
from elsa_converters.onnx._weights import TO_ONNX, Weight
from elsa_format.plugins import LevelNumber, Network, TensorInfo

_NOTHING = "nothing"
_FIRST_OPSET_WITH_BF16 = 13


@dataclass(frozen=True)
class Binding:
    """A template and an ELSA file that fit each other."""

    model: Model
    network: Network
    proto: ModelProto
    """The template's graph without the initializers that come from elsewhere."""
    names: frozenset[str]
    """The file's tensors that the graph uses, each an initializer of the same name."""
    rest: dict[str, Weight]
    """Weights that only the template has."""

    def info(self, name: str) -> TensorInfo:
        """The initializer of a tensor, dtype and shape as stored."""
        return self.network.header.tensors[name]

    def kept(self, name: str, level: LevelNumber) -> int | None:
        """How many weights a level keeps of a tensor; None if all, as it is not a nested one."""
        profile = self.network.profile
        if level == "dense" or name not in profile.nested:
            return None
        return profile.kept(name, level)


def bind(model: Model, network: Network) -> Binding:
    """Check that the template is of this file's network, and let its graph take stored tensors.

    Integers that the graph has no use for (step counters) may be missing from the template.
    """
    _compare(model, network)
    header = network.header
    proto = ModelProto()
    proto.CopyFrom(model.proto)
    remove_named(proto.graph.initializer, model.weights.keys())
    for key in (TEMPLATE_KEY, LEVEL_KEY, LEVELS_KEY):  # what the template was
        drop_metadata(proto, key)
    fresh = FreshNames(proto.graph)
    fresh.taken |= model.weights.keys()
    names = [name for name in network.tensors if name in model.weights]
    widened = {}
    for name in names:
        dtype = header.tensors[name].dtype
        if dtype.name not in TO_ONNX:
            raise UnsupportedOnnx(f"{model.path}: tensor {name!r}: ONNX has no {dtype.name}")
        if model.weights[name].info.dtype != dtype:
            widened[name] = fresh(f"{name}.float")
    rename_uses(proto.graph, widened)
    remove_named(proto.graph.input, widened)  # an input of another dtype it cannot be
    compute_first(proto.graph, [_cast_to_float(*pair) for pair in widened.items()])
    rest = {name: w for name, w in model.weights.items() if name not in header.tensors}
    return Binding(model, network, proto, frozenset(names), rest)


def compute_first(graph: GraphProto, nodes: list[NodeProto]) -> None:
    """Put nodes before all others; what they compute cannot be an input of the graph any more."""
    if not nodes:
        return
    remove_named(graph.input, {name for node in nodes for name in node.output})
    old = [NodeProto.FromString(node.SerializeToString()) for node in graph.node]
    del graph.node[:]
    graph.node.extend([*nodes, *old])


def _compare(model: Model, network: Network) -> None:
    rows = []
    for name, info in network.tensors.items():
        weight = model.weights.get(name)
        if weight is None:
            if info.dtype.nestable:
                folded = " (folded away?)" if name in network.profile.per_level else ""
                rows.append((name, _NOTHING + folded, describe(info)))
        elif weight.info.shape != info.shape or not _fits(weight.info, info, model):
            rows.append((name, describe(weight.info), describe(info)))
    for name, weight in model.weights.items():
        if weight.source is None and name not in network.header.tensors:
            rows.append((name, describe(weight.info), _NOTHING))
    if rows:
        raise TemplateMismatch(str(model.path), rows)


def describe(info: TensorInfo) -> str:
    """dtype and shape, as the table shows them.

    >>> from elsa_format.plugins import DTYPES
    >>> describe(TensorInfo("w", DTYPES["F32"], (3, 4)))
    'F32 [3, 4]'
    """
    return f"{info.dtype.name} {list(info.shape)}"


def _fits(wanted: TensorInfo, stored: TensorInfo, model: Model) -> bool:
    """Whether the dtypes are the same, or 16 stored bits that the graph can cast to its float32."""
    if wanted.dtype == stored.dtype:
        return True
    if wanted.dtype.name != "F32" or any(v.name == wanted.name for v in model.proto.graph.output):
        return False
    return stored.dtype.name == "F16" or (
        stored.dtype.name == "BF16" and model.opset >= _FIRST_OPSET_WITH_BF16
    )


class FreshNames:
    """Names for values that are added to a graph."""

    def __init__(self, graph: GraphProto) -> None:
        self.taken = {name for inner in all_graphs(graph) for name in defined(inner)}

    def __call__(self, wanted: str) -> str:
        name, number = wanted, 1
        while name in self.taken:
            number += 1
            name = f"{wanted}.{number}"
        self.taken.add(name)
        return name


def _cast_to_float(stored: str, result: str) -> NodeProto:
    return helper.make_node("Cast", [stored], [result], to=TensorProto.FLOAT)
