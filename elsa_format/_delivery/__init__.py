"""Delivery files: a network level by level, the sparsest in the first bytes (spec/delivery-1.0.md).

Here are the document, which says which bytes are which part, and what there is of a file by it: two
headers and the parts that are complete. `sequences` says which words are where, `payloads` reads a
part, `codec` words from its bytes (`streams` and `pure` where the C module is missing), `blocks`
gives those that follow one another. `encoder` makes the parts, `copy` brings their beginnings.
"""

import re
import sys
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import xxhash

from elsa_format import _profile
from elsa_format._container import (
    DELIVERED,
    LENGTH_BYTES,
    MAX_HEADER,
    Header,
    TensorInfo,
    serialize,
)
from elsa_format._container import parse as parse_header
from elsa_format._container.dtypes import DTYPES
from elsa_format._container.json import check_version, dump, parse_document
from elsa_format._delivery.parts import BlockPlan, Payloads, read_at
from elsa_format._errors import (
    ChecksumMismatch,
    Incomplete,
    InvalidDelivery,
    NotElsa,
    TrailingData,
)
from elsa_format._options import Limit
from elsa_format._profile import LevelNumber, Profile, header_checksum, signed
from elsa_format._storage import PositionedStorage
from elsa_format._storage.local import SpooledStorage

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

    return signed(written)


# --- What there is of a file ---------------------------------------------------------------------


class Prefix:
    """A delivery file, or its first bytes; what has been checked is of lines 1 to 8 of §10."""

    def __init__(self, storage: PositionedStorage, header: Header, limit: Limit) -> None:
        self.storage, self.name = storage, storage.name
        self.document = parse(header, self.name)
        ends = self.document.ends
        self.document.check_end(storage.size, self.name)
        if (found := self._length(ends[1])) < ends[1]:
            raise Incomplete(f"{self.name}: {found} bytes, its head ends at {ends[1]}")
        limit.header(self.document.source, self.name)
        self.head = self._read_head(ends[0], ends[1])
        """The source's first bytes: header length and header."""
        self.header: Header = parse_header(self.head[LENGTH_BYTES:], self.name)
        limit.tensors(self.header.data_size, self.name)
        self.profile: Profile = _profile.parse(self.header, self.name)
        self.levels = len(self.profile.levels)
        if self.levels != self.document.levels:
            raise InvalidDelivery(
                f"{self.name}: parts of {self.document.levels} levels, the source has {self.levels}"
            )
        self.plan = BlockPlan(self.header, self.profile, self.document.block)
        self._seed = xxhash.xxh3_64_intdigest(self.head)
        self._payloads: dict[int, Payloads] = {}

    def _length(self, wanted: int) -> int:
        """How many of the first `wanted` bytes there are, in one request if they come from afar."""
        if isinstance(self.storage, SpooledStorage):
            return self.storage.keep(wanted)
        assert self.storage.size is not None
        return min(wanted, self.storage.size)

    def _read_head(self, start: int, stop: int) -> bytes:
        data = bytearray(stop - start)
        read_at(self.storage, start, memoryview(data))
        if (found := f"xxh3:{xxhash.xxh3_64_hexdigest(data)}") != self.document.head:
            raise ChecksumMismatch(
                f"{self.name}: head has checksum {found}, expected {self.document.head}"
            )
        size, stream = self.document.source, zlib.decompressobj()
        try:
            head = stream.decompress(data, size + 1)  # one more than allowed is enough to know
        except zlib.error as error:
            raise InvalidDelivery(f"{self.name}: head: {error}") from None
        if len(head) != size or not stream.eof or stream.unused_data:
            raise InvalidDelivery(f"{self.name}: head is not a zlib stream of {size} bytes")
        if int.from_bytes(head[:LENGTH_BYTES], "little") != size - LENGTH_BYTES:
            raise InvalidDelivery(f"{self.name}: the head has another length than {size}")
        return head

    @property
    def parts(self) -> int:
        """How many of parts 1…T and the dense part are complete: the levels there, at most T.

        Where nobody says how long the file is, all of it has to be read to know.
        """
        size = self.storage.size
        return self.document.parts_in(self._length(sys.maxsize) if size is None else size)

    def part(self, level: LevelNumber) -> int:
        """The last part that a level needs."""
        return self.levels + 1 if level == "dense" else level

    def end(self, part: int) -> int:
        """Where a part ends in the file: how many bytes its level needs."""
        return self.document.ends[part + 1]

    def need(self, part: int) -> None:
        """Raise Incomplete unless a part, and with it all before it, is there."""
        if self._length(self.end(part)) < self.end(part):
            there = self.parts
            levels = "no level" if not there else f"level {there}" if there > 1 else "level 1"
            raise Incomplete(
                f"{self.name}: has {levels}; level "
                f"{part if part <= self.levels else 'dense'} ends at byte {self.end(part)}",
                "{fetch()} brings more of it",
            )

    def check_indexes(self, part: int) -> None:
        """Compare the blocks of a part, and of all before it, with the bytes that they have.

        Whoever makes arrays of a level does so first: a header may declare far more than there is.
        """
        self.need(part)
        for number in range(1, part + 1):
            self.payloads(number)

    def payloads(self, part: int, *, again: bool = False) -> Payloads:
        """The payloads of a part, whose index is read once, or `again` as it is now."""
        if again or part not in self._payloads:
            self.need(part)
            self._payloads[part] = Payloads(
                self.storage,
                self.document.ends[part],
                self.document.ends[part + 1],
                self.plan.of_part(part),
                self._seed,
            )
        return self._payloads[part]

    def close(self) -> None:
        """Close the file."""
        self.storage.close()
