"""A numpy archive as a checkpoint."""

import contextlib
import errno
import math
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elsa_format._container import SNIFFED, TensorInfo, other_format
from elsa_format._container.dtypes import of_array
from elsa_format._container.json import MAX_OFFSET
from elsa_format._errors import ElsaError, InvalidCheckpoint
from elsa_format._packing import Checkpoint, array_blocks


class NpzCheckpoint(Checkpoint):
    """A numpy archive, compressed or not."""

    def __init__(self, path: Path) -> None:
        self.path = os.fspath(path)
        self._fortran: set[str] = set()
        self._members: dict[str, str] = {}
        with _refuse_damage(self.path):
            try:
                self._zip = zipfile.ZipFile(path)
            except zipfile.BadZipFile as error:
                with open(path, "rb") as file:
                    first = file.read(SNIFFED)
                cut = first.startswith(b"PK")  # an archive, but not all of it
                problem = None if cut else other_format(first, "a numpy archive")
                raise InvalidCheckpoint(f"{self.path}: {problem or error}") from None
        try:
            members = [self._info(member) for member in self._zip.namelist()]
            self.tensors = {info.name: info for info in members}
            self.refuse_reserved()
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
                yield from array_blocks(array, size)
                return
            left = info.nbytes
            while left:
                data = file.read(min(size, left))
                if len(data) < min(size, left):
                    raise InvalidCheckpoint(f"{where} ends early")
                left -= len(data)
                yield np.frombuffer(data, np.uint8)

    def close(self) -> None:
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
