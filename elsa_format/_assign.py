"""The ways to give every weight its counter: magnitudes, N:M, a given N, nested checkpoints."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from elsa_format import _kernels
from elsa_format._checkpoint import Checkpoint, same_tensor
from elsa_format._dtypes import DTYPES, Dtype
from elsa_format._errors import CounterOutOfRange, InfeasibleLevels, NotNested, TensorMismatch
from elsa_format._header import TensorInfo, lay_out
from elsa_format._memory import BLOCK
from elsa_format._profile import MAX_LEVELS
from elsa_format._select import Cut, find_cut, magnitude_counters, pattern_counters
from elsa_format._writer import LevelSpec
from elsa_format.levels import Pattern, check_levels, kept_count, level_name

Scope = Literal["global", "uniform"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
Words = NDArray[Any]
Counters = NDArray[np.uint8]
Tick = Callable[[int], None]


class Assignment(ABC):
    """A way to give every weight its counter."""

    specs: list[LevelSpec]
    notes: tuple[str, ...] = ()
    """What the user should know about the levels."""
    passes = 0
    """How often the weights are read before they are written; for progress only."""

    def prepare(self, tensors: list[TensorInfo], tick: Tick) -> None:  # noqa: B027 - most need not
        """Look at all nested tensors before the first is written."""

    @abstractmethod
    def blocks(self, info: TensorInfo) -> Iterator[tuple[Words, Counters]]:
        """The tensor's weights and counters."""


def _words(network: Checkpoint, info: TensorInfo, size: int = BLOCK) -> Iterator[Words]:
    for block in network.blocks(info.name, size):
        yield block.view(info.dtype.words)


