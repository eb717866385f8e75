"""ONNX files as protobuf on the wire: tensors are passed over when read, streamed when written.

The protobuf library holds a whole message in memory, twice while it parses. A model is mostly raw
tensor bytes, so those are cut out first (the tensor then refers to its place in the file, as if it
were external data) and what is left is small.
"""

import mmap
from collections.abc import Iterator

from elsa_converters._errors import InvalidOnnx

Buffer = mmap.mmap | bytes

OWN_FILE = "\0model"
"""The location of data that is inside the model file itself."""
LARGE = 1024
"""Bytes from which data is cut out; shapes and scalars stay, shape inference reads them."""

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_RAW_DATA, _EXTERNAL_DATA, _DATA_LOCATION = 9, 13, 14
_EXTERNAL = 1
# The fields of onnx.proto3 through which a tensor can be reached.
_CHILDREN: dict[str, dict[int, str]] = {
    "Model": {7: "Graph", 25: "Function"},
    "Graph": {1: "Node", 5: "Tensor"},
    "Function": {7: "Node"},
    "Node": {5: "Attribute"},
    "Attribute": {5: "Tensor", 6: "Graph", 10: "Tensor", 11: "Graph"},
}
_MAX_DEPTH = 100


def varint(value: int) -> bytes:
    """A number in base 128, lowest digits first."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def bytes_header(field: int, length: int) -> bytes:
    """What stands before `length` bytes of a string, bytes or message field."""
    return varint(field << 3 | _BYTES) + varint(length)


def without_large_data(buffer: Buffer, where: str) -> bytes:
    """The serialized model with the large raw data of every tensor cut out."""
    return _Cutter(buffer, where).message("Model", 0, len(buffer), 0)


class _Cutter:
    def __init__(self, buffer: Buffer, where: str) -> None:
        self.buffer = buffer
        self.where = where

    def message(self, kind: str, start: int, end: int, depth: int) -> bytes:
        if depth > _MAX_DEPTH:
            raise InvalidOnnx(f"{self.where}: graphs nested deeper than {_MAX_DEPTH}")
        if end - start < LARGE:
            return self.buffer[start:end]
        if kind == "Tensor":
            return self.tensor(start, end)
        children = _CHILDREN[kind]
        parts, copied = [], start
        for number, wire, tag, value, stop in self.fields(start, end):
            child = children.get(number)
            if child is None or wire != _BYTES or stop - value < LARGE:
                continue
            parts.append(self.buffer[copied:tag])
            body = self.message(child, value, stop, depth + 1)
            parts += [bytes_header(number, len(body)), body]
            copied = stop
        parts.append(self.buffer[copied:end])
        return b"".join(parts)

    def tensor(self, start: int, end: int) -> bytes:
        fields = list(self.fields(start, end))
        raw = [field for field in fields if field[0] == _RAW_DATA]
        external = any(number in (_EXTERNAL_DATA, _DATA_LOCATION) for number, *_ in fields)
        if len(raw) != 1 or external or raw[0][1] != _BYTES or raw[0][4] - raw[0][3] < LARGE:
            return self.buffer[start:end]
        _, _, tag, value, stop = raw[0]
        entries = {"location": OWN_FILE, "offset": str(value), "length": str(stop - value)}
        return b"".join(
            [
                self.buffer[start:tag],
                self.buffer[stop:end],
                *(_entry(key, text) for key, text in entries.items()),
                varint(_DATA_LOCATION << 3 | _VARINT) + varint(_EXTERNAL),
            ]
        )

    def fields(self, start: int, end: int) -> Iterator[tuple[int, int, int, int, int]]:
        """(field number, wire type, start of the tag, start and end of the value)"""
        position = start
        while position < end:
            tag, value = self.varint(position, end)
            wire = tag & 7
            if wire == _VARINT:
                stop = self.varint(value, end)[1]
            elif wire == _FIXED64:
                stop = value + 8
            elif wire == _FIXED32:
                stop = value + 4
            elif wire == _BYTES:
                length, value = self.varint(value, end)
                stop = value + length
            else:
                raise self.broken(position, f"wire type {wire}")
            if stop > end or tag >> 3 == 0:
                raise self.broken(position, f"field {tag >> 3} runs to {stop}, past {end}")
            yield tag >> 3, wire, position, value, stop
            position = stop

    def varint(self, position: int, end: int) -> tuple[int, int]:
        value = shift = 0
        while position < end and shift < 70:
            byte = self.buffer[position]
            value |= (byte & 0x7F) << shift
            position += 1
            if byte < 0x80:
                return value, position
            shift += 7
        raise self.broken(position, "unfinished number")

    def broken(self, position: int, what: str) -> InvalidOnnx:
        return InvalidOnnx(
            f"{self.where}: not an ONNX model, or truncated: {what} at byte {position}"
        )


def _entry(key: str, value: str) -> bytes:
    body = b"".join(
        bytes_header(field, len(text)) + text
        for field, text in ((1, key.encode()), (2, value.encode()))
    )
    return bytes_header(_EXTERNAL_DATA, len(body)) + body
