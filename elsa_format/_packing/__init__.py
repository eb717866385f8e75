"""From a checkpoint to an ELSA file: what is read, which counter each weight gets, the packing.

Here is what can be packed: the interface of all kinds of checkpoint, the kinds, and opening one.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elsa_format._container import RESERVED, SNIFFED, Header, TensorInfo
from elsa_format._container.dtypes import of_array
from elsa_format._container.index import Index, is_index, is_url, shards_suffix
from elsa_format._counters import Words
from elsa_format._directory import weights_file
from elsa_format._errors import (
    AlreadyPacked,
    InvalidCheckpoint,
    InvalidIndex,
    InvalidLayout,
    MissingExtra,
    NoGraph,
    TensorMismatch,
)
from elsa_format._level_reader import LevelReader
from elsa_format._memory import BLOCK
from elsa_format._network import open_level
from elsa_format._network.level import LevelFile, parse_level
from elsa_format._profile import KEY
from elsa_format._storage import Closing
from elsa_format._storage.shards import read_index, shard_path

FilePath = str | os.PathLike[str]
GROUP = "elsa.checkpoints"


class Checkpoint(Closing, ABC):
    """Named tensors that are read block by block, as often as needed.

    >>> from elsa_format.plugins import DTYPES
    >>> class Ones(Checkpoint):
    ...     path, tensors = "<ones>", {"w": TensorInfo("w", DTYPES["F32"], (2, 3))}
    ...
    ...     def blocks(self, name: str, size: int) -> Iterator[NDArray[np.uint8]]:
    ...         yield np.ones(6, np.float32).view(np.uint8)
    >>> Ones().nestable("w"), Ones().groups
    (True, [['w']])

    A kind of file has a subclass that is called with the path. Other packages register theirs as
    entry points of the group `elsa.checkpoints`, under each suffix that such files have, and under
    the name of a library if it takes dictionaries of that library's arrays, too.
    """

    path: str
    """For messages."""
    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, str] = {}
    extra_metadata: Mapping[str, Any] = {}
    """What else an index says, where there is one."""

    @classmethod
    def matches(cls, path: str, first: bytes) -> bool:
        """Whether a file with a registered suffix is of this kind, by its first 64 bytes."""
        return True

    @abstractmethod
    def blocks(self, name: str, size: int) -> Iterator[NDArray[np.uint8]]:
        """The tensor's bytes, `size` a block but for the last; each may reuse the memory."""

    def nestable(self, name: str) -> bool:
        """Whether the tensor carries counters unless told otherwise."""
        info = self.tensors[name]
        return info.dtype.nestable and len(info.shape) >= 2

    @property
    def groups(self) -> Sequence[Sequence[str]]:
        """The tensors of each file, where there are several."""
        return [list(self.tensors)]

    def check_unchanged(self) -> None:
        """Raise InputChanged if a file was modified since it was opened, where that can be told."""

    def check_template(self, template: FilePath, packed: FilePath) -> None:
        """Refuse places that a template could not point to, before anything is packed."""
        raise NoGraph(f"{self.path}: has no graph to write a template of; ONNX has")

    def write_template(self, template: FilePath, packed: FilePath, *, force: bool = False) -> None:
        """Write the graph, its weights pointing into the packed file."""
        self.check_template(template, packed)

    def refuse_reserved(self) -> None:
        """Refuse tensors that have names of the format's own."""
        for name in self.tensors:
            if name.startswith(RESERVED) or name == "__metadata__":
                raise InvalidCheckpoint(f"{self.path}: tensor {name!r}: the name is reserved")


def same_tensor(
    one: TensorInfo, other: TensorInfo | None, where: str, *, dtype: bool = True
) -> None:
    """Raise TensorMismatch unless both have the same shape and, if asked, the same dtype."""
    if other is None:
        raise TensorMismatch(f"{where}: tensor {one.name!r} is missing")
    if other.shape != one.shape:
        raise TensorMismatch(
            f"{where}: tensor {one.name!r}: shape {list(other.shape)}, expected {list(one.shape)}"
        )
    if dtype and other.dtype != one.dtype:
        raise TensorMismatch(
            f"{where}: tensor {one.name!r}: dtype {other.dtype.name}, expected {one.dtype.name}"
        )


def word_blocks(checkpoint: Checkpoint, info: TensorInfo, size: int = BLOCK) -> Iterator[Words]:
    """The bit patterns of a tensor's weights, block by block."""
    for block in checkpoint.blocks(info.name, size):
        yield block.view(info.dtype.words)


