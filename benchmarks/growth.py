"""Cost per byte and memory as files grow, and as levels do."""

import elsa_format as elsa
from benchmarks._files import LEVEL, LEVELS, Files
from benchmarks._rows import MIB, Peak, Race, row, unsynced
from benchmarks.load import IMPORTS, load
from benchmarks.stream import to_nowhere

FACTOR = 64
"""The largest file is this many times the smallest."""


def small(files: Files) -> int:
    """Bytes of the smallest file."""
    return files.largest // FACTOR


@row("extract, largest file, per byte", "of a file a 64th as large", target="≤ 1.2 ×")
def extract(files: Files) -> Race:
    """Checksums on, to a sink that takes no time."""
    large, little = files.repeated(files.largest), files.repeated(small(files))
    return Race(
        lambda: to_nowhere(large),
        lambda: [to_nowhere(little) for _ in range(4)],
        files.largest,
        4 * small(files),
    )


@row("load a level as bitmask, largest file, per byte", "of a file a 64th as large", "≤ 1.2 ×")
def load_bitmask(files: Files) -> Race:
    """Checksums on."""
    large, little = files.repeated(files.largest), files.repeated(small(files))
    return Race(
        lambda: load(large, "bitmask"),
        lambda: [load(little, "bitmask") for _ in range(4)],
        files.largest,
        4 * small(files),
    )


@row("peak memory of extract, largest file", "64 MiB", target="≤ 1 ×")
def extract_peak(files: Files) -> Peak:
    """Imports included."""
    program = f"import sys, elsa_format as e; e.extract(sys.argv[1], '/dev/null', level={LEVEL})"
    return Peak(program, (files.repeated(files.largest),), files.largest, 64 * MIB)


@row("peak memory of a load as bitmask, largest file", "bytes returned", target="≤ 1.2 ×")
def load_peak(files: Files) -> Peak:
    """In proportion to what is kept: of 100 F32 weights 10, and 100 bits."""
    path = files.repeated(files.largest)
    with elsa.open(path) as file:
        returned = file.size(LEVEL, "bitmask")
    program = f"level = elsa_format.open(sys.argv[1]).load({LEVEL}, 'bitmask')"
    return Peak(program, (path,), files.largest, returned, beyond=IMPORTS)


@row("open, largest file", "of a file a 64th as large")
def inspect(files: Files) -> Race:
    """From the header, which grows with the number of tensors, not with their size."""
    large, little = files.repeated(files.largest), files.repeated(small(files))
    return Race(lambda: elsa.open(large).close(), lambda: elsa.open(little).close(), files.largest)


@row("pack one-shot, per byte", "of a file a 16th as large", target="≤ 1.2 ×")
def pack(files: Files) -> Race:
    """Digests of 3 levels; not waiting for the disk."""
    little = files.size // 16
    large, small_dense, out = files.dense(), files.dense(little), files.path("grown.safetensors")
    return Race(
        unsynced(lambda: elsa.pack(large, out, sparsities=LEVELS)),
        unsynced(lambda: elsa.pack(small_dense, out, sparsities=LEVELS)),
        files.size,
        little,
        after=lambda: out.unlink(missing_ok=True),
    )


@row("extract a level of 50", "a level of 3", target="≤ 1.1 ×")
def levels_extract(files: Files) -> Race:
    """The counters have 6 bits instead of 2."""
    many, few = files.many_levels(50), files.elsa()
    return Race(lambda: to_nowhere(many), lambda: to_nowhere(few), files.size)


@row("load a level of 50", "a level of 3", target="≤ 1.1 ×")
def levels_load(files: Files) -> Race:
    """Dense."""
    many, few = files.many_levels(50), files.elsa()
    return Race(lambda: load(many), lambda: load(few), files.size)


@row("pack one-shot with 50 levels, no digests", "with 3 levels")
def levels_pack(files: Files) -> Race:
    """More thresholds to find, and more to compare with."""
    dense, out = files.dense(), files.path("grown.safetensors")
    fifty = [0.99 - t / 100 for t in range(50)]
    return Race(
        unsynced(lambda: elsa.pack(dense, out, sparsities=fifty, digests=False)),
        unsynced(lambda: elsa.pack(dense, out, sparsities=LEVELS, digests=False)),
        files.size,
        after=lambda: out.unlink(missing_ok=True),
    )


@row("pack one-shot with 50 levels and their digests", "with 3 levels")
def levels_digests(files: Files) -> Race:
    """Every level has a SHA-256 of what it keeps, so this grows with what all keep together."""
    size = files.size // 4
    dense, out = files.dense(size), files.path("grown.safetensors")
    fifty = [0.99 - t / 100 for t in range(50)]
    return Race(
        unsynced(lambda: elsa.pack(dense, out, sparsities=fifty)),
        unsynced(lambda: elsa.pack(dense, out, sparsities=LEVELS)),
        size,
        after=lambda: out.unlink(missing_ok=True),
    )
