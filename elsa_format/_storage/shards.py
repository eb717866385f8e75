"""An index, and the places of its shards (spec §10)."""

import os
from pathlib import Path
from urllib.parse import quote

from elsa_format._container import MAX_HEADER, read_exactly
from elsa_format._container.index import Index, is_url, redact
from elsa_format._container.index import parse as parse_index
from elsa_format._errors import InvalidIndex, UnsafePath
from elsa_format._options import Limit
from elsa_format._storage import Source, open_storage


def read_index(source: Source, limit: Limit | None = None) -> tuple[Index, str]:
    """The index at a path or URL, and its name for messages; no shard is opened."""
    raw, where = read_index_bytes(source, limit)
    return parse_index(raw, where), where


def read_index_bytes(
    source: Source, limit: Limit | None = None, *, most: int = MAX_HEADER
) -> tuple[bytes, str]:
    """An index, or a manifest, as it is stored, and its name for messages."""
    with open_storage(source) as storage:
        where, stated = storage.name, storage.size or 0
        if limit is not None:
            limit.header(stated, where)
        raw = read_exactly(storage.front(), most + 1)
    if len(raw) > most:
        raise InvalidIndex(f"{where}: more than {most} bytes")
    if limit is not None and len(raw) > stated:  # where only the end tells the size
        limit.header(len(raw) - stated, where)
    return raw, where


def shard_path(index: Path, name: str) -> Path:
    """The file of a shard, which must be in the index's directory even if it is a link.

    An index that is a link itself has two directories, the link's and its target's: in a download
    cache all files of a network are links into one directory.
    """
    path = index.parent / name
    # realpath, as resolve raises where links go in a circle; such a shard does not exist.
    folders = (os.path.realpath(index.parent), os.path.dirname(os.path.realpath(index)))
    if os.path.dirname(os.path.realpath(path)) not in folders:
        raise UnsafePath(f"{index}: shard {name!r} is a link that leaves the directory")
    return path


def shard_source(source: Source, file: str) -> Source:
    """The path or URL of a shard: the index's, with another file name."""
    if isinstance(source, str) and is_url(source):
        before, mark, query = source.partition("#")[0].partition("?")
        scheme, _, rest = before.partition("://")
        if scheme.lower() not in ("http", "https"):
            if "::" in file:  # fsspec would go to another store
                raise UnsafePath(f"{redact(source)}: shard {file!r} is outside its directory")
            return f"{before.rpartition('/')[0]}/{file}"
        host, _, path = rest.partition("/")
        folder = "".join(f"/{part}" for part in path.split("/")[:-1])
        # The query stays, for stores whose signature covers a directory; it goes to the same host.
        return f"{scheme}://{host}{folder}/{quote(file)}{mark}{query}"
    if not isinstance(source, str | os.PathLike):
        raise TypeError("an index is a path or a URL")
    return shard_path(Path(source), file)
