"""Write a model and its tensors: into a file, block by block, or into a session's memory."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from onnx import ModelProto, SparseTensorProto, TensorProto

from elsa_converters._errors import UnsupportedOnnx
from elsa_converters.onnx._model.sparse import INDEX_BYTES, coordinates, sparse_header
from elsa_converters.onnx._model.tensors import TO_ONNX, header_of, point_to
from elsa_converters.onnx._model.wire import LARGE, bytes_header
from elsa_format import CountMismatch
from elsa_format.plugins import Output, TensorInfo, of_array

LARGEST_FILE = (1 << 31) - 1
"""What protobuf can read; above it tensors go to a file of their own."""
_GRAPH, _INITIALIZER, _SPARSE_INITIALIZER, _RAW_DATA = 7, 5, 15, 9
_SPARSE_VALUES, _SPARSE_INDICES = 1, 2
_ALIGNMENT = 64
_INLINE = 1024  # tensors below this stay in the model even if the others do not
_FIRST_IR_WITH_SPARSE = 5


@dataclass(frozen=True)
class Entry:
    """A tensor to be written: dense, or `kept` coordinates and values."""

    info: TensorInfo
    kept: int | None = None


@dataclass
class _Place:
    info: TensorInfo
    output: Output
    start: int
    written: int = 0


@dataclass
class _SparsePlace:
    info: TensorInfo
    output: Output
    values: int
    indices: int
    kept: int
    read: int = 0
    written: int = 0


class ModelWriter:
    """A model's graph and then its tensors, in one file or with the data beside it.

    Every byte has its place before the first is written.
    """

    def __init__(
        self,
        proto: ModelProto,
        entries: Iterable[Entry],
        output: Output,
        data: tuple[str, Output] | None = None,
    ) -> None:
        self.output = output
        self.places: dict[str, _Place | _SparsePlace] = {}
        model = ModelProto()
        model.CopyFrom(proto)
        entries = list(entries)
        if any(entry.kept is not None for entry in entries):
            model.ir_version = max(model.ir_version, _FIRST_IR_WITH_SPARSE)
        if data is not None:
            entries = self._place_outside(model, entries, *data)
        self._place_inside(model, entries)

    def _place_outside(
        self, model: ModelProto, entries: list[Entry], location: str, output: Output
    ) -> list[Entry]:
        position, inside = 0, []
        for entry in entries:
            if entry.kept is not None or entry.info.nbytes < _INLINE:
                inside.append(entry)
                continue
            position += -position % _ALIGNMENT
            tensor = header_of(entry.info)
            point_to(tensor, location, position, entry.info.nbytes)
            model.graph.initializer.append(tensor)
            self.places[entry.info.name] = _Place(entry.info, output, position)
            position += entry.info.nbytes
        return inside

    def _place_inside(self, model: ModelProto, entries: list[Entry]) -> None:
        graph = model.graph.SerializeToString(deterministic=True)
        model.ClearField("graph")
        rest = model.SerializeToString(deterministic=True)
        parts = [(entry, *_framed(entry)) for entry in entries]
        length = len(graph) + sum(len(head) + size for _, head, size in parts)
        start = rest + bytes_header(_GRAPH, length) + graph
        if len(start) + length - len(graph) > LARGEST_FILE:
            raise UnsupportedOnnx(
                f"{len(start) + length - len(graph)} bytes, expected at most {LARGEST_FILE} "
                f"in one ONNX file",
                "{external_data} puts them beside it",
                external_data=True,
            )
        self.output.write_at(0, start)
        position = len(start)
        for entry, head, size in parts:
            if entry.kept is None:
                self.output.write_at(position, head)
                self.places[entry.info.name] = _Place(entry.info, self.output, position + len(head))
            else:
                self._place_sparse(entry.info, entry.kept, position)
            position += len(head) + size

    def _place_sparse(self, info: TensorInfo, kept: int, position: int) -> None:
        values, indices = sparse_header(info, kept)
        head, between = _sparse_frames(info, values, indices, kept)
        self.output.write_at(position, head)
        first = position + len(head)
        second = first + kept * info.dtype.size // 8
        self.output.write_at(second, between)
        self.places[info.name] = _SparsePlace(info, self.output, first, second + len(between), kept)

    def append(self, name: str, block: NDArray[Any]) -> None:
        """The next bytes of a tensor, whole elements."""
        place = self.places[name]
        data = block.reshape(-1).view(np.uint8)
        if isinstance(place, _Place):
            place.output.write_at(place.start + place.written, data)
            place.written += data.size
            return
        words = data.view(place.info.dtype.words)
        found = coordinates(words)
        if place.written + found.size > place.kept:
            raise self._miscounted(place, place.written + found.size)
        width = words.itemsize
        place.output.write_at(place.values + place.written * width, words[found])
        place.output.write_at(place.indices + place.written * INDEX_BYTES, found + place.read)
        place.read += words.size
        place.written += found.size

    def finish(self) -> None:
        """Check that every tensor is complete; the outputs are for the caller to commit."""
        for place in self.places.values():
            if isinstance(place, _SparsePlace) and place.written != place.kept:
                raise self._miscounted(place, place.written)
            if isinstance(place, _Place) and place.written != place.info.nbytes:
                raise ValueError(f"tensor {place.info.name!r} is incomplete")

    def _miscounted(self, place: _SparsePlace, found: int) -> CountMismatch:
        return CountMismatch(
            f"tensor {place.info.name!r}: {found} weights kept, expected {place.kept}"
        )


def model_size(proto: ModelProto, entries: Iterable[Entry]) -> int:
    """Bytes of the file that a model and its tensors make."""
    tensors = sum(len(head) + size for head, size in map(_framed, entries))
    graph: int = proto.graph.ByteSize()
    rest: int = proto.ByteSize() - len(bytes_header(_GRAPH, graph)) - graph
    return rest + len(bytes_header(_GRAPH, graph + tensors)) + graph + tensors


def _framed(entry: Entry) -> tuple[bytes, int]:
    """What stands before a tensor's data, and the bytes that follow it."""
    info = entry.info
    if entry.kept is not None:
        values, indices = sparse_header(info, entry.kept)
        head, between = _sparse_frames(info, values, indices, entry.kept)
        return head, len(between) + entry.kept * (info.dtype.size // 8 + INDEX_BYTES)
    body = header_of(info).SerializeToString() + bytes_header(_RAW_DATA, info.nbytes)
    return bytes_header(_INITIALIZER, len(body) + info.nbytes) + body, info.nbytes


def _sparse_frames(
    info: TensorInfo, values: TensorProto, indices: TensorProto, kept: int
) -> tuple[bytes, bytes]:
    """The bytes before the values, and those between values and indices."""
    value_bytes, index_bytes = kept * info.dtype.size // 8, kept * INDEX_BYTES
    first = values.SerializeToString() + bytes_header(_RAW_DATA, value_bytes)
    second = indices.SerializeToString() + bytes_header(_RAW_DATA, index_bytes)
    before = bytes_header(_SPARSE_VALUES, len(first) + value_bytes) + first
    between = bytes_header(_SPARSE_INDICES, len(second) + index_bytes) + second
    dims = SparseTensorProto(dims=info.shape).SerializeToString()
    body = dims + before
    total = len(body) + value_bytes + len(between) + index_bytes
    return bytes_header(_SPARSE_INITIALIZER, total) + body, between


def info_of_array(name: str, array: NDArray[Any]) -> TensorInfo:
    """An array as an initializer."""
    return TensorInfo(name, of_array(array.dtype), array.shape)


def with_values(proto: ModelProto, arrays: dict[str, NDArray[Any]]) -> tuple[bytes, dict[str, Any]]:
    """The model's bytes with placeholders for its tensors, and the tensors.

    These must live until the session exists, which has copies of its own.
    """
    full, values = ModelProto(), {}
    full.CopyFrom(proto)
    for name, array in arrays.items():
        info = info_of_array(name, array)
        tensor = header_of(info)
        if info.nbytes < LARGE:
            # Small ones are copied into the graph, where shape inference can see them.
            tensor.raw_data = array.tobytes()
        else:
            point_to(tensor, "elsa", 0, info.nbytes)
            code = TO_ONNX[info.dtype.name]
            values[name] = onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array, code)
        full.graph.initializer.append(tensor)
    return full.SerializeToString(), values
