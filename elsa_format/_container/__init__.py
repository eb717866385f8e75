"""The container of safetensors, read strictly (spec §3): from bytes to a checked header.

A file that is something else is named: what it is, and what to do about it.
"""

import math
import re
from codecs import getincrementaldecoder
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from elsa_format._container.dtypes import DTYPES, Dtype
from elsa_format._container.json import MAX_OFFSET, dump, parse_header, quote
from elsa_format._errors import (
    HeaderTooLarge,
    InvalidHeader,
    InvalidJson,
    InvalidOffsets,
    TrailingData,
    Truncated,
    UnknownDtype,
    UnsupportedFeature,
)
from elsa_format._options import Limit

LENGTH_BYTES = 8
MAX_HEADER = 100_000_000
ALIGNMENT = 256
RESERVED = "__elsa__."
"""How names begin that only the format itself gives."""
DOCUMENTS = ("elsa", "elsa_level", "elsa_delivery")
"""Entries of the metadata that say what kind of file it is: an ELSA, level or delivery file."""
DELIVERED = "__elsa__.delivery"
"""The only tensor of a delivery file."""
Kind = Literal["elsa", "level", "delivery"]


class Readable(Protocol):
    """All that is asked of a source: a pipe, a socket or a file."""

    def read(self, size: int, /) -> bytes | None: ...


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor is stored and what it looks like.

    >>> info = TensorInfo("layer", DTYPES["F32"], (100, 100), start=400)
    >>> info.elements, info.nbytes, info.stop
    (10000, 40000, 40400)
    """

    name: str
    dtype: Dtype
    shape: tuple[int, ...]
    start: int = 0
    """First byte, counted from the start of the data section."""
    elements: int = field(init=False, repr=False, compare=False)
    """Number of elements."""
    nbytes: int = field(init=False, repr=False, compare=False)
    """Number of stored bytes."""

    def __post_init__(self) -> None:
        # Once: they are asked for again and again, and files may have 100,000 tensors.
        elements = math.prod(self.shape)
        object.__setattr__(self, "elements", elements)
        object.__setattr__(self, "nbytes", elements * self.dtype.size // 8)

    @property
    def stop(self) -> int:
        """One past the last byte."""
        return self.start + self.nbytes


@dataclass(frozen=True)
class Header:
    """A parsed header: tensors in the order of their bytes."""

    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    raw: bytes
    """The N header bytes as stored, padding included."""

    @property
    def data_start(self) -> int:
        """Position of the data section in the file."""
        return LENGTH_BYTES + len(self.raw)

    @property
    def data_size(self) -> int:
        """Bytes of the data section."""
        return sum(info.nbytes for info in self.tensors.values())

    @property
    def kind(self) -> Kind:
        """What the file is to be read as.

        An ELSA file may have any metadata, but not a delivery file's tensor; what has neither its
        own document nor that tensor is a broken delivery file.
        """
        elsa, level, delivery = (key in self.metadata for key in DOCUMENTS)
        if delivery and (DELIVERED in self.tensors or not elsa):
            return "delivery"
        return "level" if level and not elsa else "elsa"


@dataclass(frozen=True)
class VirtualHeader(Header):
    """A header that no file has, of tensors that are read as if one had."""

    headers_size: int = field(default=0, kw_only=True)

    @property
    def data_start(self) -> int:
        """Where the data would start: behind all headers that there are."""
        return self.headers_size


def read_exactly(source: Readable, size: int) -> bytes:
    """Up to `size` bytes, fewer only at the end of the source; short reads are joined."""
    parts = []
    while size:
        part = source.read(min(size, 1 << 20))
        if not part:
            break
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def read_header(source: Readable, where: str, limit: Limit | None = None) -> Header:
    """Read and check the header; the source is left at the first byte of data."""
    prefix = read_exactly(source, LENGTH_BYTES)
    if len(prefix) < LENGTH_BYTES:
        found = f"{len(prefix)} bytes" if prefix else "is empty"
        raise Truncated(f"{where}: {found}, expected a header length of 8 bytes")
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER:
        problem = other_format(prefix + read_exactly(source, SNIFFED - LENGTH_BYTES))
        expected = f"header of {length} bytes, expected at most {MAX_HEADER}"
        raise HeaderTooLarge(f"{where}: {problem or expected}")
    if limit is not None:
        limit.header(length, where)
    raw = read_exactly(source, length)
    if len(raw) < length:
        raise Truncated(f"{where}: header of {length} bytes ends after {len(raw)}")
    return parse(raw, where)


def check_size(header: Header, size: int | None, where: str) -> None:
    """Compare a known file size with what the header declares."""
    expected = header.data_start + header.data_size
    if size is not None and size < expected:
        raise Truncated(f"{where}: {size} bytes, expected {expected}")
    if size is not None and size > expected:
        raise TrailingData(f"{where}: {size} bytes, expected {expected}")


def parse(raw: bytes, where: str) -> Header:
    """Check a header's bytes against spec §3 and give its tensors in data order."""
    document = parse_header(raw, where)
    metadata = document.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise InvalidHeader(f"{where}: __metadata__ is not an object of strings")
    entries = [_entry(name, entry, where) for name, entry in document.items()]
    for info, _, _ in entries:
        _check_size(info, where)
    entries.sort(key=lambda entry: entry[1:])
    position = 0
    for info, start, stop in entries:
        if start != position or stop - start != info.nbytes:
            raise InvalidOffsets(
                f"{where}: tensor {info.name!r}: data_offsets [{start}, {stop}], "
                f"expected [{position}, {position + info.nbytes}]"
            )
        position = stop
    return Header({info.name: info for info, _, _ in entries}, metadata, raw)


