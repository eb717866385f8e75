"""A graph cut before each of its layers: what is between two of them runs as a graph of its own.

Weights, biases and scales of layers are inputs of a stretch, so that all networks run it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnxruntime
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, TypeProto, ValueInfoProto, helper

from elsa_converters._errors import InvalidData, UnsupportedOnnx
from elsa_converters.onnx._calibrate.layers import constant_values
from elsa_converters.onnx._calibrate.rewrite import Prepared, Site
from elsa_converters.onnx._graph.walk import reads
from elsa_converters.onnx._model.tensors import TO_ONNX
from elsa_converters.onnx._model.write import info_of_array, with_values

Array = NDArray[Any]


@dataclass(frozen=True)
class Stretch:
    """Some nodes of a graph, in a session."""

    session: Any
    """None if there is nothing to run."""
    site: Site | None
    """The layer that it begins with."""
    takes: tuple[str, ...]
    """Values of earlier stretches, or inputs of the graph."""
    parameters: tuple[str, ...]
    """Tensors of the layer."""
    makes: tuple[str, ...]
    drops: tuple[str, ...]
    """Values that nothing needs any more when it has run."""

    def run(self, live: Mapping[str, Array], tensors: Mapping[str, Array]) -> dict[str, Array]:
        """What it makes of live values, with these tensors of its layer."""
        feeds = {name: live[name] for name in self.takes}
        feeds |= {name: _value(tensors[name]) for name in self.parameters}
        try:
            found = self.session.run(self.makes, feeds)
        except Exception as error:  # whatever ONNX Runtime raises for what does not fit
            where = "before the first layer" if self.site is None else repr(self.site.layer.name)
            raise InvalidData(f"{where}: {_one_line(error)}") from None
        return dict(zip(self.makes, found, strict=True))


def cut(prepared: Prepared) -> list[Stretch]:
    """The stretches: what is before the first layer, then from each layer to the next."""
    return _Cutter(prepared).stretches()


class _Cutter:
    def __init__(self, prepared: Prepared) -> None:
        self.prepared, model = prepared, prepared.model
        self.graph = model.proto.graph
        self.sites = {site.product.node.output[0]: site for site in prepared.sites}
        self.own = {
            name
            for site in prepared.sites
            for name in (site.layer.name, site.bias, site.scale)
            if name is not None
        }
        self.constants = constant_values(model, prepared.nodes) - self.own
        self.makers = {name: node for node in prepared.nodes for name in node.output if name}
        self.small = {t.name: t for t in self.graph.initializer if t.name not in model.weights}
        self.types = {
            value.name: value.type for value in self.graph.input if value.name not in self.small
        }
        # An output is made once, and what turns a layer's weight goes with the layer.
        self.constants.difference_update(prepared.outputs)
        for site in prepared.sites:
            for node in site.product.weight.nodes:
                self.constants.difference_update(node.output)

    def stretches(self) -> list[Stretch]:
        parts = self._parts()
        needs = [set().union(*map(reads, nodes)) for _, nodes in parts]
        later: list[set[str]] = [set(self.prepared.outputs)]
        for need in reversed(needs[1:]):
            later.append(later[-1] | need)
        return [
            self._stretch(site, nodes, need, after)
            for (site, nodes), need, after in zip(parts, needs, reversed(later), strict=True)
        ]

    def _parts(self) -> list[tuple[Site | None, list[NodeProto]]]:
        """Layers with the nodes that follow them; constants are computed where they are needed."""
        turning = {id(n) for site in self.prepared.sites for n in site.product.weight.nodes}
        parts: list[tuple[Site | None, list[NodeProto]]] = [(None, [])]
        for node in self.prepared.nodes:
            if id(node) in turning or self.constants.issuperset(filter(None, node.output)):
                continue
            site = self.sites.get(node.output[0])
            if site is not None:
                parts.append((site, list(site.product.weight.nodes)))
            parts[-1][1].append(node)
        return parts

    def _stretch(
        self, site: Site | None, nodes: list[NodeProto], need: set[str], after: set[str]
    ) -> Stretch:
        made = {name for node in nodes for name in node.output if name}
        constants = self._constants(need & self.constants)
        takes = tuple(sorted(need - made - self.constants - self.own))
        parameters = tuple(sorted(need & self.own))
        makes = tuple(sorted(made & after))
        drops = tuple(name for name in takes if name not in after)
        session = self._session([*constants, *nodes], takes, parameters, makes) if makes else None
        return Stretch(session, site, takes, parameters, makes, drops)

    def _constants(self, names: set[str]) -> list[NodeProto]:
        """The nodes that compute constants, in order."""
        wanted: set[str] = set()
        todo = list(names)
        while todo:
            name = todo.pop()
            if name not in wanted:
                wanted.add(name)
                if name in self.makers:
                    todo += reads(self.makers[name])
        return [node for node in self.prepared.nodes if not wanted.isdisjoint(node.output)]

    def _session(
        self,
        nodes: Sequence[NodeProto],
        takes: Sequence[str],
        parameters: Sequence[str],
        makes: Sequence[str],
    ) -> Any:
        weights = self.prepared.model.weights
        used = set().union(*map(reads, nodes)) - set(parameters)
        inputs = [ValueInfoProto(name=name, type=self.types[name]) for name in takes]
        inputs += [
            helper.make_tensor_value_info(info.name, TO_ONNX[info.dtype.name], info.shape)
            for info in (weights[name].info for name in parameters)
        ]
        graph = helper.make_graph(
            nodes,
            "stretch",
            inputs,
            [ValueInfoProto(name=name) for name in makes],
            [tensor for name, tensor in self.small.items() if name in used],
        )
        proto = ModelProto()
        proto.CopyFrom(self.prepared.model.proto)
        proto.ClearField("metadata_props")
        proto.graph.CopyFrom(graph)
        arrays = {name: weights[name].array() for name in sorted(used & weights.keys())}
        content, values = with_values(proto, arrays)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4  # what it would print of a failure is raised, too
        # Batches run side by side instead: so the bits do not depend on the number of threads.
        options.intra_op_num_threads = 1
        options.enable_cpu_mem_arena = False
        options.add_external_initializers(list(values), list(values.values()))
        try:
            session = onnxruntime.InferenceSession(
                content, options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # whatever ONNX Runtime raises for what it cannot run
            raise UnsupportedOnnx(f"{self.prepared.model.path}: {_one_line(error)}") from None
        for value in session.get_outputs():
            self.types[value.name] = self._type(value)
        return session

    def _type(self, value: Any) -> TypeProto:
        name = value.type.removeprefix("tensor(").removesuffix(")")
        code = _ORT_NAMES.get(name)
        if code is None:
            raise UnsupportedOnnx(
                f"{self.prepared.model.path}: value {value.name!r}: {value.type} between layers, "
                "expected a tensor"
            )
        return helper.make_tensor_type_proto(code, None)


_ORT_NAMES = {
    name.lower(): code for name, code in TensorProto.DataType.items() if name != "UNDEFINED"
}


def _value(array: Array) -> Any:
    """An array as ONNX Runtime takes it: of numpy's own types as it is."""
    if array.dtype.isbuiltin == 1:
        return array
    code = TO_ONNX[info_of_array("", array).dtype.name]
    return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array, code)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
