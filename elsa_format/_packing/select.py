"""Which weights a magnitude level keeps: exact counts, bounded memory, no sort.

The K-th largest magnitude is found digit by digit over the bit patterns, whose order is that of the
magnitudes: one pass over the weights for every 16 bits, for all levels at once.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elsa_format import _kernels
from elsa_format.levels import Pattern

TABLE_BYTES = 16 << 20
"""Most memory for histograms: 16-bit digits for up to 32 different prefixes."""


FEW = 1 << 16
"""Keys up to which sorting is quicker than counting digits, and still takes little memory."""


@dataclass(frozen=True)
class Thresholds:
    """For every level: keep keys above the threshold, and the first `ties` equal to it."""

    thresholds: NDArray[np.uint64]
    ties: NDArray[np.int64]


def find_thresholds(
    passes: Callable[[], Iterable[NDArray[Any]]],
    key_bits: int,
    keep: Sequence[int],
    total: int | None = None,
) -> Thresholds:
    """The cut that keeps exactly `keep[t]` of the largest keys at each level.

    `passes()` gives the words once more, in the same order; their key is all but the sign bit.
    `total` is their number, if it is known.
    """
    if total is not None and 0 < total <= FEW:
        words = np.concatenate([part.copy() for part in passes()])
        return _thresholds_of_few(words & words.dtype.type((1 << key_bits) - 1), key_bits, keep)
    found = [0] * len(keep)
    ranks = list(keep)
    shift = key_bits
    while shift:
        prefixes = np.unique(np.array(found, np.uint64))
        digits = 16 if prefixes.size * (8 << 16) <= TABLE_BYTES else 12
        digits = min(digits, shift)
        shift -= digits
        table = np.zeros((prefixes.size, 1 << digits), np.uint64)
        for words in passes():
            _kernels.histogram(words, shift, digits, prefixes, table)
        from_top = table[:, ::-1].cumsum(axis=1)
        for t, rank in enumerate(ranks):
            row = from_top[np.searchsorted(prefixes, found[t])]
            # The digit at which the running count first reaches the rank.
            at = min(int(np.searchsorted(row, max(rank, 1))), row.size - 1)
            ranks[t] = rank - (int(row[at - 1]) if at else 0)
            found[t] = found[t] << digits | (row.size - 1 - at)
    for t, count in enumerate(keep):
        if count == 0:
            found[t], ranks[t] = (1 << key_bits) - 1, 0
    return Thresholds(np.array(found, np.uint64), np.array(ranks, np.int64))


def _thresholds_of_few(keys: NDArray[Any], key_bits: int, keep: Sequence[int]) -> Thresholds:
    """The same by sorting: a table of digits would be larger than the keys themselves."""
    rising = np.sort(keys)
    found, ranks = [], []
    for count in keep:
        threshold = int(rising[-count]) if count else (1 << key_bits) - 1
        larger = keys.size - int(np.searchsorted(rising, rising.dtype.type(threshold), "right"))
        found.append(threshold)
        ranks.append(count - larger if count else 0)
    return Thresholds(np.array(found, np.uint64), np.array(ranks, np.int64))


def magnitude_counters(words: NDArray[Any], cut: Thresholds) -> NDArray[np.uint8]:
    """Counters of the next weights; uses up the cut's ties in the order of the weights."""
    counters = np.empty(words.size, np.uint8)
    _kernels.assign(words, cut.thresholds, cut.ties, counters)
    return counters


def pattern_counters(keys: NDArray[Any], patterns: Sequence[Pattern]) -> NDArray[np.uint8]:
    """Counters of magnitudes whose groups lie along the last axis; ties go to the lower index."""
    counters = np.zeros(keys.shape, np.uint8)
    pinned = np.iinfo(keys.dtype).max
    for level, pattern in enumerate(patterns, 1):
        left = np.where(counters > 0, pinned, keys).reshape(-1, pattern.m)
        chosen = counters.reshape(-1, pattern.m)
        rows = np.arange(len(left))
        for _ in range(pattern.n):
            best = left.argmax(axis=1)
            value = left[rows, best]
            new = (value > 0) & (value < pinned)
            chosen[rows[new], best[new]] = level
            left[rows, best] = 0
    return counters
