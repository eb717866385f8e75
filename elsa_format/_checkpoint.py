"""Checkpoints that can be packed: safetensors, shard indexes, npz, arrays, and plug-ins.

Other kinds of file come through the entry-point group `elsa.checkpoints`, keyed by suffix, so that
this package need not import what reads them.
"""

import contextlib
import errno
import math
import os
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from elsa_format._dtypes import of_array
from elsa_format._errors import (
    AlreadyPacked,
    ElsaError,
    InvalidCheckpoint,
    InvalidLayout,
    MissingExtra,
    TensorMismatch,
    Truncated,
)
from elsa_format._header import Header, TensorInfo
from elsa_format._index import is_index
from elsa_format._json import MAX_OFFSET
from elsa_format._level_document import KEY as LEVEL_KEY
from elsa_format._level_document import LevelFile
from elsa_format._level_document import parse as parse_level
from elsa_format._memory import give_block, take_block
from elsa_format._open import open_level
from elsa_format._profile import KEY, RESERVED
from elsa_format._storage import fill, is_url


@runtime_checkable
class Checkpoint(Protocol):
    """Named tensors that are read block by block, as often as needed."""

    path: str
    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, str]

    def blocks(self, name: str, size: int) -> Iterator[NDArray[np.uint8]]:
        """The tensor's bytes, `size` a block but for the last; each may reuse the memory."""
        ...

    def nestable(self, name: str) -> bool:
        """Whether the tensor carries counters unless told otherwise."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class GraphCheckpoint(Checkpoint, Protocol):
    """A checkpoint that also holds the graph, such as an ONNX model."""

    def check_template(
        self, template: str | os.PathLike[str], packed: str | os.PathLike[str]
    ) -> None:
        """Refuse places that a template could not point to, before anything is packed."""
        ...

    def write_template(
        self,
        template: str | os.PathLike[str],
        packed: str | os.PathLike[str],
        *,
        force: bool = False,
    ) -> None:
        """Write the graph, its weights pointing into the packed file."""
        ...


CheckpointLike = str | os.PathLike[str] | Mapping[str, NDArray[Any]] | Checkpoint


def open_checkpoint(source: CheckpointLike) -> Checkpoint:
    """The checkpoint behind a path, a dictionary of arrays, or itself."""
    if isinstance(source, Mapping):
        return ArrayCheckpoint(source)
    if not isinstance(source, str | os.PathLike):
        return source
    if is_index(source) or is_url(source):
        return SafetensorsCheckpoint(source)
    path = Path(source)
    suffix = path.suffix.lower().lstrip(".")
    if suffix == "npz":
        return NpzCheckpoint(path)
    from importlib.metadata import entry_points  # only here, as it takes long to import

    for entry in entry_points(group="elsa.checkpoints", name=suffix):
        try:
            plugin = entry.load()
        except ImportError as error:
            raise MissingExtra.of(error, f"{path}: reading .{suffix}", suffix) from None
        opened: Checkpoint = plugin(path)
        return opened
    return SafetensorsCheckpoint(path)


class _Base:
    """What the kinds of checkpoint share."""

    path: str
    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, str]

    def nestable(self, name: str) -> bool:
        info = self.tensors[name]
        return info.dtype.nestable and len(info.shape) >= 2

    def close(self) -> None:
        """Nothing is held open."""

    def _refuse_reserved(self) -> None:
        for name in self.tensors:
            if name.startswith(RESERVED) or name == "__metadata__":
                raise InvalidCheckpoint(f"{self.path}: tensor {name!r}: the name is reserved")


class SafetensorsCheckpoint(_Base):
    """A plain safetensors file, or the shards that an index names."""

    def __init__(self, source: str | os.PathLike[str]) -> None:
        network = open_level(source, _refuse_packed)
        self._storage, self._header = network.storage, network.header
        self.path, self.groups = network.name, network.groups
        try:
            self.tensors = self._header.tensors
            own = (KEY, LEVEL_KEY)
            self.metadata = {k: v for k, v in self._header.metadata.items() if k not in own}
            self._refuse_reserved()
        except BaseException:
            self._storage.close()
            raise

    def blocks(self, name: str, size: int) -> Iterator[NDArray[np.uint8]]:
        """Read along the file into one buffer."""
        info = self.tensors[name]
        start = self._header.data_start + info.start
        buffer = take_block(min(size, info.nbytes))
        with contextlib.closing(self._storage.reader(start, start + info.nbytes)) as reader:
            for position in range(0, info.nbytes, size):
                block = buffer[: min(size, info.nbytes - position)]
                if missing := fill(reader, block.data):
                    raise Truncated(f"{self.path}: tensor {name!r} ends {missing} bytes early")
                yield block
        give_block(buffer)

    def check_unchanged(self) -> None:
        """Raise InputChanged if a file was modified since it was opened."""
        self._storage.check_unchanged()

    def close(self) -> None:
        """Close the files."""
        self._storage.close()


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


class NpzCheckpoint(_Base):
    """A numpy archive, compressed or not."""

    def __init__(self, path: Path) -> None:
        self.path = os.fspath(path)
        self.metadata = {}
        self._fortran: set[str] = set()
        self._members: dict[str, str] = {}
        with _refuse_damage(self.path):
            self._zip = zipfile.ZipFile(path)
        try:
            members = [self._info(member) for member in self._zip.namelist()]
            self.tensors = {info.name: info for info in members}
            self._refuse_reserved()
        except BaseException:
            self.close()
            raise

    def _info(self, member: str) -> TensorInfo:
        name = member.removesuffix(".npy")
        if name in self._members:
            raise InvalidCheckpoint(f"{self.path}: array {name!r} is there twice")
        self._members[name] = member
        with _refuse_damage(f"{self.path}: array {name!r}"):
            with self._zip.open(member) as file:
                shape, fortran, dtype = _read_npy_header(file)
            if dtype.byteorder == ">":
                raise TypeError("big-endian arrays are not supported")
            if dtype.kind == "V":
                raise TypeError(f"dtype {dtype} is not a number's; save bfloat16 as safetensors")
            info = TensorInfo(name, of_array(dtype), shape)
        if fortran and len(shape) > 1:
            self._fortran.add(name)
        return info

    def blocks(self, name: str, size: int) -> Iterator[NDArray[np.uint8]]:
        """Decompress along the member; a Fortran-ordered array has to be loaded whole."""
        info = self.tensors[name]
        where = f"{self.path}: array {name!r}"
        with _refuse_damage(where), self._zip.open(self._members[name]) as file:
            _read_npy_header(file)
            if name in self._fortran:
                flat = np.frombuffer(file.read(info.nbytes), np.uint8)
                if flat.size < info.nbytes:
                    raise InvalidCheckpoint(f"{where} ends early")
                assert info.dtype.numpy is not None
                array = flat.view(info.dtype.numpy).reshape(info.shape, order="F")
                yield from _array_blocks(array, size)
                return
            left = info.nbytes
            while left:
                data = file.read(min(size, left))
                if len(data) < min(size, left):
                    raise InvalidCheckpoint(f"{where} ends early")
                left -= len(data)
                yield np.frombuffer(data, np.uint8)

    def close(self) -> None:
        """Close the archive."""
        self._zip.close()


@contextlib.contextmanager
def _refuse_damage(where: str) -> Iterator[None]:
    """Turn whatever zipfile, zlib and numpy raise on damaged archives into InvalidCheckpoint."""
    try:
        yield
    except (ElsaError, MemoryError):
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise  # a disk that cannot be read; EINVAL is a seek before the start
        reason = str(error) or type(error).__name__
        raise InvalidCheckpoint(f"{where}: {reason}") from None


def _read_npy_header(file: Any) -> tuple[tuple[int, ...], bool, "np.dtype[Any]"]:
    version = np.lib.format.read_magic(file)
    read = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }.get(version)
    if read is None:
        raise ValueError(f"npy version {version} is not supported")
    shape, fortran, dtype = read(file)
    if dtype.hasobject:
        raise ValueError("arrays of Python objects are not weights")
    if any(n < 0 for n in shape) or math.prod(shape) * dtype.itemsize > MAX_OFFSET:
        raise ValueError(f"shape {shape} is impossible")
    return shape, fortran, dtype


class ArrayCheckpoint(_Base):
    """Arrays in memory."""

    def __init__(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        self.path = "<arrays>"
        self.metadata = {}
        self._arrays = {name: np.asarray(array) for name, array in arrays.items()}
        self.tensors = {
            name: TensorInfo(name, of_array(array.dtype), array.shape)
            for name, array in self._arrays.items()
        }
        self._refuse_reserved()

    def blocks(self, name: str, size: int) -> Iterator[NDArray[np.uint8]]:
        """Slices of the array."""
        return _array_blocks(self._arrays[name], size)


def _array_blocks(array: NDArray[Any], size: int) -> Iterator[NDArray[np.uint8]]:
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    for start in range(0, flat.size, size):
        yield flat[start : start + size]


def check_unchanged(checkpoint: Checkpoint) -> None:
    """Raise InputChanged if that can be told, and a file was modified since it was opened."""
    if isinstance(checkpoint, SafetensorsCheckpoint):
        checkpoint.check_unchanged()


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


__all__ = ["Checkpoint", "CheckpointLike", "open_checkpoint"]
