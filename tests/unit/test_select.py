"""Thresholds: counting digits and sorting find the same."""

import numpy as np
import pytest
from internals import FEW, find_thresholds, magnitude_counters


@pytest.mark.parametrize("size", [1, 7, 1000, 70_000])
@pytest.mark.parametrize("word", [np.uint16, np.uint32, np.uint64])
@pytest.mark.parametrize("ties", [False, True])
def test_both_ways_keep_the_same_weights(size: int, word: type, ties: bool) -> None:
    bits = 8 * np.dtype(word).itemsize
    words = np.random.default_rng(size).integers(0, 2**bits, size, word, endpoint=False)
    words = words % word(5) if ties else words
    keep = [0, size // 20, size // 10, size // 2, size]
    parts = np.array_split(words, 3)
    counted = find_thresholds(lambda: iter(parts), bits - 1, keep)
    sorted_ = find_thresholds(lambda: iter(parts), bits - 1, keep, size)
    assert counted.thresholds.tolist() == sorted_.thresholds.tolist()
    assert counted.ties.tolist() == sorted_.ties.tolist()
    counters = magnitude_counters(words, sorted_)
    largest = int((words & word(2 ** (bits - 1) - 1) != 0).sum())
    for level, count in enumerate(keep, 1):
        assert ((counters > 0) & (counters <= level)).sum() == min(count, largest)


def test_sorting_takes_little_memory() -> None:
    assert FEW * 8 <= 1 << 20
