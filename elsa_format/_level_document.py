"""The document of a level file: which level of a network it holds, and how (spec §9.1)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elsa_format._container import RESERVED, Header, TensorInfo
from elsa_format._container.dtypes import DTYPES
from elsa_format._container.index import Index
from elsa_format._container.json import (
    MAX_OFFSET,
    check_version,
    parse_document,
)
from elsa_format._counters import MAX_LEVELS
from elsa_format._errors import (
    FormatError,
    InvalidIndex,
    InvalidLayout,
    NotElsa,
)
from elsa_format._layouts import LAYOUT_NAMES, LAYOUTS, LayoutName, part_name
from elsa_format._profile import DIGEST
from elsa_format._profile import KEY as PROFILE_KEY

KEY = "elsa_level"
_OTHERS = {PROFILE_KEY: "an ELSA file", "elsa_delivery": "a delivery file"}


@dataclass(frozen=True)
class LevelFile:
    """What a level file says about itself, or the index of its shards about the whole."""

    level: int
    name: str
    layout: LayoutName
    digest: str | None
    tensors: dict[str, TensorInfo] | None
    """The nested tensors, dense; None if they are not told, and no digest can be."""


def parse(header: Header, where: str) -> LevelFile | None:
    """The description in a header, checked against the tensors; None for a plain checkpoint."""
    for key, kind in _OTHERS.items():
        if key in header.metadata:
            raise InvalidLayout(
                f"{where}: is {kind}, not a level file; elsa_format.open(...).load(level) gives a "
                "level of it"
            )
    text = header.metadata.get(KEY)
    if text is None:
        for name in header.tensors:
            if name.startswith(RESERVED):
                raise NotElsa(
                    f"{where}: tensor {name!r} has a reserved name, but the metadata has no {KEY}: "
                    "neither a level file nor a checkpoint"
                )
        return None
    document = parse_document(text, f"{where}: {KEY}")
    level, name, layout, digest = _fields(document, f"{where}: {KEY}", InvalidLayout)
    entries: Any = document.get("tensors", {} if layout == "dense" else None)
    if not isinstance(entries, dict):
        raise InvalidLayout(f"{where}: {KEY}: tensors is not an object")
    tensors = {key: _entry(key, entry, where) for key, entry in entries.items()}
    expected = set()
    for key, tensor in tensors.items():
        values = header.tensors.get(part_name("values", key))
        kept = values.elements if values else 0
        for info in LAYOUTS[layout].parts(tensor, kept):
            found = header.tensors.get(info.name)
            if found is None or (found.dtype, found.shape) != (info.dtype, info.shape):
                raise InvalidLayout(
                    f"{where}: tensor {key!r}: part {info.name!r} is missing or has another shape"
                )
            expected.add(info.name)
    for stored in header.tensors:
        if stored not in expected and (stored.startswith(RESERVED) or stored in tensors):
            raise InvalidLayout(f"{where}: tensor {stored!r} is not part of a sparse tensor")
    return LevelFile(level, name, layout, digest, tensors if "tensors" in document else None)


def _fields(
    document: Mapping[str, Any], where: str, malformed: type[FormatError]
) -> tuple[int, str, LayoutName, str | None]:
    """Level, name, layout and digest, of a level file or in the index of its shards."""
    check_version(document, where, malformed)
    level, name = document.get("level"), document.get("name")
    layout, digest = document.get("layout"), document.get("digest")
    if layout not in LAYOUT_NAMES or type(level) is not int or not 1 <= level <= MAX_LEVELS:
        raise malformed(f"{where} needs a level 1..{MAX_LEVELS} and one of {LAYOUT_NAMES}")
    if not isinstance(name, str) or not name:
        raise malformed(f"{where}: name is not a non-empty string")
    if "digest" in document and not (isinstance(digest, str) and DIGEST.fullmatch(digest)):
        raise malformed(f"{where}: digest is not sha256: and 64 hex digits")
    return level, name, layout, digest


def _entry(name: str, entry: Any, where: str) -> TensorInfo:
    dtype = DTYPES.get(str(entry.get("dtype"))) if isinstance(entry, dict) else None
    shape = entry.get("shape") if dtype else None
    if (
        dtype is None
        or not dtype.nestable
        or not isinstance(shape, list)
        or not all(type(n) is int and n >= 0 for n in shape)
        or name.startswith(RESERVED)
    ):
        raise InvalidLayout(f"{where}: tensor {name!r}: expected a floating dtype and a shape")
    if math.prod(n for n in shape if n) * dtype.size > MAX_OFFSET:
        raise InvalidLayout(f"{where}: tensor {name!r}: shape overflows")
    return TensorInfo(name, dtype, tuple(shape))


def of_index(index: Index, where: str) -> LevelFile | None:
    """What the index of a level's shards says about the whole, if it does."""
    if KEY not in index.metadata:
        return None
    document = index.metadata[KEY]
    if not isinstance(document, dict):
        raise InvalidIndex(f"{where}: {KEY} is not an object")
    return LevelFile(*_fields(document, f"{where}: {KEY}", InvalidIndex), None)
