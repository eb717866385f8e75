"""Packing, against copying the dense checkpoint."""

from collections.abc import Callable

import elsa_format as elsa
from benchmarks._files import LEVELS, Files, chunked_copy
from benchmarks._rows import MIB, Peak, Race, row, unsynced

PROGRAM = (
    "import sys, os, elsa_format as e; os.fsync = lambda fd: None; dense, out, *rest = sys.argv[1:]"
)


def pack_race(files: Files, pack: Callable[[], object]) -> Race:
    """Pack and copy, neither waiting for the disk."""
    dense, out = files.dense(), files.path("packed.safetensors")
    return Race(
        unsynced(pack),
        lambda: chunked_copy(dense, out),
        files.size,
        after=lambda: out.unlink(missing_ok=True),
    )


@row("pack from counters, no digests", "chunked copy", target="≤ 3 ×")
def counters(files: Files) -> Race:
    """The paper's N given; checksums and counts, no SHA-256."""
    dense, steps, out = files.dense(), files.counters(), files.path("packed.safetensors")
    return pack_race(files, lambda: elsa.pack(dense, out, counters=steps, digests=False))


@row(
    "pack from counters, digests of 3 levels",
    "chunked copy",
    target="≤ 3 ×",
    why="the digests hash 45 % of the file's size with SHA-256, at 1.5 GB/s a core; "
    "a second core takes part of that, as far as it is not the other half of the first",
)
def counters_digests(files: Files) -> Race:
    """The default."""
    dense, steps, out = files.dense(), files.counters(), files.path("packed.safetensors")
    return pack_race(files, lambda: elsa.pack(dense, out, counters=steps))


@row("pack nested checkpoints, digests of 3 levels", "chunked copy")
def nested(files: Files) -> Race:
    """Reads four checkpoints and writes one."""
    *sparse, dense = files.levels()
    out = files.path("packed.safetensors")
    return pack_race(files, lambda: elsa.pack(dense, out, levels=sparse))


@row("pack one-shot, global, no digests", "chunked copy", target="≤ 6 ×")
def one_shot(files: Files) -> Race:
    """Two passes to find the thresholds, one to write."""
    dense, out = files.dense(), files.path("packed.safetensors")
    return pack_race(files, lambda: elsa.pack(dense, out, sparsities=LEVELS, digests=False))


@row("pack one-shot, global, digests of 3 levels", "chunked copy", target="≤ 6 ×")
def one_shot_digests(files: Files) -> Race:
    """The default."""
    dense, out = files.dense(), files.path("packed.safetensors")
    return pack_race(files, lambda: elsa.pack(dense, out, sparsities=LEVELS))


@row("pack one-shot, until it is on the disk", "chunked copy + fsync")
def to_disk(files: Files) -> Race:
    """As it is used: durable before it takes its name. A smaller file, since disks are slow."""
    size = files.size // 8
    dense, out = files.dense(size), files.path("packed.safetensors")
    return Race(
        lambda: elsa.pack(dense, out, sparsities=LEVELS),
        lambda: chunked_copy(dense, out, sync=True),
        size,
        after=lambda: out.unlink(missing_ok=True),
    )


@row("peak memory of pack from counters", "64 MiB", target="≤ 1 ×")
def counters_peak(files: Files) -> Peak:
    """Imports included."""
    program = f"{PROGRAM}; e.pack(dense, out, counters=rest[0], force=True)"
    arguments = (files.dense(), files.path("packed.safetensors"), files.counters())
    return Peak(program, arguments, files.size, 64 * MIB)


@row("peak memory of pack of nested checkpoints", "64 MiB", target="≤ 1 ×")
def nested_peak(files: Files) -> Peak:
    """Imports included."""
    *sparse, dense = files.levels()
    program = f"{PROGRAM}; e.pack(dense, out, levels=rest, force=True)"
    return Peak(program, (dense, files.path("packed.safetensors"), *sparse), files.size, 64 * MIB)


@row("peak memory of pack, one-shot global", "64 MiB", target="≤ 1 ×")
def one_shot_peak(files: Files) -> Peak:
    """Imports included."""
    program = f"{PROGRAM}; e.pack(dense, out, sparsities={LEVELS}, force=True)"
    arguments = (files.dense(), files.path("packed.safetensors"))
    return Peak(program, arguments, files.size, 64 * MIB)
