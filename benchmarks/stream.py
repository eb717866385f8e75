"""Extraction in one pass and constant memory, against reading and copying the same bytes."""

import os
import threading
from pathlib import Path
from typing import IO, Any

from internals import LayoutName

import elsa_format as elsa
from benchmarks._files import LEVEL, Files, aligned, chunked_copy, chunked_read
from benchmarks._rows import MIB, Peak, Race, row, unsynced


class Sink:
    """Takes bytes and forgets them."""

    def write(self, data: Any) -> int:
        """Nothing is kept."""
        return len(data)

    def flush(self) -> None:
        """Nothing is held back."""


def to_nowhere(source: Any, layout: LayoutName = "dense", *, verify: bool = True) -> object:
    """Extract, and throw the result away."""
    sink: Any = Sink()
    return elsa.extract(source, sink, level=LEVEL, layout=layout, verify=verify)


@row(
    "extract, checksums off",
    "plain chunked read",
    target="≤ 1.5 ×",
    why="a block is read, then masked; a machine of 16 November, whose page cache was slower, had "
    "1.43 ×",
)
def extract_unverified(files: Files) -> Race:
    """File to a sink that takes no time."""
    path = files.elsa()
    return Race(
        lambda: to_nowhere(path, verify=False),
        lambda: chunked_read(path),
        files.size,
        contains_peer=True,
    )


@row("extract, checksums on", "plain chunked read", target="≤ 2 ×")
def extract_verified(files: Files) -> Race:
    """File to a sink that takes no time."""
    path = files.elsa()
    return Race(
        lambda: to_nowhere(path), lambda: chunked_read(path), files.size, contains_peer=True
    )


@row("extract BF16, checksums on", "plain chunked read", target="≤ 2 ×")
def extract_bf16(files: Files) -> Race:
    """The same with words of 16 bits."""
    path = files.bfloat16()
    return Race(lambda: to_nowhere(path), lambda: chunked_read(path), files.size // 2)


@row("iterate over a level's tensors (`stream`)", "plain chunked read")
def iterate(files: Files) -> Race:
    """Every tensor is a new array, so this pays for fresh memory too."""
    path = files.elsa()

    def run() -> None:
        for _ in elsa.stream(path, level=LEVEL):
            pass

    return Race(run, lambda: chunked_read(path), files.size)


def file_race(files: Files, layout: LayoutName, source: Path) -> Race:
    """File to file, neither waiting for the disk."""
    out = files.path("extracted.safetensors")
    return Race(
        unsynced(lambda: elsa.extract(source, out, level=LEVEL, layout=layout)),
        lambda: chunked_copy(source, out),
        files.size,
        after=lambda: out.unlink(missing_ok=True),
    )


@row("extract file → file, dense", "chunked copy")
def to_file(files: Files) -> Race:
    """As large as the source."""
    return file_race(files, "dense", files.elsa())


@row("extract file → file, bitmask", "chunked copy")
def to_bitmask(files: Files) -> Race:
    """Writes what is kept."""
    return file_race(files, "bitmask", files.elsa())


@row("extract file → file, CSR", "chunked copy")
def to_csr(files: Files) -> Race:
    """Writes what is kept, and its indices."""
    return file_race(files, "csr", files.elsa())


@row("extract file → file, dense, until it is on the disk", "chunked copy + fsync")
def to_disk(files: Files) -> Race:
    """As it is used: durable before it takes its name. A smaller file, since disks are slow."""
    size = files.size // 8
    source, out = files.elsa(size), files.path("extracted.safetensors")
    return Race(
        lambda: elsa.extract(source, out, level=LEVEL),
        lambda: chunked_copy(source, out, sync=True),
        size,
        after=lambda: out.unlink(missing_ok=True),
    )


def feed(path: Path) -> IO[bytes]:
    """The reading end of a pipe through which a file arrives."""
    reading, writing = os.pipe()

    def write() -> None:
        with open(writing, "wb", buffering=0) as pipe, open(path, "rb", buffering=0) as file:
            while os.sendfile(pipe.fileno(), file.fileno(), None, MIB):
                pass

    threading.Thread(target=write, daemon=True).start()
    return open(reading, "rb", buffering=0)


@row("extract pipe → file, dense", "chunked copy from a pipe")
def from_pipe(files: Files) -> Race:
    """A source that cannot seek."""
    source, out = files.elsa(), files.path("extracted.safetensors")

    def extract() -> None:
        with feed(source) as pipe:
            elsa.extract(pipe, out, level=LEVEL)

    def copy() -> None:
        view = aligned(MIB).data
        with feed(source) as pipe, open(out, "wb", buffering=0) as file:
            while count := pipe.readinto(view):  # type: ignore[attr-defined]
                file.write(view[:count])

    return Race(unsynced(extract), copy, files.size, after=lambda: out.unlink(missing_ok=True))


@row("peak memory of extract, dense", "64 MiB", target="≤ 1 ×")
def extract_peak(files: Files) -> Peak:
    """Imports included."""
    program = f"import sys, elsa_format as e; e.extract(sys.argv[1], '/dev/null', level={LEVEL})"
    return Peak(program, (files.elsa(),), files.size, 64 * MIB)


@row("peak memory of importing elsa_format", "64 MiB")
def import_peak(files: Files) -> Peak:
    """What the others' peaks include."""
    return Peak("import elsa_format", (), 0, 64 * MIB)
