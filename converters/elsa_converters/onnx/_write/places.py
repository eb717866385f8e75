"""Where the tensors of an ELSA file, or of its shards, are for a model that points into them."""

import errno
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from onnx import TensorProto

from elsa_converters._errors import MisplacedOutput
from elsa_converters.onnx._model.tensors import point_to
from elsa_format.plugins import Network, TensorInfo, is_text, is_url

PathLike = str | os.PathLike[str]


@dataclass(frozen=True)
class Places:
    """A network's tensors where they are stored, its files as a model names them."""

    network: Network
    locations: Mapping[str, str]

    def point(self, tensor: TensorProto, info: TensorInfo) -> None:
        """Make a tensor's data the stored one."""
        file, offset = self.network.place(info.name)
        point_to(tensor, self.locations[file], offset, info.nbytes)


def places(network: Network, model: PathLike) -> Places:
    """The places as a model sees them; their files must be in its directory or below."""
    names = [file.name for file in network.files]
    return Places(network, {name: relative_location(model, name) for name in names})


def relative_location(model: PathLike, data: PathLike) -> str:
    """How a model names the file its data is in; ONNX allows the same directory or one below."""
    target, path = Path(os.path.realpath(model)), Path(os.path.realpath(data))
    if target.is_symlink():  # links in a circle have no target
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), os.fspath(model))
    folder = target.parent
    if is_url(data) or not path.is_relative_to(folder):
        raise MisplacedOutput(
            f"{os.fspath(model)}: {os.fspath(data)} is outside the model's directory, "
            f"where ONNX does not look for data"
        )
    return location_of(path.relative_to(folder))


def location_of(path: Path) -> str:
    """How a model names a file relative to itself."""
    if not is_text(location := path.as_posix()):
        raise MisplacedOutput(f"{location}: the model names this file, so it must be UTF-8")
    return location
