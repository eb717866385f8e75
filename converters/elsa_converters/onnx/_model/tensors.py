"""The content of an ONNX tensor, wherever it is: raw, typed, external, or cut out of its model."""

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from onnx import TensorProto

from elsa_converters._errors import InvalidExternalData, InvalidOnnx, UnsupportedOnnx
from elsa_converters.onnx._model.wire import OWN_FILE
from elsa_format import UnsafePath
from elsa_format.plugins import DTYPES, Dtype, TensorInfo

TO_ONNX: dict[str, int] = {
    "F32": TensorProto.FLOAT,
    "U8": TensorProto.UINT8,
    "I8": TensorProto.INT8,
    "U16": TensorProto.UINT16,
    "I16": TensorProto.INT16,
    "I32": TensorProto.INT32,
    "I64": TensorProto.INT64,
    "BOOL": TensorProto.BOOL,
    "F16": TensorProto.FLOAT16,
    "F64": TensorProto.DOUBLE,
    "U32": TensorProto.UINT32,
    "U64": TensorProto.UINT64,
    "C64": TensorProto.COMPLEX64,
    "BF16": TensorProto.BFLOAT16,
    "F8_E4M3": TensorProto.FLOAT8E4M3FN,
    "F8_E4M3FNUZ": TensorProto.FLOAT8E4M3FNUZ,
    "F8_E5M2": TensorProto.FLOAT8E5M2,
    "F8_E5M2FNUZ": TensorProto.FLOAT8E5M2FNUZ,
    "F8_E8M0": TensorProto.FLOAT8E8M0,
}
FROM_ONNX: dict[int, Dtype] = {code: DTYPES[name] for name, code in TO_ONNX.items()}


@dataclass(frozen=True)
class Region:
    """Bytes of a file."""

    path: Path
    offset: int
    length: int


@dataclass(frozen=True)
class Weight:
    """A tensor of the model: what it looks like and where its bytes are."""

    info: TensorInfo
    source: bytes | Region | None = field(repr=False)
    """None in a template, whose values are in the ELSA file."""

    def blocks(self, size: int) -> Iterator[np.ndarray[Any, np.dtype[np.uint8]]]:
        """The bytes, `size` at a time; the array is reused."""
        if not isinstance(self.source, Region):
            content = np.frombuffer(self.source or b"", np.uint8)
            yield from (content[i : i + size] for i in range(0, len(content), size))
            return
        buffer = np.empty(min(size, self.source.length), np.uint8)
        left = self.source.length
        with open(self.source.path, "rb", buffering=0) as file:
            file.seek(self.source.offset)
            while left:
                block = buffer[: min(size, left)]
                read_into(file, block, self.source.path.name)
                yield block
                left -= len(block)

    def array(self) -> np.ndarray[Any, Any]:
        """The tensor in memory."""
        if isinstance(self.source, Region):
            content = np.empty(self.source.length, np.uint8)
            with open(self.source.path, "rb", buffering=0) as file:
                file.seek(self.source.offset)
                read_into(file, content, self.source.path.name)
        else:
            content = np.frombuffer(self.source or b"", np.uint8)
        assert self.info.dtype.numpy is not None
        return content.view(self.info.dtype.numpy).reshape(self.info.shape)


def read_into(file: Any, block: np.ndarray[Any, np.dtype[np.uint8]], where: str) -> None:
    """Fill the block from an unbuffered file, which may give less than it was asked for."""
    view = memoryview(block.data)
    while view:
        count = file.readinto(view)
        if not count:
            raise InvalidExternalData(f"{where}: {len(view)} bytes short; the file has shrunk")
        view = view[count:]


def info_of(tensor: TensorProto) -> TensorInfo:
    """Name, dtype and shape."""
    return TensorInfo(tensor.name, FROM_ONNX[tensor.data_type], tuple(tensor.dims))