def _entry(name: str, entry: Any, where: str) -> tuple[TensorInfo, int, int]:
    where = f"{where}: tensor {name!r}"
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise InvalidHeader(f"{where}: expected exactly dtype, shape and data_offsets")
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not isinstance(entry["dtype"], str):
        raise InvalidHeader(f"{where}: dtype is not a string")
    if not isinstance(shape, list) or not all(type(n) is int for n in shape):
        raise InvalidHeader(f"{where}: shape is not a list of integers")
    if not isinstance(offsets, list) or [type(n) for n in offsets] != [int, int]:
        raise InvalidHeader(f"{where}: data_offsets is not a pair of integers")
    dtype = DTYPES.get(entry["dtype"])
    if dtype is None:
        raise UnknownDtype(f"{where}: unknown dtype {entry['dtype']!r}")
    return TensorInfo(name, dtype, tuple(shape), offsets[0]), offsets[0], offsets[1]


def _check_size(info: TensorInfo, where: str) -> None:
    where = f"{where}: tensor {info.name!r}"
    # A zero dimension must not hide an overflow from parsers that multiply left to right.
    if math.prod(n for n in info.shape if n) * info.dtype.size > MAX_OFFSET:
        raise InvalidOffsets(f"{where}: shape {list(info.shape)} overflows")
    if info.elements * info.dtype.size % 8:
        raise InvalidOffsets(
            f"{where}: {info.elements} elements of {info.dtype.name} end inside a byte"
        )


def lay_out(tensors: Iterable[TensorInfo], first: Iterable[str] = ()) -> dict[str, TensorInfo]:
    """Give every tensor its place: those named `first`, then the rest, widest elements first.

    Falling widths keep each tensor aligned without padding, which safetensors forbids.
    """
    leading = set(first)
    return place(sorted(tensors, key=lambda info: (info.name not in leading, -info.dtype.size)))


def place(tensors: Iterable[TensorInfo]) -> dict[str, TensorInfo]:
    """Give every tensor its place, in the given order."""
    placed, position = {}, 0
    for info in tensors:
        placed[info.name] = TensorInfo(info.name, info.dtype, info.shape, position)
        position += info.nbytes
    return placed


def serialize(
    tensors: Mapping[str, TensorInfo], metadata: Mapping[str, str], *, reserve: int = 0
) -> bytes:
    """Header bytes, length prefix included, padded so that the data starts at a multiple of 256."""
    entries = [f'"__metadata__":{dump(dict(sorted(metadata.items())))}'] if metadata else []
    for info in tensors.values():
        shape = ",".join(map(str, info.shape))
        entries.append(
            f'{quote(info.name)}:{{"dtype":"{info.dtype.name}","shape":[{shape}],'
            f'"data_offsets":[{info.start},{info.stop}]}}'
        )
    try:
        body = f"{{{','.join(entries)}}}".encode()
    except UnicodeEncodeError as error:
        part = error.object[max(error.start - 20, 0) : error.end + 20]
        raise InvalidJson(f"header: half of a surrogate pair in {part!r}") from None
    end = max(reserve, LENGTH_BYTES + len(body))
    end += -end % ALIGNMENT
    if end - LENGTH_BYTES > MAX_HEADER:
        raise HeaderTooLarge(f"header of {end} bytes, expected at most {MAX_HEADER}")
    return (end - LENGTH_BYTES).to_bytes(LENGTH_BYTES, "little") + body.ljust(end - LENGTH_BYTES)


