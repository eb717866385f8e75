"""The delivery document: which bytes of a delivery file are which part (delivery-1.0 §3)."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import xxhash

from elsa_format._container import (
    DELIVERED,
    LENGTH_BYTES,
    MAX_HEADER,
    Header,
    TensorInfo,
    serialize,
)
from elsa_format._container.dtypes import DTYPES
from elsa_format._container.json import check_version, dump, parse_document
from elsa_format._errors import ChecksumMismatch, InvalidDelivery, NotElsa, TrailingData
from elsa_format._profile import ZEROS, header_checksum

KEY = "elsa_delivery"
VERSION = "1.0"
BLOCK = 17
"""log₂ of the words in a block, as a Writer has it."""
BLOCKS = range(6, 21)
SUFFIX = ".ship.safetensors"
MOST_PARTS = 257
"""The head, those of 255 levels, the dense part."""

_CHECKSUM = re.compile(r"xxh3:[0-9a-f]{16}")


@dataclass(frozen=True)
class Document:
    """A checked delivery document."""

    block: int
    parts: tuple[int, ...]
    """Bytes of the head, of parts 1…T and of the dense part."""
    source: int
    """Bytes of the source before its data section."""
    head: str
    """Checksum of the head's bytes."""
    start: int
    """Where the head starts in the file."""

    @property
    def levels(self) -> int:
        """T, which the source's profile has to confirm."""
        return len(self.parts) - 2

    @property
    def ends(self) -> list[int]:
        """Where the header, the head and the parts end in the file."""
        return list(accumulate(self.parts, initial=self.start))

    def check_end(self, size: int | None, where: str) -> None:
        """Refuse a file that is longer than its parts (ELSA-D-041)."""
        if size is not None and size > self.ends[-1]:
            raise TrailingData(f"{where}: more than the {self.ends[-1]} bytes of its parts")

    def parts_in(self, length: int) -> int:
        """How many of parts 1…T and the dense part are complete in the first `length` bytes."""
        return sum(end <= length for end in self.ends[2:])


def parse(header: Header, where: str) -> Document:
    """The document in a header, checked in the order of delivery-1.0 §10."""
    text = header.metadata.get(KEY)
    if text is None:
        raise NotElsa(f"{where}: is not a delivery file", "{ship()} makes one of an ELSA file")
    where = f"{where}: delivery document"
    document = parse_document(text, where)
    check_version(document, where, InvalidDelivery)
    stated = _checksum(document, "header", where)
    if (found := header_checksum(header.raw, stated)) != stated:
        raise ChecksumMismatch(f"{where}: header has checksum {found}, expected {stated}")
    head = _checksum(document, "head", where)
    block = _integer(document, "block", BLOCKS.start, BLOCKS.stop - 1, where)
    source = _integer(document, "source", LENGTH_BYTES + 2, LENGTH_BYTES + MAX_HEADER, where)
    parts = document.get("parts")
    if (
        not isinstance(parts, list)
        or not 3 <= len(parts) <= MOST_PARTS
        or not all(type(size) is int and size >= 0 for size in parts)
    ):
        raise InvalidDelivery(f"{where}: parts are not 3..{MOST_PARTS} numbers of bytes")
    _check_tensor(header.tensors, sum(parts), where)
    return Document(block, tuple(parts), source, head, header.data_start)


def _checksum(document: Mapping[str, Any], field: str, where: str) -> str:
    value = document.get(field)
    if not isinstance(value, str) or not _CHECKSUM.fullmatch(value):
        raise InvalidDelivery(f"{where}: {field} is {value!r}, expected xxh3: and 16 hex digits")
    return value


def _integer(document: Mapping[str, Any], field: str, low: int, high: int, where: str) -> int:
    value = document.get(field)
    if type(value) is not int or not low <= value <= high:
        raise InvalidDelivery(f"{where}: {field} is {value!r}, expected {low}..{high}")
    return value


def _check_tensor(tensors: Mapping[str, TensorInfo], size: int, where: str) -> None:
    info = tensors.get(DELIVERED)
    if len(tensors) != 1 or info is None or info.dtype.name != "U8" or len(info.shape) != 1:
        raise InvalidDelivery(f"{where}: the file does not hold one tensor {DELIVERED!r} of bytes")
    if info.nbytes != size:
        raise InvalidDelivery(f"{where}: parts of {size} bytes in a tensor of {info.nbytes}")


def header_bytes(block: int, parts: Sequence[int], source: int, head: str) -> bytes:
    """The header of a new delivery file (ELSA-D-010)."""

    def written(checksum: str) -> bytes:
        document = {"block": block, "head": head, "header": f"xxh3:{checksum}"}
        document |= {"parts": list(parts), "source": source, "version": VERSION}
        info = TensorInfo(DELIVERED, DTYPES["U8"], (sum(parts),))
        return serialize({DELIVERED: info}, {KEY: dump(document)})

    return written(xxhash.xxh3_64_hexdigest(written(ZEROS)[LENGTH_BYTES:]))
