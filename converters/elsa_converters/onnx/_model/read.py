"""An ONNX model as it is worked with here: its graph, and its weights by name."""

import mmap
import os
from collections import Counter
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx import AttributeProto, GraphProto, ModelProto, TensorProto
from onnx.inliner import inline_local_functions

from elsa_converters._errors import InvalidOnnx, UnsupportedOnnx
from elsa_converters.onnx._graph.walk import all_graphs, remove_named, used
from elsa_converters.onnx._model.hoist import hoist, is_reserved, is_weight
from elsa_converters.onnx._model.sparse import expand_sparse
from elsa_converters.onnx._model.tensors import (
    FROM_ONNX,
    Weight,
    external_entries,
    external_region,
    info_of,
    weight_of,
)
from elsa_converters.onnx._model.wire import OWN_FILE, without_large_data
from elsa_format.plugins import SNIFFED, other_format

TEMPLATE_KEY = "elsa_template"
"""Entry of metadata_props that marks a template: its weights are in an ELSA file."""
LEVEL_KEY = "elsa_level"
"""Entry of metadata_props that says which level of what a model is."""
LEVELS_KEY = "elsa_levels"
"""Entry of metadata_props that lists the levels."""
OLDEST_OPSET = 9
_FIRST_IR_WITH_CONSTANTS = 4
# Inputs whose values decide shapes: they must stay in the graph for shape inference to see them.
_SHAPE_INPUTS = {"Resize": (1, 2, 3), "Upsample": (1,)}


@dataclass(frozen=True)
class Model:
    """A graph whose weights have been taken out."""

    path: Path
    proto: ModelProto
    """Initializers of the weights are left with name, dtype and shape only."""
    weights: dict[str, Weight]
    is_template: bool

    @property
    def opset(self) -> int:
        """Version of the standard operators."""
        return next(opset_versions(self.proto))


def read_model(path: str | os.PathLike[str], also: Container[str] = ()) -> Model:
    """Read a model, its weights not yet: they are found, checked and left where they are.

    `also` names initializers that count as weights whatever they look like.
    """
    path = Path(path)
    proto = parse_model(path)
    template = any(entry.key == TEMPLATE_KEY for entry in proto.metadata_props)
    if proto.functions:
        # Only where it is called can a constant of a function's body become an initializer.
        proto = _inlined(proto, path)
    for graph in all_graphs(proto.graph):
        expand_sparse(graph, str(path))
    hoist(proto)
    if not template:  # whose tensors are all in the ELSA file
        _drop_unused(proto, also)
    _check(proto, path)
    weights = {}
    excluded = _deciding_shapes(proto)
    for tensor in proto.graph.initializer:
        name = tensor.name
        if name in also and tensor.data_type not in FROM_ONNX:
            kind = TensorProto.DataType.Name(tensor.data_type)
            raise UnsupportedOnnx(f"{path}: tensor {name!r}: {kind} cannot be stored")
        if name not in also and (not is_weight(tensor) or name in excluded or is_reserved(name)):
            continue
        weights[name] = _template_weight(tensor, path) if template else weight_of(tensor, path)
        tensor.CopyFrom(bare(tensor))
    _take_in_the_rest(proto, path)
    return Model(path, proto, weights, template)


def data_files(path: str | os.PathLike[str]) -> set[Path]:
    """The files that a model's initializers point to."""
    return {
        Path(path).parent / entry.value
        for tensor in parse_model(Path(path)).graph.initializer
        for entry in tensor.external_data
        if entry.key == "location"
    }


def opset_versions(proto: ModelProto) -> Iterator[int]:
    """Versions of the standard operators; a valid model has one."""
    return (o.version for o in proto.opset_import if o.domain in ("", "ai.onnx"))


def drop_metadata(proto: ModelProto, key: str) -> None:
    """Delete an entry of metadata_props, if it is there."""
    for index in reversed(range(len(proto.metadata_props))):
        if proto.metadata_props[index].key == key:
            del proto.metadata_props[index]


def bare(tensor: TensorProto) -> TensorProto:
    """Name, dtype and shape without the data."""
    return TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)


def parse_model(path: Path) -> ModelProto:
    """The model of a file as it is, without large data."""
    try:
        return _parsed(path)
    except InvalidOnnx:
        with open(path, "rb") as file:
            problem = other_format(file.read(SNIFFED), "an ONNX model")
        if problem is None:
            raise
        raise InvalidOnnx(f"{path}: {problem}") from None