def as_array(flat: NDArray[np.uint8], info: TensorInfo, where: str) -> NDArray[Any]:
    """Bytes as an array of the tensor's dtype and shape."""
    if info.dtype.numpy is None:
        raise UnknownDtype(f"{where}: tensor {info.name!r}: numpy has no dtype {info.dtype.name}")
    try:
        return flat.view(info.dtype.numpy).reshape(info.shape)
    except ValueError:
        raise UnsupportedFeature(
            f"{where}: tensor {info.name!r}: numpy has no arrays of {len(info.shape)} dimensions"
        ) from None


def check_out(out: NDArray[Any], dtype: Any, shape: tuple[int, ...], what: str = "") -> None:
    """Refuse memory that a result cannot be written to as it is."""
    if (out.shape, out.dtype) != (shape, dtype):
        raise ValueError(
            f"out of {out.dtype} {list(out.shape)}{what}, expected {dtype} {list(shape)}"
        )
    if not out.flags.c_contiguous or not out.flags.writeable:
        raise ValueError(f"out{what}: expected contiguous, writable memory")


# --- Files of other formats ----------------------------------------------------------------------

SNIFFED = 64
"""Bytes that tell one kind from another."""

_KINDS = [
    (rb"PK\x03\x04.{26}[^/]*/data\.pkl", "a PyTorch checkpoint", "{torch}"),
    (rb"PK\x03\x04.{26}.*\.npy", "a numpy archive", "elsa-pack reads it if its name ends in .npz"),
    (rb"PK\x03\x04", "a zip archive", "if torch.save wrote it, {torch}"),
    (rb"\x80[\x02-\x05]", "a Python pickle", "if torch.save wrote it, {torch}"),
    (rb"\x89HDF\r\n", "an HDF5 file", "save the weights as safetensors or .npz"),
    (rb"GGUF", "a GGUF file", "pack the checkpoint it was made from"),
    (rb"\x93NUMPY", "a single numpy array", "save named arrays with numpy.savez"),
    (rb"....TFL3", "a TensorFlow Lite model", "pack the checkpoint it was made from"),
    (
        rb"\x08[\x01-\x1f][\x12\x1a\x22\x28\x32\x3a\x42]",
        "an ONNX model",
        "elsa-pack reads it if its name ends in .onnx",
    ),
    (rb"\x1f\x8b", "compressed with gzip", "decompress it"),
    (rb"\x28\xb5\x2f\xfd", "compressed with zstd", "decompress it"),
    (rb"version https://git-lfs", "a git-lfs pointer, not the file itself", "run git lfs pull"),
    (rb"\s*(?i:<!doctype|<html)", "a web page", "take the link of the file itself"),
    (rb"\s*<\?xml", "an XML document", "if a server sent it, it holds the server's error"),
    (rb"\s*[{\[]", "JSON", "if it is a shard index, its name must end in .index.json"),
]
_TORCH = "elsa-pack reads it if its name ends in .pt or .bin"


def other_format(first: bytes, expected: str = "safetensors") -> str | None:
    """What a file is that starts with these bytes, if it is a known kind other than expected.

    Args:
        first: The first bytes of the file, at most `SNIFFED`.
        expected: What the file should be, as it is called here: "safetensors", "an ONNX model".

    >>> other_format(b"GGUF" + bytes(60))
    'is a GGUF file; pack the checkpoint it was made from'
    """
    for pattern, kind, advice in _KINDS:
        if re.match(pattern, first, re.DOTALL):
            return None if kind == expected else f"is {kind}; {advice.format(torch=_TORCH)}"
    if _is_text(first):
        return f"is a text file, not {expected}; name a file of weights"
    return None


def _is_text(first: bytes) -> bool:
    """Whether bytes are the beginning of a text, of which the last character may be cut."""
    try:
        text = getincrementaldecoder("utf-8")().decode(first)
    except UnicodeDecodeError:
        return False
    return bool(text) and all(c.isprintable() or c in "\t\n\f\r" for c in text)