def weight_of(tensor: TensorProto, model: Path) -> Weight:
    """Describe a tensor and check that all its bytes are there."""
    where = f"{model}: tensor {tensor.name!r}"
    info = info_of(tensor)
    dtype = info.dtype
    if tensor.data_location == TensorProto.EXTERNAL:
        return Weight(info, external_region(tensor, info.nbytes, model))
    content = typed_content(tensor, dtype)
    if len(content) != info.nbytes:
        raise InvalidOnnx(
            f"{where}: {len(content)} bytes of data, expected {info.nbytes} "
            f"for {dtype.name} {list(info.shape)}"
        )
    return Weight(info, content)


def element_count(tensor: TensorProto) -> int:
    """Number of elements that the shape declares."""
    return math.prod(tensor.dims)


def external_entries(tensor: TensorProto) -> dict[str, str]:
    """The key-value pairs that say where external data is."""
    return {entry.key: entry.value for entry in tensor.external_data}


def external_region(tensor: TensorProto, expected: int | None, model: Path) -> Region:
    """Where external data is, inside the model's directory and of the expected length."""
    where = f"{model}: tensor {tensor.name!r}"
    entries = external_entries(tensor)
    location = entries.get("location", "")
    path = model if location == OWN_FILE else _inside(model.parent, location, where)
    # Not exists: a named pipe is there, but would be waited for.
    if not os.path.isfile(path):
        raise InvalidExternalData(f"{where}: external data {location!r} is missing")
    available = path.stat().st_size
    offset = _number(entries, "offset", 0, where)
    rest = max(0, available - offset)
    length = _number(entries, "length", rest if expected is None else expected, where)
    if expected is not None and length != expected and location == OWN_FILE:
        raise InvalidOnnx(f"{where}: {length} bytes of data, expected {expected} for its shape")
    if length > rest or (expected is not None and length != expected):
        raise InvalidExternalData(
            f"{where}: external data {path.name!r} has {rest} bytes from {offset}, "
            f"{length} declared, expected {length if expected is None else expected}"
        )
    return Region(path, offset, length)


def _inside(folder: Path, location: str, where: str) -> Path:
    root = Path(os.path.realpath(folder))
    if not location or "\0" in location:
        raise InvalidExternalData(f"{where}: external data without a location")
    # Resolved on both sides, so a symbolic link out of the directory is refused as well; by
    # realpath, as resolve raises where links go in a circle.
    path = Path(os.path.realpath(root / location))
    if not path.is_relative_to(root) or Path(location).is_absolute():
        raise UnsafePath(f"{where}: external data {location!r} is outside the model's directory")
    return path


def _number(entries: dict[str, str], key: str, default: int, where: str) -> int:
    text = entries.get(key)
    if text is None:
        return default
    # isdecimal alone admits digits of other scripts, which other readers would refuse.
    if not (text.isascii() and text.isdecimal() and len(text) < 20):
        raise InvalidExternalData(f"{where}: external data {key} {text!r} is not a number")
    return int(text)


def typed_content(tensor: TensorProto, dtype: Dtype) -> bytes:
    """The bytes of raw_data, or of the typed field that onnx.proto3 gives the dtype."""
    if tensor.HasField("raw_data"):
        return tensor.raw_data
    if dtype.name in ("F32", "C64"):
        return np.array(tensor.float_data, "<f4").tobytes()
    if dtype.name == "F64":
        return np.array(tensor.double_data, "<f8").tobytes()
    if dtype.name == "I64":
        return np.array(tensor.int64_data, "<i8").tobytes()
    if dtype.name in ("U32", "U64"):
        return np.array(tensor.uint64_data, "<u8").astype(dtype.words).tobytes()
    # Everything narrower is kept in int32_data, 16-bit floats by their bit patterns.
    return np.array(tensor.int32_data, "<i4").astype(dtype.words).tobytes()


def header_of(info: TensorInfo) -> TensorProto:
    """An initializer without its data."""
    code = TO_ONNX.get(info.dtype.name)
    if code is None:
        raise UnsupportedOnnx(f"tensor {info.name!r}: ONNX has no dtype {info.dtype.name}")
    return TensorProto(name=info.name, data_type=code, dims=info.shape)


def point_to(tensor: TensorProto, location: str, offset: int, length: int) -> None:
    """Make a tensor's data external."""
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        tensor.external_data.add(key=key, value=str(value))
