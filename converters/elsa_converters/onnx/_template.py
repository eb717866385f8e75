"""Import: an ONNX model as a checkpoint to pack, and the template that is left of it."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto

from elsa_converters._errors import TemplateMismatch
from elsa_converters._format import Header, TensorInfo, dump, open_output, read_header
from elsa_converters.onnx._bind import describe
from elsa_converters.onnx._model import TEMPLATE_KEY, Model, read_model
from elsa_converters.onnx._reach import reaching
from elsa_converters.onnx._writer import point_to
from elsa_format import UnsafePath


class OnnxCheckpoint:
    """An ONNX model as `elsa-pack` reads it."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self.model = read_model(path)
        if self.model.is_template:
            missing = [w for w in self.model.weights.values() if w.source is None]
            if missing:
                row = (missing[0].info.name, "no values: it is a template", "the ones to pack")
                raise TemplateMismatch(self.path, [row])
        self.tensors: Mapping[str, TensorInfo] = {
            name: weight.info for name, weight in self.model.weights.items()
        }
        self.metadata: Mapping[str, str] = {}
        self._nestable = reaching(self.model.proto.graph, self.tensors)

    def blocks(self, name: str, size: int) -> Iterator[NDArray[np.uint8]]:
        """A tensor's bytes, `size` at a time; the array is reused."""
        return self.model.weights[name].blocks(size)

    def nestable(self, name: str) -> bool:
        """Whether a tensor is nested by default: it multiplies activations or is looked up."""
        info = self.tensors[name]
        return name in self._nestable and info.dtype.nestable and len(info.shape) >= 2

    def write_template(
        self,
        template: str | os.PathLike[str],
        packed: str | os.PathLike[str],
        *,
        force: bool = False,
    ) -> None:
        """Write the graph, its weights pointing into the ELSA file that was packed."""
        write_template(self.model, template, packed, force=force)

    def close(self) -> None:
        """Nothing is held open."""

    def __enter__(self) -> "OnnxCheckpoint":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def write_template(
    model: Model,
    template_path: str | os.PathLike[str],
    elsa_path: str | os.PathLike[str],
    *,
    force: bool = False,
) -> None:
    """Write a graph whose initializers are the dense network's tensors, in the ELSA file."""
    location = relative_location(template_path, elsa_path)
    with open(elsa_path, "rb") as file:
        header = read_header(file, os.fspath(elsa_path))
    proto = ModelProto()
    proto.CopyFrom(model.proto)
    _point_into(proto, model, header, location)
    for index in reversed(range(len(proto.metadata_props))):
        if proto.metadata_props[index].key == TEMPLATE_KEY:
            del proto.metadata_props[index]
    proto.metadata_props.add(key=TEMPLATE_KEY, value=dump({"version": "1.0"}))
    with open_output(template_path, force=force, in_order=True) as output:
        output.write_at(0, proto.SerializeToString(deterministic=True))
        output.commit()


def relative_location(model_path: str | os.PathLike[str], data_path: str | os.PathLike[str]) -> str:
    """How a model names the file its data is in; ONNX allows the same directory or one below."""
    folder = Path(model_path).resolve().parent
    data = Path(data_path).resolve()
    if not data.is_relative_to(folder):
        raise UnsafePath(
            f"{os.fspath(model_path)}: {os.fspath(data_path)} is outside the model's directory, "
            f"where ONNX does not look for data"
        )
    return data.relative_to(folder).as_posix()


def _point_into(proto: ModelProto, model: Model, header: Header, location: str) -> None:
    rows = []
    for tensor in proto.graph.initializer:
        weight = model.weights.get(tensor.name)
        if weight is None:
            continue
        stored = header.tensors.get(tensor.name)
        if stored is None or (stored.dtype, stored.shape) != (weight.info.dtype, weight.info.shape):
            found = "nothing" if stored is None else describe(stored)
            rows.append((tensor.name, describe(weight.info), found))
            continue
        point_to(tensor, location, header.data_start + stored.start, stored.nbytes)
    if rows:
        raise TemplateMismatch(str(model.path), rows)
