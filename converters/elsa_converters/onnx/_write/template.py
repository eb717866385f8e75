"""Import: an ONNX model as a checkpoint to pack, and the template that is left of it."""

import os
from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from elsa_converters.onnx._graph.reach import reaching
from elsa_converters.onnx._level.bind import bind
from elsa_converters.onnx._model.read import TEMPLATE_KEY, Model, read_model
from elsa_converters.onnx._model.tensors import header_of
from elsa_converters.onnx._write.places import places, relative_location
from elsa_format import AlreadyPacked
from elsa_format.plugins import Checkpoint, TensorInfo, dump, open_network, open_output


class OnnxCheckpoint(Checkpoint):
    """An ONNX model as `elsa-pack` reads it.

    >>> with OnnxCheckpoint("model.onnx") as checkpoint:
    ...     {name: checkpoint.nestable(name) for name in checkpoint.tensors}
    {'layer': True, 'bias': False}
    """

    def __init__(self, source: str | os.PathLike[str] | Model) -> None:
        self.model = source if isinstance(source, Model) else read_model(source)
        self.path = os.fspath(self.model.path)
        if any(weight.source is None for weight in self.model.weights.values()):
            raise AlreadyPacked(
                f"{self.path}: is a template, its weights are in an ELSA file already"
            )
        self.tensors: Mapping[str, TensorInfo] = {
            name: weight.info for name, weight in self.model.weights.items()
        }
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

    def check_template(
        self, template: str | os.PathLike[str], packed: str | os.PathLike[str]
    ) -> None:
        """Refuse places that a template could not point to, before anything is packed."""
        relative_location(template, packed)


def write_template(
    model: Model,
    template_path: str | os.PathLike[str],
    elsa_path: str | os.PathLike[str],
    *,
    force: bool = False,
) -> None:
    """Write a graph whose initializers are the dense network's tensors, in the ELSA file.

    >>> write_template(read_model("model.onnx"), "template.onnx", "net.safetensors")
    """
    with open_network(elsa_path) as network:
        where = places(network, template_path)
        binding = bind(model, network)
        proto = binding.proto
        for name, info in network.tensors.items():
            if name in binding.names:
                tensor = header_of(info)
                where.point(tensor, info)
                proto.graph.initializer.append(tensor)
    for weight in binding.rest.values():
        proto.graph.initializer.append(header_of(weight.info))
        proto.graph.initializer[-1].raw_data = weight.array().tobytes()
    proto.metadata_props.add(key=TEMPLATE_KEY, value=dump({"version": "1.0"}))
    with open_output(template_path, force=force, in_order=True) as output:
        output.write_at(0, proto.SerializeToString(deterministic=True))
        output.commit()


def renew_template(template: str | os.PathLike[str], elsa_path: str | os.PathLike[str]) -> None:
    """Let a template point into its ELSA file again after metrics were recorded in that.

    Another header moves the weights, and ONNX Runtime would read other bytes without a word. Other
    models than templates stay as they are.

    Args:
        template: The template, which is replaced.
        elsa_path: The ELSA file, a shard index or a model directory.

    >>> from elsa_format import record
    >>> moved = record("net.safetensors", None, {1: {"accuracy": 0.91}})
    >>> renew_template("net.onnx", "net.safetensors")
    """
    with open_network(elsa_path) as network:
        model = read_model(template, also=network.tensors)
    if model.is_template:
        write_template(model, template, elsa_path, force=True)
