"""Level files: one extracted level as a plain safetensors file (spec §9)."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from elsa_format._blocks import BlockReader, Source, as_array, open_source
from elsa_format._digest import level_digest
from elsa_format._dtypes import DTYPES, Dtype
from elsa_format._errors import DigestMismatch, InvalidIndex, InvalidLayout, UnsupportedFeature
from elsa_format._header import Header, TensorInfo, read_header
from elsa_format._index import is_index, read_index
from elsa_format._json import MAX_OFFSET, dump, parse_document
from elsa_format._layouts import LAYOUTS, Bitmask, Csr, Layout, part_name, parts
from elsa_format._profile import DIGEST, MAX_LEVELS, RESERVED, Profile, check_version
from elsa_format._shards import open_shards, shard_source

KEY = "elsa_level"


@dataclass(frozen=True)
class LevelFile:
    """What a level file says about itself."""

    level: int
    name: str
    layout: Layout
    digest: str | None
    tensors: dict[str, tuple[Dtype, tuple[int, ...]]]
    """The nested tensors: dtype and shape."""


def describe(profile: Profile, level: int, layout: Layout, nested: dict[str, TensorInfo]) -> str:
    """The metadata entry of a level file."""
    entry = profile.levels[level - 1]
    document: dict[str, Any] = {
        "version": "1.0",
        "level": level,
        "name": entry.name,
        "layout": layout,
    }
    if entry.digest and profile.shard is None:
        document["digest"] = entry.digest
    document["tensors"] = _nested(nested)
    return dump(dict(sorted(document.items())))


def describe_nested(nested: dict[str, TensorInfo]) -> str:
    """The part of the entry that is the same for all levels and layouts."""
    return dump(_nested(nested))


def _nested(nested: dict[str, TensorInfo]) -> dict[str, Any]:
    return {
        name: {"dtype": info.dtype.name, "shape": info.shape}
        for name, info in sorted(nested.items())
    }


def parse(header: Header, where: str) -> LevelFile | None:
    """The description in a header, checked against the tensors; None for other files."""
    text = header.metadata.get(KEY)
    if text is None:
        return None
    document = parse_document(text, f"{where}: {KEY}")
    check_version(document, f"{where}: {KEY}", InvalidLayout)
    layout, entries = document.get("layout"), document.get("tensors")
    level, name, digest = document.get("level"), document.get("name"), document.get("digest")
    if layout not in LAYOUTS or type(level) is not int or not 1 <= level <= MAX_LEVELS:
        raise InvalidLayout(f"{where}: {KEY} needs a level 1..{MAX_LEVELS} and one of {LAYOUTS}")
    if not isinstance(name, str) or not name:
        raise InvalidLayout(f"{where}: {KEY}: name is not a non-empty string")
    if "digest" in document and not (isinstance(digest, str) and DIGEST.fullmatch(digest)):
        raise InvalidLayout(f"{where}: {KEY}: digest is not sha256: and 64 hex digits")
    if entries is None and layout == "dense" and "tensors" not in document:
        entries, digest = {}, None  # which tensors are nested is not told, so none can be checked
    if not isinstance(entries, dict):
        raise InvalidLayout(f"{where}: {KEY}: tensors is not an object")
    tensors = {key: _entry(key, entry, where) for key, entry in entries.items()}
    expected = set()
    for key, (dtype, shape) in tensors.items():
        values = header.tensors.get(part_name("values", key))
        kept = values.elements if values else 0
        for info in parts(layout, key, dtype, shape, kept):
            found = header.tensors.get(info.name)
            if found is None or (found.dtype, found.shape) != (info.dtype, info.shape):
                raise InvalidLayout(
                    f"{where}: tensor {key!r}: part {info.name!r} is missing or has another shape"
                )
            expected.add(info.name)
    for stored in header.tensors:
        if stored not in expected and (stored.startswith(RESERVED) or stored in tensors):
            raise InvalidLayout(f"{where}: tensor {stored!r} is not part of a sparse tensor")
    return LevelFile(level, name, layout, digest, tensors)


def _entry(name: str, entry: Any, where: str) -> tuple[Dtype, tuple[int, ...]]:
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
    return dtype, tuple(shape)


def load_level(source: Source, *, verify: bool = True) -> dict[str, NDArray[Any]]:
    """A level that `extract` wrote, in whatever layout, as dense arrays; its digest is verified.

    >>> from elsa_format import extract, open
    >>> level = extract("net.safetensors", "level3.safetensors", level=3, layout="bitmask")
    >>> layer = load_level("level3.safetensors")["layer"]
    >>> layer.tobytes() == open("net.safetensors").tensor("layer", level).tobytes()
    True
    """
    if is_index(source):
        return _load_shards(source, verify=verify)
    result, described, where = _load_file(source)
    if verify and described is not None and described.digest is not None:
        _check_digest(result, described.tensors, described.digest, where)
    return result


def _load_shards(source: Source, *, verify: bool) -> dict[str, NDArray[Any]]:
    """All shards of a level; what is said about the whole stands in the index."""
    index, where = read_index(source)
    whole = index.metadata.get(KEY, {})
    digest = whole.get("digest") if isinstance(whole, dict) else whole
    if digest is not None and not (isinstance(digest, str) and DIGEST.fullmatch(digest)):
        raise InvalidIndex(f"{where}: {KEY}: digest is not sha256: and 64 hex digits")
    open_shards(source).close()  # checks the index against the shards
    result: dict[str, NDArray[Any]] = {}
    nested: set[str] = set()
    for file in index.files:
        tensors, described, _ = _load_file(shard_source(source, file))
        result |= tensors
        nested |= described.tensors.keys() if described else set()
    if verify and digest is not None:
        _check_digest(result, nested, digest, where)
    return result


def _load_file(source: Source) -> tuple[dict[str, NDArray[Any]], LevelFile | None, str]:
    with open_source(source) as opened:
        header = read_header(opened.stream, opened.name)
        described = parse(header, opened.name)
        reader = BlockReader(opened, header, None)
        stored = {}
        for info in header.tensors.values():
            flat = reader.room(info)
            for _ in reader.blocks(info, flat):
                pass
            stored[info.name] = as_array(flat, info, opened.name)
        reader.finish()
    if described is None:
        return stored, None, opened.name
    result = {name: a for name, a in stored.items() if not name.startswith(RESERVED)}
    for name, (_, shape) in described.tensors.items():
        try:
            result[name] = _to_dense(name, described.layout, stored, shape)
        except (InvalidLayout, UnsupportedFeature) as error:
            raise type(error)(f"{opened.name}: tensor {name!r}: {error}") from None
    return result, described, opened.name


def _check_digest(
    tensors: dict[str, NDArray[Any]], nested: Iterable[str], expected: str, where: str
) -> None:
    found = level_digest(tensors, nested)
    if found != expected:
        raise DigestMismatch(f"{where}: digest {found}, expected {expected}")


def _to_dense(
    name: str, layout: Layout, stored: dict[str, NDArray[Any]], shape: tuple[int, ...]
) -> NDArray[Any]:
    def part(kind: str) -> NDArray[Any]:
        return stored[part_name(kind, name)]

    if layout == "bitmask":
        return Bitmask(part("bitmask"), part("values"), shape).to_dense()
    if layout == "csr":
        return Csr(part("values"), part("indices"), part("indptr"), shape).to_dense()
    return stored[name]
