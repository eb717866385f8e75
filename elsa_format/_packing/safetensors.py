"""Plain safetensors, in one file or in shards, as a checkpoint."""

import os
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from elsa_format._container.header import Header
from elsa_format._errors import AlreadyPacked, InvalidLayout, Truncated
from elsa_format._level_document import LevelFile
from elsa_format._level_document import parse as parse_level
from elsa_format._memory import give_block, take_block
from elsa_format._network import open_level
from elsa_format._packing.checkpoint import Checkpoint
from elsa_format._profile import KEY
from elsa_format._storage import fill


class SafetensorsCheckpoint(Checkpoint):
    """A plain safetensors file, or the shards that an index names."""

    def __init__(self, source: str | os.PathLike[str]) -> None:
        self._network = network = open_level(source, _refuse_packed)
        self.path, self._groups, self.about = network.name, network.groups, network.about
        self.tensors, self.metadata = network.tensors, network.metadata

    @property
    def groups(self) -> Sequence[Sequence[str]]:
        return self._groups

    def blocks(self, name: str, size: int) -> Iterator[NDArray[np.uint8]]:
        """Read along the file into one buffer."""
        info = self.tensors[name]
        buffer = take_block(min(size, info.nbytes))
        with self._network.open(only=info) as reader:
            reader.seek(info)
            for position in range(0, info.nbytes, size):
                block = buffer[: min(size, info.nbytes - position)]
                if missing := fill(reader, block.data):
                    raise Truncated(f"{self.path}: tensor {name!r} ends {missing} bytes early")
                yield block
        give_block(buffer)

    def check_unchanged(self) -> None:
        self._network.check_unchanged()

    def close(self) -> None:
        self._network.close()


def _refuse_packed(header: Header, where: str) -> LevelFile | None:
    """What a level file says of itself; only a dense one is a checkpoint."""
    if KEY in header.metadata:
        raise AlreadyPacked(f"{where}: is an ELSA file already")
    level = parse_level(header, where)
    if level and level.layout != "dense":
        raise InvalidLayout(
            f"{where}: holds a level in layout {level.layout}",
            "make it dense first with {extract()}",
        )
    return level
