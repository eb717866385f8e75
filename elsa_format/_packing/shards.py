"""Shards of a kind that another package reads, such as PyTorch's, as one checkpoint."""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from elsa_format._container.header import TensorInfo
from elsa_format._container.index import Index
from elsa_format._errors import InvalidCheckpoint, InvalidIndex
from elsa_format._packing.checkpoint import Checkpoint
from elsa_format._storage.shards import read_index, shard_path


class ShardedCheckpoint(Checkpoint):
    """The files that an index names, each a checkpoint by itself."""

    def __init__(self, index: Path, open_shard: Callable[[Path], Checkpoint | None]) -> None:
        found, self.path = read_index(index)
        self.about = found.about
        self._shards: list[Checkpoint] = []
        self._of: dict[str, Checkpoint] = {}
        tensors: dict[str, TensorInfo] = {}
        metadata: dict[str, str] = {}
        try:
            for file in found.files:
                path = shard_path(index, file)
                if not os.path.isfile(path):
                    raise InvalidIndex(f"{self.path}: shard {file!r} does not exist")
                shard = open_shard(path)
                if shard is None:
                    raise InvalidCheckpoint(f"{path}: is not a file of the kind its name says")
                self._shards.append(shard)
                self._check(found, file, shard)
                tensors |= shard.tensors
                metadata = {**shard.metadata, **metadata}
                self._of |= dict.fromkeys(shard.tensors, shard)
        except BaseException:
            self.close()
            raise
        self.tensors, self.metadata = tensors, metadata

    def _check(self, index: Index, file: str, shard: Checkpoint) -> None:
        """Compare a shard with the index; other names of tied tensors are in the metadata."""
        listed = {name for name, where in index.weight_map.items() if where == file}
        for name in shard.tensors.keys() - listed:
            raise InvalidIndex(f"{self.path}: tensor {name!r} of {file!r} is not in the index")
        for name in listed - shard.tensors.keys() - shard.metadata.keys():
            raise InvalidIndex(f"{self.path}: tensor {name!r} is not in {file!r}")

    @property
    def groups(self) -> Sequence[Sequence[str]]:
        """The tensors of each file."""
        return [list(shard.tensors) for shard in self._shards]

    def blocks(self, name: str, size: int) -> Iterator[NDArray[np.uint8]]:
        """Those of the shard."""
        return self._of[name].blocks(name, size)

    def nestable(self, name: str) -> bool:
        """As the shard has it."""
        return self._of[name].nestable(name)

    def check_unchanged(self) -> None:
        """Ask every shard."""
        for shard in self._shards:
            shard.check_unchanged()

    def close(self) -> None:
        """Close every shard."""
        for shard in self._shards:
            shard.close()