def one_shot(
    network: Checkpoint,
    levels: list[Fraction | Pattern],
    scope: Scope,
    axis: int,
    *,
    any_order: bool = False,
) -> Assignment:
    """Levels by magnitude; with `any_order`, tensors can then be written in any order."""
    check_levels(levels)
    patterns = [level for level in levels if isinstance(level, Pattern)]
    if patterns:
        return PatternLevels(network, patterns, axis)
    fractions = [level for level in levels if isinstance(level, Fraction)]
    return MagnitudeLevels(network, fractions, scope, any_order=any_order)


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
        self.passes = 3 if self._share_ties else 2
        self._cuts: dict[str, Cut] = {}
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
            cut = find_cut(keys, self._key.size - 1, keep, total)
            for info in lay_out(group).values():  # the order in which one file would hold them
                self._cuts[info.name] = cut
                if self._share_ties:
                    used = self._count_ties(info, cut, tick)
                    cut = Cut(cut.thresholds, np.maximum(cut.ties - used, 0))

    def blocks(self, info: TensorInfo) -> Iterator[tuple[Words, Counters]]:
        # Ties are used up in the order of the tensors in one file, then by index.
        for words in _words(self.network, info):
            yield words, magnitude_counters(self._keys(words, info.dtype), self._cuts[info.name])

    def _count_ties(self, info: TensorInfo, cut: Cut, tick: Tick) -> NDArray[np.int64]:
        """How many weights of a tensor are as large as each level's threshold."""
        prefixes = np.unique(cut.thresholds >> np.uint64(1))
        table = np.zeros((prefixes.size, 2), np.uint64)
        for words in self._all_keys(info):
            _kernels.histogram(words, 0, 1, prefixes, table)
            tick(words.size * info.dtype.size // 8)
        rows = np.searchsorted(prefixes, cut.thresholds >> np.uint64(1))
        return table[rows, (cut.thresholds & np.uint64(1)).astype(np.intp)].astype(np.int64)

    def _all_keys(self, info: TensorInfo) -> Iterator[Words]:
        for words in _words(self.network, info):
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


class PatternLevels(Assignment):
    """Keeps the N largest of every M neighbours along an axis."""

    def __init__(self, network: Checkpoint, patterns: list[Pattern], axis: int) -> None:
        self.network, self.patterns, self.axis = network, patterns, axis
        self.group = math.lcm(*(pattern.m for pattern in patterns))
        self.specs = [LevelSpec(str(p), target=float(p.sparsity), pattern=str(p)) for p in patterns]

    def prepare(self, tensors: list[TensorInfo], tick: Tick) -> None:
        for info in tensors:
            rank = len(info.shape)
            if not -rank <= self.axis < rank:
                raise InfeasibleLevels(
                    f"{self.network.path}: tensor {info.name!r}: no axis {self.axis} in shape "
                    f"{list(info.shape)}",
                    "{exclude} leaves it out",
                    exclude=info.name,
                )
            if info.shape[self.axis] % self.group:
                raise InfeasibleLevels(
                    f"{self.network.path}: tensor {info.name!r}: {info.shape[self.axis]} weights "
                    f"along axis {self.axis} are not a multiple of {self.group}",
                    "{exclude} leaves it out",
                    exclude=info.name,
                )

    def blocks(self, info: TensorInfo) -> Iterator[tuple[Words, Counters]]:
        axis = self.axis % len(info.shape)
        inner = math.prod(info.shape[axis + 1 :])
        # Whole groups, and a multiple of 8 weights, so that blocks meet at a byte of the bitmask.
        slab = self.group * inner
        slab *= 8 // math.gcd(8, slab) if slab else 1
        size = max(BLOCK // (slab * info.dtype.size // 8), 1) * slab if slab else 8
        absolute = info.dtype.words.type(2 ** (info.dtype.size - 1) - 1)
        for words in _words(self.network, info, size * info.dtype.size // 8):
            keys = (words & absolute).reshape(-1, self.group, inner).swapaxes(1, 2)
            counters = pattern_counters(np.ascontiguousarray(keys), self.patterns)
            yield words, np.ascontiguousarray(counters.swapaxes(1, 2)).reshape(-1)


class GivenCounters(Assignment):
    """The paper's N: t = frozen at step t; 0, or T+1 where T is stated, = only dense."""

    def __init__(
        self, network: Checkpoint, given: Checkpoint, nested: Sequence[str], levels: int | None
    ) -> None:
        self.network, self.given = network, given
        for name, info in given.tensors.items():
            if name not in network.tensors:
                raise TensorMismatch(f"{given.path}: tensor {name!r} is not in {network.path}")
            if info.dtype.numpy is None or info.dtype.numpy.kind not in "iu":
                raise TensorMismatch(
                    f"{given.path}: tensor {name!r}: dtype {info.dtype.name}, expected integers"
                )
            same_tensor(network.tensors[name], info, given.path, dtype=False)
            if name not in nested and not network.tensors[name].dtype.nestable:
                raise TensorMismatch(f"{network.path}: tensor {name!r} cannot carry counters")
        self.levels = self._count_levels(nested) if levels is None else levels
        if not 1 <= self.levels <= MAX_LEVELS:
            problem = CounterOutOfRange if levels is None else InfeasibleLevels
            raise problem(f"{given.path}: {self.levels} levels, expected 1..{MAX_LEVELS}")
        self.specs = [LevelSpec(f"level {t}") for t in range(1, self.levels + 1)]

    def _count_levels(self, nested: Sequence[str]) -> int:
        """T is the largest counter."""
        largest, zeros = 0, False
        for name in nested:
            for block in self._integers(self.given.tensors[name]):
                if block.size:
                    largest = max(largest, int(block.max()))
                    zeros = zeros or int(block.min()) <= 0
        if largest > 1 and not zeros:
            self.notes = (
                f"no counter is 0, so level {largest} keeps every weight; if {largest} stands for "
                f"the dense network, state the number of levels: {largest - 1}",
            )
        return largest

    def _integers(self, info: TensorInfo) -> Iterator[NDArray[Any]]:
        # As many counters a block as there are weights in a block of the network.
        weights = self.network.tensors[info.name]
        size = BLOCK // (weights.dtype.size // 8) * (info.dtype.size // 8)
        for block in self.given.blocks(info.name, size):
            assert info.dtype.numpy is not None
            yield block.view(info.dtype.numpy)

    def blocks(self, info: TensorInfo) -> Iterator[tuple[Words, Counters]]:
        given, position = self.given.tensors[info.name], 0
        for words, steps in zip(_words(self.network, info), self._integers(given), strict=True):
            top = int(steps.max(initial=0))
            low = 0 if steps.dtype.kind == "u" else int(steps.min(initial=0))
            if not 0 <= low <= top <= self.levels + 1:
                at = int(((steps < 0) | (steps > self.levels + 1)).argmax())
                raise CounterOutOfRange(
                    f"{self.given.path}: tensor {info.name!r}: weight {position + at} has counter "
                    f"{steps[at]}, expected 0..{self.levels + 1}"
                )
            counters = steps.astype(np.uint8, copy=False)
            if top > self.levels:  # T + 1 means 0, and 256 became it
                counters = np.where(counters > self.levels, np.uint8(0), counters)
            yield words, counters
            position += words.size


class NestedCheckpoints(Assignment):
    """Sparse checkpoints, sparsest first; what one keeps, the next keep with the same bits."""

    def __init__(self, network: Checkpoint, levels: list[Checkpoint]) -> None:
        self.network, self.levels = network, levels
        self.specs = [LevelSpec(f"level {t}") for t in range(1, len(levels) + 1)]
        for level in levels:
            for name in level.tensors:
                if name not in network.tensors:
                    raise TensorMismatch(f"{level.path}: tensor {name!r} is not in {network.path}")
            for info in network.tensors.values():
                same_tensor(info, level.tensors.get(info.name), level.path)

    def blocks(self, info: TensorInfo) -> Iterator[tuple[Words, Counters]]:
        position = 0
        levels = [_words(level, info) for level in self.levels]
        for words, *sparse in zip(_words(self.network, info), *levels, strict=True):
            counters = np.zeros(words.size, np.uint8)
            for t, (level, kept) in enumerate(zip(self.levels, sparse, strict=True), 1):
                at = _kernels.nest(words, kept, t, counters)
                if at < 0:
                    continue
                assert info.dtype.numpy is not None
                what = "is zero, but a sparser level keeps it"
                if kept[at : at + 1].view(info.dtype.numpy)[0] != 0:
                    what = "differs from the dense network's"
                raise NotNested(
                    f"{level.path}: tensor {info.name!r}: weight {position + at} {what}"
                )
            yield words, counters
            position += words.size
