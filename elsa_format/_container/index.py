"""The index of a network in shards: which file holds which tensor (spec §10)."""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elsa_format._container import SNIFFED, TensorInfo, other_format
from elsa_format._container.json import dump, is_text, parse_document
from elsa_format._errors import InvalidIndex, InvalidJson, InvalidOption, UnsafePath

SUFFIX = ".index.json"
_INDEX = re.compile(r"(.*)\.index((?:\.[^./\\]+)*)\.json", re.DOTALL)
"""The weights' name and their variant, if there is one."""

AUTHORITY = re.compile(r"(\[[^\[\]]*\]|[^:\[\]]*)(?::(.*))?")
"""Host and port of a URL."""
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.:-]+://")


def is_url(source: object) -> bool:
    """Whether a source is a URL rather than a path.

    >>> is_url("https://example.org/net.safetensors"), is_url("C:/net.safetensors")
    (True, False)
    """
    return isinstance(source, str) and _URL.match(source) is not None


def redact(url: str) -> str:
    """A URL as messages show it: without what may be secret.

    >>> redact("https://me:secret@example.org/net.safetensors?signature=abc")
    'https://example.org/net.safetensors?…'
    >>> redact("https://me:sec/ret@example.org/net.safetensors")
    'https://…'
    """
    before, mark, _ = re.split(r"([?#]|\Z)", url, maxsplit=1)
    plain = re.sub(r"://[^/]*@", "://", before)  # every one: stores chain URLs
    for authority in re.findall(r"://([^/]*)", plain):
        found = AUTHORITY.fullmatch(authority)
        if found is None or not re.fullmatch("[0-9]*", found[2] or ""):
            # What should be a port may be half a password.
            return f"{url.partition('://')[0]}://…"
    return plain + ("?…" if mark == "?" else "")


def shown(place: str | os.PathLike[str]) -> str:
    """A path or URL as messages show it: of a URL, without what may be secret."""
    return redact(place) if is_url(place) else os.fspath(place)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Index:
    """A parsed index; its file names are plain names."""

    weight_map: Mapping[str, str]
    """Tensor to file."""
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def extra_metadata(self) -> dict[str, Any]:
        """What others say in it, which is kept: neither sizes nor what the format says itself."""
        own = ("total_size", "elsa_level")
        return {key: value for key, value in self.metadata.items() if key not in own}

    @property
    def files(self) -> list[str]:
        """The shards, sorted by name, which is the order of their numbers."""
        return sorted(set(self.weight_map.values()))


def is_index(source: object) -> bool:
    """Whether a path or URL names an index.

    >>> is_index("model.safetensors.index.json"), is_index("https://host/m.index.json?x=1")
    (True, True)
    >>> is_index("model.safetensors.index.fp16.json")
    True
    """
    if not isinstance(source, str | os.PathLike):
        return False
    text = os.fspath(source)
    if is_url(text):
        text = text.split("?")[0].split("#")[0]
    return _INDEX.fullmatch(text) is not None


def shards_suffix(index: str | os.PathLike[str]) -> str:
    """How the names of an index's shards end, by its own name.

    >>> shards_suffix("pytorch_model.bin.index.json"), shards_suffix("net.index.json")
    ('bin', '')
    """
    found = _INDEX.fullmatch(Path(index).name)
    return Path(found[1]).suffix.lower().lstrip(".") if found else ""


def parse(raw: bytes, where: str) -> Index:
    """Check an index by itself: restricted JSON, its structure, plain file names."""
    problem = None if raw.lstrip()[:1] == b"{" else other_format(raw[:SNIFFED])
    if problem is not None:
        raise InvalidJson(f"{where}: {problem}")
    document = parse_document(raw, where)
    weight_map, metadata = document.get("weight_map"), document.get("metadata", {})
    if (
        not isinstance(weight_map, dict)
        or not weight_map
        or not all(isinstance(name, str) for name in weight_map.values())
    ):
        raise InvalidIndex(f"{where}: weight_map is not an object of file names")
    if not isinstance(metadata, dict):
        raise InvalidIndex(f"{where}: metadata is not an object")
    index = Index(weight_map, metadata)
    for name in index.files:
        if name in ("", ".", "..") or any(c in name for c in "/\\\0"):
            raise UnsafePath(f"{where}: shard {name!r} is outside the directory of the index")
    return index


def shard_names(index: str | os.PathLike[str], count: int) -> list[str]:
    """The names of the shards beside a new index.

    >>> shard_names("out/model.safetensors.index.json", 2)[0]
    'model-00001-of-00002.safetensors'
    >>> shard_names("model.safetensors.index.fp16.json", 1)
    ['model.fp16-00001-of-00001.safetensors']
    """
    found = _INDEX.fullmatch(Path(index).name)
    stem, variant = found.groups() if found else ("", "")
    prefix = (stem.removesuffix(".safetensors") or "model") + variant
    if not is_text(prefix):
        raise InvalidOption(f"{os.fspath(index)}: the index names files, so this must be UTF-8")
    return [f"{prefix}-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)]


def index_bytes(
    names: Sequence[str],
    shards: Sequence[Iterable[TensorInfo]],
    metadata: Mapping[str, Any] | None = None,
) -> bytes:
    """A new index; of its `metadata`, the size is computed."""
    weight_map, total = {}, 0
    for name, infos in zip(names, shards, strict=True):
        for info in infos:
            weight_map[info.name] = name
            total += info.nbytes
    extra = dict(metadata or {}) | {"total_size": total}
    document = {
        "metadata": dict(sorted(extra.items())),
        "weight_map": dict(sorted(weight_map.items())),
    }
    return dump(document).encode("utf-8")
