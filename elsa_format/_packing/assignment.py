"""What gives every weight its counter: the interface, and levels that are given."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elsa_format import _kernels
from elsa_format._container import TensorInfo
from elsa_format._counters import MAX_LEVELS, Words
from elsa_format._errors import CounterOutOfRange, InfeasibleLevels, NotNested, TensorMismatch
from elsa_format._memory import BLOCK
from elsa_format._packing import Checkpoint, same_tensor, word_blocks
from elsa_format._profile import MetricInfo
from elsa_format._threads import Progress
from elsa_format._writer import LevelSpec
from elsa_format.levels import Pattern, level_name, zeros_of

Counters = NDArray[np.uint8]
Tick = Callable[[int], None]
Append = Callable[[str, NDArray[Any]], None]
"""Stores the next bytes of a tensor."""


class Assignment(ABC):
    """A way to give every weight its counter."""

    specs: list[LevelSpec]
    notes: tuple[str, ...] = ()
    """What the user should know about the levels."""
    defaults: tuple[str, ...] = ()
    """What was chosen because no option says otherwise."""
    empty_layers_advice = ""
    """What helps, appended to a note, where a level keeps next to nothing of a tensor."""
    passes = 0
    """How often the weights are read before they are written; for progress only."""
    metrics: Mapping[str, MetricInfo] = {}
    """What `solve` measures every level and the dense network by."""
    measured: Sequence[Mapping[str, float]] = ()
    """After `solve`: the metrics of each level, then of the dense network."""

    def solve(self, append: Append, progress: Progress) -> None:  # noqa: B027 - most have counters
        """Store tensors whose values are made together with their counters."""

    def prepare(self, tensors: list[TensorInfo], tick: Tick) -> None:  # noqa: B027 - most need not
        """Look at all nested tensors before the first is written."""

    @abstractmethod
    def blocks(self, info: TensorInfo) -> Iterator[tuple[Words, Counters]]:
        """The tensor's weights and counters."""


def specs_of(sparsities: Iterable[Fraction | Pattern]) -> list[LevelSpec]:
    """What is told of levels that are asked for by sparsity.

    >>> specs_of([Fraction(9, 10)])[0].name
    '90%'
    """
    return [
        LevelSpec(
            level_name(wanted),
            target=float(zeros_of(wanted)),
            pattern=str(wanted) if isinstance(wanted, Pattern) else None,
        )
        for wanted in sparsities
    ]


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
        for words, steps in zip(
            word_blocks(self.network, info), self._integers(given), strict=True
        ):
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
        size = BLOCK // 2  # of each: they share the cache
        levels = [word_blocks(level, info, size) for level in self.levels]
        for words, *sparse in zip(word_blocks(self.network, info, size), *levels, strict=True):
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
