"""Which words a level keeps: those whose counter says so or, in a level file, all but zeros."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from elsa_format import _kernels

Words = NDArray[Any]

NOT_ZERO = 0
"""In place of the counters' bits: a level file does not tell them, and what is not kept is zero."""


def count_kept(words: Words, bits: int, level: int) -> int:
    """How many words a level keeps."""
    if bits == NOT_ZERO:
        return int(np.count_nonzero(words))
    return int(_kernels.count(words, bits)[1 : level + 1].sum())


def compact(words: Words, bits: int, level: int, bitmask: NDArray[np.uint8], values: Words) -> int:
    """Write a bit for each word, and the kept words; return how many."""
    if bits != NOT_ZERO:
        return _kernels.compact(words, bits, level, bitmask, values)
    return _keep(words, values, _kernels.compact(_flags(words), 1, 1, bitmask, values))


def csr(
    words: Words,
    bits: int,
    level: int,
    place: tuple[int, int, int],
    parts: tuple[NDArray[Any], NDArray[Any], Words],
) -> int:
    """Write row ends, columns and values of the kept words of a block; return how many.

    The place is the column that the block starts in, their number, and the words kept before it.
    """
    if bits != NOT_ZERO:
        return _kernels.csr(words, bits, level, *place, *parts)
    return _keep(words, parts[2], _kernels.csr(_flags(words), 1, 1, *place, *parts))


def _flags(words: Words) -> Words:
    """Words with a counter of one bit: whether there is anything to keep."""
    flags: Words = (words != 0).astype(words.dtype)
    return flags


def _keep(words: Words, values: Words, kept: int) -> int:
    values[:kept] = words[words != 0]
    return kept
