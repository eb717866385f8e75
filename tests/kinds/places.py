"""Where the bytes of a file are: each gives what operations take as their source."""

import io
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from faulty_server import Server, serving


class Pipe(io.RawIOBase):
    """Can be read in one pass, some bytes at a time, and no more."""

    def __init__(self, content: bytes, most: int = 777) -> None:
        self.content, self.most = io.BytesIO(content), most

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self.content.readinto(memoryview(buffer)[: self.most])


@contextmanager
def at_a_path(path: Path) -> Iterator[str]:
    yield str(path)


@cache
def _server() -> Server:
    context = serving()
    _server.context = context  # type: ignore[attr-defined] # or it would end now
    return context.__enter__()


@contextmanager
def at_a_url(path: Path) -> Iterator[str]:
    """Where every file of the folder can be had."""
    server = _server()
    server.files.clear()
    for file in path.parent.iterdir():
        server.serve(file.read_bytes(), f"/{file.name}")
    yield f"{server.url}/{path.name}"


@contextmanager
def as_a_stream(path: Path) -> Iterator[Any]:
    with path.open("rb") as stream:
        yield stream


@contextmanager
def in_a_pipe(path: Path) -> Iterator[Any]:
    yield Pipe(path.read_bytes())


PLACES: dict[str, Callable[[Path], AbstractContextManager[Any]]] = {
    "path": at_a_path,
    "URL": at_a_url,
    "stream": as_a_stream,
    "pipe": in_a_pipe,
}
NAMED = ("path", "URL")
"""Where an index finds the files that it names."""
SEEKABLE = (*NAMED, "stream")
"""Where bytes can be read again."""
