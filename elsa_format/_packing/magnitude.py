"""One-shot levels by magnitude, over all tensors or in each."""

from collections.abc import Iterator
from fractions import Fraction
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from elsa_format import _kernels
from elsa_format._container.dtypes import DTYPES, Dtype
from elsa_format._container.header import TensorInfo, lay_out
from elsa_format._packing.assignment import Assignment, Counters, Tick, Words, words_of
from elsa_format._packing.checkpoint import Checkpoint
from elsa_format._packing.select import Thresholds, find_thresholds, magnitude_counters
from elsa_format._writer import LevelSpec
from elsa_format.levels import kept_count, level_name

Scope = Literal["global", "uniform"]
SCOPES: tuple[Scope, ...] = get_args(Scope)


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
        self.specs = [LevelSpec(level_name(s), target=float(s)) for s in sparsities]
        self._share_ties = any_order and scope == "global"
        if scope == "global":
            self.starved_advice = "; --scope uniform gives each its share"
        self.passes = 3 if self._share_ties else 2
        self._cuts: dict[str, Thresholds] = {}
        self._key = DTYPES["F32"]

    def prepare(self, tensors: list[TensorInfo], tick: Tick) -> None:
        self._key = _common_dtype({info.dtype.name for info in tensors})
        groups = [tensors] if self.scope == "global" else [[info] for info in tensors]
        for group in groups:

            def keys(group: list[TensorInfo] = group) -> Iterator[Words]:
                for info in group:
                    for words in self._all_keys(info):
                        yield words
                        tick(words.size * info.dtype.size // 8)

            total = sum(info.elements for info in group)
            keep = [kept_count(s, total) for s in self.sparsities]
            cut = find_thresholds(keys, self._key.size - 1, keep, total)
            for info in lay_out(group).values():  # the order in which one file would hold them
                self._cuts[info.name] = cut
                if self._share_ties:
                    used = self._count_ties(info, cut, tick)
                    cut = Thresholds(cut.thresholds, np.maximum(cut.ties - used, 0))

    def blocks(self, info: TensorInfo) -> Iterator[tuple[Words, Counters]]:
        # Ties are used up in the order of the tensors in one file, then by index.
        for words in words_of(self.network, info):
            yield words, magnitude_counters(self._keys(words, info.dtype), self._cuts[info.name])

    def _count_ties(self, info: TensorInfo, cut: Thresholds, tick: Tick) -> NDArray[np.int64]:
        """How many weights of a tensor are as large as each level's threshold."""
        prefixes = np.unique(cut.thresholds >> np.uint64(1))
        table = np.zeros((prefixes.size, 2), np.uint64)
        for words in self._all_keys(info):
            _kernels.histogram(words, 0, 1, prefixes, table)
            tick(words.size * info.dtype.size // 8)
        rows = np.searchsorted(prefixes, cut.thresholds >> np.uint64(1))
        return table[rows, (cut.thresholds & np.uint64(1)).astype(np.intp)].astype(np.int64)

    def _all_keys(self, info: TensorInfo) -> Iterator[Words]:
        for words in words_of(self.network, info):
            yield self._keys(words, info.dtype)

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
