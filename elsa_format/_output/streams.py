"""Streams as outputs: pipes, devices, and what a caller hands over."""

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import IO, Any, Protocol


class Along(Protocol):
    """What is written front to back."""

    position: int

    def write_at(self, position: int, data: Any) -> None: ...
    def commit(self) -> None: ...


class Pipe:
    """A stream that is written front to back."""

    def __init__(self, stream: IO[bytes], name: str | None = None) -> None:
        self.stream, self.position = stream, 0
        own = getattr(stream, "name", None)
        self.name = name or (own if isinstance(own, str) else None)

    def write_at(self, position: int, data: Any) -> None:
        """Write at the end; no other position exists."""
        if position != self.position:
            raise ValueError(f"a pipe cannot write at {position}, it is at {self.position}")
        view = memoryview(data).cast("B")
        self.position += len(view)
        with _naming(self.name):
            while view:  # an unbuffered stream may take less than it was given
                view = view[self.stream.write(view) :]

    def commit(self) -> None:
        """Flush."""
        with _naming(self.name):
            self.stream.flush()

    def discard(self) -> None:
        """What was written cannot be taken back; the caller's exit code tells."""


class Spool:
    """A pipe whose content is written out of order: kept on disk, then copied."""

    def __init__(self, pipe: Along) -> None:
        self.pipe = pipe
        with _naming(tempfile.gettempdir()):
            self.file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - see commit, discard

    def write_at(self, position: int, data: Any) -> None:
        """Write at a position of the temporary file."""
        view = memoryview(data).cast("B")
        with _naming(tempfile.gettempdir()):
            self.file.seek(position)
            while view:
                view = view[self.file.write(view) :]

    @property
    def size(self) -> int:
        """Bytes that are kept."""
        return os.fstat(self.file.fileno()).st_size

    def commit(self, tick: Callable[[int], object] = lambda size: None) -> None:
        """Copy everything to the stream."""
        self.file.seek(0)
        while block := self.file.read(1 << 20):
            self.pipe.write_at(self.pipe.position, block)
            tick(len(block))
        self.pipe.commit()
        self.file.close()

    def discard(self) -> None:
        """Drop the temporary file."""
        self.file.close()


@contextlib.contextmanager
def _naming(name: str | None) -> Iterator[None]:
    """Let errors name what cannot be written, if it has a name."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None and name is not None:
            error.filename = name
        raise
