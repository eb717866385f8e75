"""Level files: one extracted level as a plain safetensors file (spec §9)."""

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from elsa_format._blocks import BlockReader, OpenSource, Source, as_array, open_source
from elsa_format._digest import level_digest
from elsa_format._dtypes import DTYPES, Dtype
from elsa_format._errors import (
    DigestMismatch,
    FormatError,
    InvalidIndex,
    InvalidLayout,
    UnsupportedFeature,
)
from elsa_format._header import Header, TensorInfo, read_header
from elsa_format._index import Index, is_index
from elsa_format._json import MAX_OFFSET, MAX_SAFE_INTEGER, dump, parse_document
from elsa_format._layouts import LAYOUTS, Bitmask, Csr, Layout, part_name, parts
from elsa_format._profile import DIGEST, MAX_LEVELS, RESERVED, Profile, check_version
from elsa_format._profile import KEY as PROFILE_KEY
from elsa_format._shards import Shards, check_total_size, open_parsed

KEY = "elsa_level"


@dataclass(frozen=True)
class LevelFile:
    """What a level file says about itself, or the index of its shards about the whole."""

    level: int
    name: str
    layout: Layout
    digest: str | None
    tensors: dict[str, tuple[Dtype, tuple[int, ...]]] | None
    """The nested tensors: dtype and shape; None if they are not told, and no digest can be."""


def describe(profile: Profile, level: int, layout: Layout, nested: dict[str, TensorInfo]) -> str:
    """The metadata entry of a level file."""
    for tensor, info in nested.items():
        if max(info.shape, default=0) > MAX_SAFE_INTEGER:
            raise UnsupportedFeature(
                f"tensor {tensor!r}: shape {list(info.shape)}, but the dimensions that a level "
                f"file can state are at most {MAX_SAFE_INTEGER}"
            )
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
    if PROFILE_KEY in header.metadata:
        raise InvalidLayout(
            f"{where}: is an ELSA file, not a level file; elsa_format.open(...).load(level) "
            "gives a level of it"
        )
    text = header.metadata.get(KEY)
    if text is None:
        return None
    document = parse_document(text, f"{where}: {KEY}")
    level, name, layout, digest = _fields(document, f"{where}: {KEY}", InvalidLayout)
    entries: Any = document.get("tensors", {} if layout == "dense" else None)
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
    return LevelFile(level, name, layout, digest, tensors if "tensors" in document else None)


def _fields(
    document: Mapping[str, Any], where: str, malformed: type[FormatError]
) -> tuple[int, str, Layout, str | None]:
    """Level, name, layout and digest, of a level file or in the index of its shards."""
    check_version(document, where, malformed)
    level, name = document.get("level"), document.get("name")
    layout, digest = document.get("layout"), document.get("digest")
    if layout not in LAYOUTS or type(level) is not int or not 1 <= level <= MAX_LEVELS:
        raise malformed(f"{where} needs a level 1..{MAX_LEVELS} and one of {LAYOUTS}")
    if not isinstance(name, str) or not name:
        raise malformed(f"{where}: name is not a non-empty string")
    if "digest" in document and not (isinstance(digest, str) and DIGEST.fullmatch(digest)):
        raise malformed(f"{where}: digest is not sha256: and 64 hex digits")
    return level, name, layout, digest


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
    with open_source(source) as opened:
        header = read_header(opened.stream, opened.name)
        described = parse(header, opened.name)
        result = _load(opened, header, described)
    if verify:
        _check_digest(result, described, opened.name)
    return result


def _load_shards(source: Source, *, verify: bool) -> dict[str, NDArray[Any]]:
    shards, described, whole = open_shards(source, parse)
    result: dict[str, NDArray[Any]] = {}
    own = []
    with contextlib.closing(shards):
        for shard in shards.shards:
            with contextlib.closing(shard.data()) as data:
                check = shard.storage.check_unchanged
                opened = OpenSource(data, shard.storage.name, None, check_unchanged=check)
                own.append(_load(opened, shard.header, described[shard.file]))
            result |= own[-1]
    if verify:
        for shard, tensors in zip(shards.shards, own, strict=True):
            _check_digest(tensors, described[shard.file], shard.storage.name)
        _check_digest(result, whole, shards.name)
    return result


