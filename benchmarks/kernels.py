"""The inner loops against memcpy in one thread, and the C module against numpy."""

from typing import Any

import numpy as np
from internals import _kernels, _pure

from benchmarks._files import LEVEL, Files, weights
from benchmarks._rows import Race, Unavailable, row

BITS = 2


def native() -> Any:
    """The kernels in use, if they are those in C."""
    if not _kernels.NATIVE:
        raise Unavailable("the C module is not built")
    return _kernels


def words(files: Files, width: int) -> Any:
    """Random words of a width in bytes: a quarter of them has each of the counters 0..3."""
    return weights(files.size).view(f"u{width}")


def mask_race(files: Files, width: int) -> Race:
    """Mask and memcpy, both into memory that has been touched."""
    src = words(files, width)
    out = np.zeros_like(src)
    return Race(
        lambda: native().mask(src, out, BITS, LEVEL), lambda: np.copyto(out, src), src.nbytes
    )


@row("masking kernel, F32", "memcpy, warm", target="≤ 1.3 ×")
def mask_f32(files: Files) -> Race:
    """One level of 32-bit words."""
    return mask_race(files, 4)


@row("masking kernel, BF16", "memcpy, warm", target="≤ 1.3 ×")
def mask_bf16(files: Files) -> Race:
    """One level of 16-bit words."""
    return mask_race(files, 2)


@row("masking kernel in place, F32", "memcpy, warm")
def mask_in_place(files: Files) -> Race:
    """As a load does it, but larger than the cache."""
    src = words(files, 4)
    own, out = src.copy(), np.zeros_like(src)
    return Race(
        lambda: native().mask(own, own, BITS, LEVEL), lambda: np.copyto(out, src), src.nbytes
    )


@row("counting kernel, F32", "memcpy, warm")
def count(files: Files) -> Race:
    """All counters in one pass."""
    src = words(files, 4)
    out = np.zeros_like(src)
    return Race(lambda: native().count(src, BITS), lambda: np.copyto(out, src), src.nbytes)


@row("masking: C module", "numpy in blocks", target="≥ 1.5 × faster")
def mask_numpy(files: Files) -> Race:
    """The same words, masked by both implementations."""
    src = words(files, 4)
    out = np.zeros_like(src)
    return Race(
        lambda: native().mask(src, out, BITS, LEVEL),
        lambda: _pure.mask(src, out, BITS, LEVEL),
        src.nbytes,
    )


@row("compaction to a bitmask: C module", "numpy in blocks", target="≥ 3 × faster")
def compact_numpy(files: Files) -> Race:
    """The same words, compacted by both implementations."""
    src = words(files, 4)
    bitmask, values = np.zeros(src.size // 8, np.uint8), np.zeros_like(src)
    return Race(
        lambda: native().compact(src, BITS, LEVEL, bitmask, values),
        lambda: _pure.compact(src, BITS, LEVEL, bitmask, values),
        src.nbytes,
    )
