"""Streams as outputs: pipes, devices, and what a caller hands over."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from typing import IO, Any

from elsa_format._output.atomic import Output, Tick


class Pipe(Output):
    """A stream that is written front to back; what was written cannot be taken back."""

    def __init__(self, stream: IO[bytes], name: str = "") -> None:
        self.stream, self.position = stream, 0
        own = getattr(stream, "name", None)
        self.name = name or (own if isinstance(own, str) else "")

    def write_at(self, position: int, data: Any) -> None:
        """Write at the end; no other position exists."""
        if position != self.position:
            raise ValueError(f"a pipe cannot write at {position}, it is at {self.position}")
        view = memoryview(data).cast("B")
        self.position += len(view)
        with _naming(self.name):
            while view:  # an unbuffered stream may take less than it was given
                view = view[self.stream.write(view) :]

    def sync(self, tick: Tick = lambda size: None) -> None:
        """Flush."""
        with _naming(self.name):
            self.stream.flush()


class Spool(Output):
    """What is written in any order, and sent front to back: kept on disk until then."""

    def __init__(self) -> None:
        with _naming(tempfile.gettempdir()):
            self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - see discard

    def write_at(self, position: int, data: Any) -> None:
        """Write at a position of the temporary file."""
        view = memoryview(data).cast("B")
        with _naming(tempfile.gettempdir()):
            self._file.seek(position)
            while view:
                view = view[self._file.write(view) :]

    @property
    def size(self) -> int:
        """Bytes that are kept."""
        return os.fstat(self._file.fileno()).st_size

    def blocks(self) -> Iterator[bytes]:
        """All that is kept."""
        self._file.seek(0)
        while block := self._file.read(1 << 20):
            yield block

    def discard(self) -> None:
        """Drop the temporary file."""
        self._file.close()


class SpooledPipe(Spool):
    """A pipe whose content is written out of order."""

    def __init__(self, pipe: Pipe) -> None:
        super().__init__()
        self.pipe, self.name = pipe, pipe.name

    def sync(self, tick: Tick = lambda size: None) -> None:
        """Copy everything to the stream."""
        for block in self.blocks():
            self.pipe.write_at(self.pipe.position, block)
        self.pipe.sync()


@contextlib.contextmanager
def _naming(name: str) -> Iterator[None]:
    """Let errors name what cannot be written, if it has a name."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None and name:
            error.filename = name
        raise