def open_shards(
    source: Source, parse: Callable[[Header, str], LevelFile | None]
) -> tuple[Shards, Mapping[str, LevelFile | None], LevelFile | None]:
    """The shards of a level, what each says of itself, and the level; None: of a plain checkpoint.

    They are sorted by file name.
    """
    shards, index, described = open_parsed(source, parse)
    try:
        return shards, described, _join(shards, index, described)
    except BaseException:
        shards.close()
        raise


def _join(
    shards: Shards, index: Index, described: Mapping[str, LevelFile | None]
) -> LevelFile | None:
    """The level that shards hold together (spec §10.3)."""
    where, whole = shards.name, None
    if KEY in index.metadata:
        document = index.metadata[KEY]
        if not isinstance(document, dict):
            raise InvalidIndex(f"{where}: {KEY} is not an object")
        whole = LevelFile(*_fields(document, f"{where}: {KEY}", InvalidIndex), None)
    whole = whole or next(filter(None, described.values()), None)
    if whole is None:
        return None
    homes: dict[str, str] = {}
    nested: dict[str, tuple[Dtype, tuple[int, ...]]] = {}
    for shard in shards.shards:
        file, level = shard.file, described[shard.file]
        if level is None:
            raise InvalidIndex(f"{where}: {file!r} has no {KEY}, which all shards of a level have")
        if (level.level, level.name, level.layout) != (whole.level, whole.name, whole.layout):
            raise InvalidIndex(
                f"{where}: {file!r} holds level {level.level} {level.name!r} as {level.layout}, "
                f"expected level {whole.level} {whole.name!r} as {whole.layout}"
            )
        nested |= level.tensors or {}
        plain = [name for name in shard.header.tensors if not name.startswith(RESERVED)]
        for name in (*plain, *(level.tensors or {})):
            if homes.setdefault(name, file) != file:
                raise InvalidIndex(
                    f"{where}: tensor {name!r} is in both {homes[name]!r} and {file!r}"
                )
    check_total_size(index, shards)
    told = all(level and level.tensors is not None for level in described.values())
    stated = whole.digest if KEY in index.metadata else None
    return LevelFile(whole.level, whole.name, whole.layout, stated, nested if told else None)


def _load(
    opened: OpenSource, header: Header, described: LevelFile | None
) -> dict[str, NDArray[Any]]:
    reader = BlockReader(opened, header, None)
    stored = {}
    for info in header.tensors.values():
        flat = reader.room(info)
        for _ in reader.blocks(info, flat):
            pass
        stored[info.name] = as_array(flat, info, opened.name)
    reader.finish()
    if described is None:
        return stored
    result = {name: a for name, a in stored.items() if not name.startswith(RESERVED)}
    for name, (_, shape) in (described.tensors or {}).items():
        try:
            result[name] = _to_dense(name, described.layout, stored, shape)
        except (InvalidLayout, UnsupportedFeature) as error:
            raise type(error)(f"{opened.name}: tensor {name!r}: {error}") from None
    return result


def _check_digest(
    tensors: dict[str, NDArray[Any]], described: LevelFile | None, where: str
) -> None:
    if described is None or described.digest is None or described.tensors is None:
        return
    found = level_digest(tensors, described.tensors)
    if found != described.digest:
        raise DigestMismatch(f"{where}: digest {found}, expected {described.digest}")


def _to_dense(
    name: str, layout: Layout, stored: dict[str, NDArray[Any]], shape: tuple[int, ...]
) -> NDArray[Any]:
    def part(kind: str) -> NDArray[Any]:
        return stored[part_name(kind, name)]

    if layout == "dense":
        return stored[name]
    values = part("values")
    # A kept weight has a counter above 0, so a zero would be one that is not kept.
    if not values.view(f"u{values.itemsize}").all():
        raise InvalidLayout("a value is zero, which no kept weight is")
    if layout == "bitmask":
        return Bitmask(part("bitmask"), values, shape).to_dense()
    return Csr(values, part("indices"), part("indptr"), shape).to_dense()
