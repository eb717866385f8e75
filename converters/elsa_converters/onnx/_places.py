"""Where the tensors of an ELSA file, or of its shards, are for a model that points into them."""

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from onnx import TensorProto

from elsa_converters._errors import MisplacedOutput
from elsa_converters._format import Header, OpenSource, TensorInfo, is_text, is_url
from elsa_converters.onnx._writer import point_to

PathLike = str | os.PathLike[str]


@dataclass(frozen=True)
class Places:
    """The names of the files, and which of them holds what."""

    locations: tuple[str, ...]
    at: Callable[[int], tuple[int, int]]
    """The number of the file that holds a position of the joined files, and the place in it."""
    data_start: int

    def point(self, tensor: TensorProto, info: TensorInfo) -> None:
        """Make a tensor's data the stored one."""
        number, offset = self.at(self.data_start + info.start)
        point_to(tensor, self.locations[number], offset, info.nbytes)


def places(source: OpenSource, header: Header, path: PathLike, model: PathLike) -> Places:
    """The places as a model sees them, which must be in the same directory or above."""
    if source.shards is None:
        return Places(
            (relative_location(model, path),), lambda position: (0, position), header.data_start
        )
    folder = Path(path).parent
    files = [relative_location(model, folder / shard.file) for shard in source.shards.shards]
    return Places(tuple(files), source.shards.at, header.data_start)


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