def _parsed(path: Path) -> ModelProto:
    with open(path, "rb") as file:
        try:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as buffer:
                content = without_large_data(buffer, str(path))
        except ValueError:  # an empty file cannot be mapped
            raise InvalidOnnx(f"{path}: an empty file, expected an ONNX model") from None
    try:
        proto: ModelProto = ModelProto.FromString(content)
    except DecodeError:
        raise InvalidOnnx(f"{path}: not an ONNX model, or truncated") from None
    # ONNX is proto2: text that is not UTF-8 comes as bytes, and would fail somewhere later.
    if not all(isinstance(text, str) for text in _texts(proto)):
        raise InvalidOnnx(f"{path}: a name in the model is not UTF-8")
    if not proto.HasField("graph") or not proto.graph.output:
        raise InvalidOnnx(f"{path}: not an ONNX model: no graph with outputs")
    versions = list(opset_versions(proto))
    if len(versions) != 1:
        raise InvalidOnnx(f"{path}: {len(versions)} versions of the standard operators, expected 1")
    if versions[0] < OLDEST_OPSET:
        raise UnsupportedOnnx(f"{path}: opset {versions[0]}, expected {OLDEST_OPSET} or newer")
    return proto


def _inlined(proto: ModelProto, path: Path) -> ModelProto:
    try:
        return inline_local_functions(proto)
    except Exception as error:  # the library raises whatever its C++ code does
        reason = " ".join(str(error).split())
        raise InvalidOnnx(f"{path}: its functions cannot be inlined: {reason}") from None


def _texts(proto: ModelProto) -> Iterator[object]:
    """Every name that is read here."""
    for opset in proto.opset_import:
        yield opset.domain
    for entry in proto.metadata_props:
        yield entry.key
    for graph in all_graphs(proto.graph):
        yield graph.name
        yield from (value.name for value in (*graph.input, *graph.output, *graph.value_info))
        yield from (sparse.values.name for sparse in graph.sparse_initializer)
        for node in graph.node:
            yield from (node.name, node.op_type, node.domain, *node.input, *node.output)
            yield from (attribute.name for attribute in node.attribute)
        for tensor in _tensors(graph):
            yield tensor.name
            for entry in tensor.external_data:
                yield from (entry.key, entry.value)


def _drop_unused(proto: ModelProto, wanted: Container[str]) -> None:
    graph = proto.graph
    names = used(graph)
    unused = {t.name for t in graph.initializer if t.name not in names and t.name not in wanted}
    remove_named(graph.initializer, unused)
    if proto.ir_version < _FIRST_IR_WITH_CONSTANTS:
        # Older models had to list constants as inputs; newer ones that do let callers change them.
        proto.ir_version = _FIRST_IR_WITH_CONSTANTS
        unused |= {tensor.name for tensor in graph.initializer}
    remove_named(graph.input, unused)


def _check(proto: ModelProto, path: Path) -> None:
    counts = Counter(tensor.name for tensor in proto.graph.initializer)
    for name, count in counts.items():
        if count > 1 or not name:
            raise InvalidOnnx(f"{path}: {count} initializers named {name!r}")
    for tensor in proto.graph.initializer:
        where = f"{path}: tensor {tensor.name!r}"
        if tensor.data_type not in TensorProto.DataType.values() or tensor.data_type == 0:
            raise UnsupportedOnnx(f"{where}: unknown data type {tensor.data_type}")
        if min(tensor.dims, default=0) < 0:
            raise InvalidOnnx(f"{where}: shape {list(tensor.dims)} has a negative size")


def _deciding_shapes(proto: ModelProto) -> set[str]:
    return {
        node.input[index]
        for graph in all_graphs(proto.graph)
        for node in graph.node
        for index in _SHAPE_INPUTS.get(node.op_type, ())
        if index < len(node.input)
    }


def _template_weight(tensor: TensorProto, path: Path) -> Weight:
    """A weight of a template, whose external data is never read: the ELSA file has the values."""
    if external_entries(tensor).get("location", OWN_FILE) == OWN_FILE:
        return weight_of(tensor, path)
    return Weight(info_of(tensor), None)


def _take_in_the_rest(proto: ModelProto, path: Path) -> None:
    """Give back what was cut out of tensors that turned out not to be weights."""
    for graph in all_graphs(proto.graph):
        for tensor in _tensors(graph):
            if tensor.data_location != TensorProto.EXTERNAL:
                continue
            region = external_region(tensor, None, path)
            with open(region.path, "rb") as file:
                file.seek(region.offset)
                content = file.read(region.length)
            tensor.CopyFrom(bare(tensor))
            tensor.raw_data = content


def _tensors(graph: GraphProto) -> Iterator[TensorProto]:
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == AttributeProto.TENSOR:
                yield attribute.t
            yield from attribute.tensors
