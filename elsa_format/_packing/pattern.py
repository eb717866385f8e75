"""N:M levels: the N largest of every M neighbours."""

import math
from collections.abc import Iterator, Mapping

import numpy as np

from elsa_format._container.header import TensorInfo
from elsa_format._errors import InfeasibleLevels
from elsa_format._memory import BLOCK
from elsa_format._packing.assignment import Assignment, Counters, Tick, Words, words_of
from elsa_format._packing.checkpoint import Checkpoint
from elsa_format._packing.select import pattern_counters
from elsa_format._writer import LevelSpec
from elsa_format.levels import Pattern


def common_group(patterns: list[Pattern]) -> int:
    """How many neighbours are looked at together."""
    return math.lcm(*(pattern.m for pattern in patterns))


class PatternLevels(Assignment):
    """Keeps the N largest of every M neighbours along an axis, which tensors may have their own."""

    def __init__(
        self, network: Checkpoint, patterns: list[Pattern], axis: int | Mapping[str, int]
    ) -> None:
        self.network, self.patterns, self._axis = network, patterns, axis
        self.group = common_group(patterns)
        self.specs = [LevelSpec(str(p), target=float(p.sparsity), pattern=str(p)) for p in patterns]

    def _along(self, info: TensorInfo) -> int:
        return self._axis if isinstance(self._axis, int) else self._axis[info.name]

    def prepare(self, tensors: list[TensorInfo], tick: Tick) -> None:
        for info in tensors:
            rank, axis = len(info.shape), self._along(info)
            if not -rank <= axis < rank:
                raise InfeasibleLevels(
                    f"{self.network.path}: tensor {info.name!r}: no axis {axis} in shape "
                    f"{list(info.shape)}",
                    "{exclude} leaves it out",
                    exclude=info.name,
                )
            if info.shape[axis] % self.group:
                raise InfeasibleLevels(
                    f"{self.network.path}: tensor {info.name!r}: {info.shape[axis]} weights "
                    f"along axis {axis} are not a multiple of {self.group}",
                    "{exclude} leaves it out",
                    exclude=info.name,
                )

    def blocks(self, info: TensorInfo) -> Iterator[tuple[Words, Counters]]:
        axis = self._along(info) % len(info.shape)
        inner = math.prod(info.shape[axis + 1 :])
        # Whole groups, and a multiple of 8 weights, so that blocks meet at a byte of the bitmask.
        slab = self.group * inner
        slab *= 8 // math.gcd(8, slab) if slab else 1
        size = max(BLOCK // (slab * info.dtype.size // 8), 1) * slab if slab else 8
        absolute = info.dtype.words.type(2 ** (info.dtype.size - 1) - 1)
        for words in words_of(self.network, info, size * info.dtype.size // 8):
            keys = (words & absolute).reshape(-1, self.group, inner).swapaxes(1, 2)
            counters = pattern_counters(np.ascontiguousarray(keys), self.patterns)
            yield words, np.ascontiguousarray(counters.swapaxes(1, 2)).reshape(-1)
