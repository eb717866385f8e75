"""Where bytes come from: files, streams, HTTP, other stores; one sibling a module."""

import os

from elsa_format._container.index import is_url
from elsa_format._storage.base import Closing, Fillable, Reader, Source, Storage, fill, stream_name
from elsa_format._storage.local import (
    FileStorage,
    InputFile,
    PipeStorage,
    SpooledStorage,
    StreamStorage,
)

__all__ = [
    "Closing",
    "Fillable",
    "Reader",
    "Source",
    "SpooledStorage",
    "Storage",
    "fill",
    "open_storage",
    "open_url",
]


def open_storage(source: Source, *, sequential: bool = False) -> Storage:
    """Storage for a path, a URL or a stream, which is only read sequentially, from where it is."""
    if isinstance(source, str) and is_url(source):
        return open_url(source)
    if isinstance(source, str | os.PathLike):
        if os.path.exists(source) and not os.path.isfile(source):  # a named pipe: `<(command)`
            return PipeStorage(InputFile(source), os.fspath(source), owned=True)
        return FileStorage(source)
    if not hasattr(source, "read"):
        raise TypeError(f"source {source!r}, expected a path, a URL or a binary stream")
    if not sequential and source.seekable():
        return StreamStorage(source)
    return PipeStorage(source, stream_name(source))


def open_url(url: str, first: int | None = None) -> Storage:
    """Storage for a URL; of one that costs a round trip, so many bytes are fetched at once."""
    # Imported here, so that those who never read a URL do not wait for HTTP and TLS.
    if url.partition("://")[0].lower() in ("http", "https"):
        from elsa_format._storage.http import HEAD, HttpStorage, RetryPolicy

        first = HEAD if first is None else min(first, HEAD)
        return HttpStorage(url, RetryPolicy.from_environment(), first)
    from elsa_format._storage.fsspec import FsspecStorage

    return FsspecStorage(url, first)
