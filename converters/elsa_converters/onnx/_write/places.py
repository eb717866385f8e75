"""Where the tensors of an ELSA file, or of its shards, are for a model that points into them."""

import errno
import os
from dataclasses import dataclass
from pathlib import Path

from onnx import TensorProto

from elsa_converters._errors import MisplacedOutput
from elsa_converters.onnx._model.tensors import point_to
from elsa_format.plugins import Network, TensorInfo, is_text, is_url

PathLike = str | os.PathLike[str]


@dataclass(frozen=True)
class Places:
    """The files, as a model names them."""

    files: tuple[tuple[str, Network], ...]

    def point(self, tensor: TensorProto, info: TensorInfo) -> None:
        """Make a tensor's data the stored one."""
        for location, file in self.files:
            if info.name in file.header.tensors:
                offset = file.header.data_start + file.header.tensors[info.name].start
                point_to(tensor, location, offset, info.nbytes)


def places(network: Network, path: PathLike, model: PathLike) -> Places:
    """The places as a model sees them, which must be in the same directory or above."""
    single = len(network.files) == 1
    files: list[PathLike] = [path] if single else [file.name for file in network.files]
    locations = [relative_location(model, file) for file in files]
    return Places(tuple(zip(locations, network.files, strict=True)))


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