# --- Kinds ---------------------------------------------------------------------------------------


class ArrayCheckpoint(Checkpoint):
    """Arrays in memory."""

    def __init__(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        self.path = "<arrays>"
        self._arrays = {name: np.asarray(array) for name, array in arrays.items()}
        self.tensors = {
            name: TensorInfo(name, of_array(array.dtype), array.shape)
            for name, array in self._arrays.items()
        }
        self.refuse_reserved()

    def blocks(self, name: str, size: int) -> Iterator[NDArray[np.uint8]]:
        """Slices of the array."""
        return array_blocks(self._arrays[name], size)


def array_blocks(array: NDArray[Any], size: int) -> Iterator[NDArray[np.uint8]]:
    """The bytes of an array in the order of its elements, `size` at a time."""
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    for start in range(0, flat.size, size):
        yield flat[start : start + size]


class SafetensorsCheckpoint(Checkpoint):
    """A plain safetensors file, or the shards that an index names."""

    def __init__(self, source: str | os.PathLike[str]) -> None:
        self._network = network = open_level(source, _refuse_packed)
        self.path, self.extra_metadata = network.name, network.extra_metadata
        self.tensors, self.metadata = network.tensors, network.metadata

    @property
    def groups(self) -> Sequence[Sequence[str]]:
        return self._network.groups

    def blocks(self, name: str, size: int) -> Iterator[NDArray[np.uint8]]:
        info = self.tensors[name]
        with LevelReader(self._network, only=info, verify=False, block=size) as reader:
            yield from reader.blocks(info)

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


class ShardedCheckpoint(Checkpoint):
    """The files that an index names, each a checkpoint by itself."""

    def __init__(self, index: Path, open_shard: Callable[[Path], Checkpoint | None]) -> None:
        found, self.path = read_index(index)
        self.extra_metadata = found.extra_metadata
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


# --- Opening -------------------------------------------------------------------------------------

CheckpointLike = FilePath | Mapping[str, NDArray[Any]] | Checkpoint


def open_checkpoint(source: CheckpointLike) -> Checkpoint:
    """The checkpoint behind a path, in a model directory, a dictionary of arrays, or itself."""
    if isinstance(source, Checkpoint):
        return source
    if isinstance(source, Mapping):
        return _of_arrays(source)
    if not isinstance(source, str | os.PathLike):
        raise TypeError(f"{source!r}, expected a path, a URL, named arrays or a Checkpoint")
    file: FilePath = weights_file(source, torch=True)
    if is_url(file) or (is_index(file) and shards_suffix(file) in ("", "safetensors")):
        return SafetensorsCheckpoint(file)
    path = Path(file)
    if is_index(path):
        return ShardedCheckpoint(path, lambda shard: _of_file(shard, shards_suffix(path)))
    suffix = path.suffix.lower().lstrip(".")
    if suffix == "npz":
        from elsa_format._packing.npz import NpzCheckpoint  # a kind like those of plug-ins

        return NpzCheckpoint(path)
    return _of_file(path, suffix) or SafetensorsCheckpoint(path)


def _of_arrays(source: Mapping[str, Any]) -> Checkpoint:
    """Arrays in memory; those of a library with a plug-in, such as PyTorch, are its to read."""
    libraries = {type(value).__module__.partition(".")[0] for value in source.values()}
    for library in sorted(libraries - {"builtins", "numpy"}):
        for kind in plugged_in(GROUP, library, f"reading arrays of {library}"):
            checkpoint: Checkpoint = kind(source)
            return checkpoint
    return ArrayCheckpoint(source)


def _of_file(path: Path, suffix: str) -> Checkpoint | None:
    """The file as a checkpoint of a kind that another package reads."""
    for kind in plugged_in(GROUP, suffix, f"{path}: reading .{suffix}"):
        with open(path, "rb") as file:
            first = file.read(SNIFFED)
        if kind.matches(os.fspath(path), first):
            checkpoint: Checkpoint = kind(path)
            return checkpoint
    return None


def plugged_in(group: str, name: str, what: str) -> Iterator[Any]:
    """What other packages have for a suffix or a library: kinds of checkpoint, calibrations.

    An entry point can state the extra that brings what it needs; else that has the same name.
    """
    from importlib.metadata import entry_points  # only here, as it takes long to import

    for entry in entry_points(group=group, name=name):
        try:
            yield entry.load()
        except ImportError as error:
            extra = (entry.extras or [name])[0]
            package = {} if entry.dist is None else {"package": entry.dist.name}
            raise MissingExtra.of(error, what, extra, **package) from None
