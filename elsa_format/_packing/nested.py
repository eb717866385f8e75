"""Levels by sparse checkpoints, each nested in the next."""

from collections.abc import Iterator

import numpy as np

from elsa_format import _kernels
from elsa_format._container.header import TensorInfo
from elsa_format._errors import NotNested, TensorMismatch
from elsa_format._memory import BLOCK
from elsa_format._packing.assignment import Assignment, Counters, Words, words_of
from elsa_format._packing.checkpoint import Checkpoint, same_tensor
from elsa_format._writer import LevelSpec


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
        levels = [words_of(level, info, size) for level in self.levels]
        for words, *sparse in zip(words_of(self.network, info, size), *levels, strict=True):
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
