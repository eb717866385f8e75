"""One-shot levels by magnitude: the largest of all weights, of each tensor, or N of every M.

The K-th largest magnitude is found digit by digit over the bit patterns, whose order is that of the
magnitudes: one pass over the weights for every 16 bits, for all levels at once, in bounded memory.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elsa_format import _kernels
from elsa_format._container import TensorInfo, lay_out
from elsa_format._container.dtypes import DTYPES, Dtype
from elsa_format._counters import Words
from elsa_format._errors import InfeasibleLevels
from elsa_format._memory import BLOCK
from elsa_format._packing import Checkpoint, word_blocks
from elsa_format._packing.assignment import Assignment, Counters, Tick, specs_of
from elsa_format._packing.layers import common_group, uneven
from elsa_format._packing.options import Scope
from elsa_format.levels import Pattern, kept_count

TABLE_BYTES = 16 << 20
"""Most memory for histograms: 16-bit digits for up to 32 different prefixes."""
FEW = 1 << 16
"""Keys up to which sorting is quicker than counting digits, and still takes little memory."""


@dataclass(frozen=True)
class Thresholds:
    """For every level: keep keys above the threshold, and the first `ties` equal to it."""

    thresholds: NDArray[np.uint64]
    ties: NDArray[np.int64]


class MagnitudeLevels(Assignment):
    """Keeps the largest magnitudes, over all tensors or in each."""

    def __init__(
        self,
        network: Checkpoint,
        sparsities: list[Fraction],
        scope: Scope,
        *,
        any_order: bool = False,
    ) -> None:
        self.network, self.sparsities, self.scope = network, sparsities, scope
        self.specs = specs_of(sparsities)
        self._share_ties = any_order and scope == "global"
        if scope == "global":
            self.empty_layers_advice = "; --scope uniform gives each its share"
        self.passes = 3 if self._share_ties else 2
        self._cuts: dict[str, Thresholds] = {}
        self._key = DTYPES["F32"]

    def prepare(self, tensors: list[TensorInfo], tick: Tick) -> None:
        self._key = _common_dtype({info.dtype.name for info in tensors})
        groups = [tensors] if self.scope == "global" else [[info] for info in tensors]
        for group in groups:
            total = sum(info.elements for info in group)
            keep = [kept_count(s, total) for s in self.sparsities]
            passes = partial(self._all_keys, group, tick)
            cut = find_thresholds(passes, self._key.size - 1, keep, total)
            for info in lay_out(group).values():  # the order in which one file would hold them
                self._cuts[info.name] = cut
                if self._share_ties:
                    used = self._count_ties(info, cut, tick)
                    cut = Thresholds(cut.thresholds, np.maximum(cut.ties - used, 0))

    def blocks(self, info: TensorInfo) -> Iterator[tuple[Words, Counters]]:
        # Ties are used up in the order of the tensors in one file, then by index.
        for words in word_blocks(self.network, info):
            yield words, magnitude_counters(self._keys(words, info.dtype), self._cuts[info.name])

    def _count_ties(self, info: TensorInfo, cut: Thresholds, tick: Tick) -> NDArray[np.int64]:
        """How many weights of a tensor are as large as each level's threshold."""
        prefixes = np.unique(cut.thresholds >> np.uint64(1))
        table = np.zeros((prefixes.size, 2), np.uint64)
        for words in self._all_keys([info], tick):
            _kernels.histogram(words, 0, 1, prefixes, table)
        rows = np.searchsorted(prefixes, cut.thresholds >> np.uint64(1))
        return table[rows, (cut.thresholds & np.uint64(1)).astype(np.intp)].astype(np.int64)

    def _all_keys(self, tensors: list[TensorInfo], tick: Tick) -> Iterator[Words]:
        for info in tensors:
            for words in word_blocks(self.network, info):
                yield self._keys(words, info.dtype)
                tick(words.nbytes)

    def _keys(self, words: Words, dtype: Dtype) -> Words:
        if dtype == self._key:
            return words
        assert dtype.numpy is not None
        wider = words.view(dtype.numpy).astype(self._key.numpy)
        return wider.view(self._key.words)


def _common_dtype(names: set[str]) -> Dtype:
    """The narrowest dtype in which all magnitudes are exact, so that they can be compared."""
    if len(names) == 1:
        return DTYPES[next(iter(names))]
    return DTYPES["F64" if "F64" in names else "F32"]


class PatternLevels(Assignment):
    """Keeps the N largest of every M neighbours along an axis of each tensor."""

    def __init__(
        self, network: Checkpoint, patterns: list[Pattern], axes: Mapping[str, int]
    ) -> None:
        self.network, self.patterns, self._axes = network, patterns, axes
        self.group = common_group(patterns)
        self.specs = specs_of(patterns)

    def prepare(self, tensors: list[TensorInfo], tick: Tick) -> None:
        for info in tensors:
            if problem := uneven(info, self._axes[info.name], self.group):
                raise InfeasibleLevels(
                    f"{self.network.path}: tensor {info.name!r}: {problem}",
                    "{exclude} leaves it out",
                    exclude=info.name,
                )

    def blocks(self, info: TensorInfo) -> Iterator[tuple[Words, Counters]]:
        axis = self._axes[info.name] % len(info.shape)
        inner = math.prod(info.shape[axis + 1 :])
        # Whole groups, and a multiple of 8 weights, so that blocks meet at a byte of the bitmask.
        slab = self.group * inner
        slab *= 8 // math.gcd(8, slab) if slab else 1
        size = max(BLOCK // (slab * info.dtype.size // 8), 1) * slab if slab else 8
        absolute = info.dtype.words.type(2 ** (info.dtype.size - 1) - 1)
        for words in word_blocks(self.network, info, size * info.dtype.size // 8):
            keys = (words & absolute).reshape(-1, self.group, inner).swapaxes(1, 2)
            counters = pattern_counters(np.ascontiguousarray(keys), self.patterns)
            yield words, np.ascontiguousarray(counters.swapaxes(1, 2)).reshape(-1)


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
