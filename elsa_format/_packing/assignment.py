"""What gives every weight its counter: the interface of all ways to do so."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elsa_format._container.header import TensorInfo
from elsa_format._memory import BLOCK
from elsa_format._packing.checkpoint import Checkpoint
from elsa_format._writer import LevelSpec

Words = NDArray[Any]
Counters = NDArray[np.uint8]
Tick = Callable[[int], None]


class Assignment(ABC):
    """A way to give every weight its counter."""

    specs: list[LevelSpec]
    notes: tuple[str, ...] = ()
    """What the user should know about the levels."""
    starved_advice = ""
    """What helps, appended to a note, where a level keeps next to nothing of a tensor."""
    passes = 0
    """How often the weights are read before they are written; for progress only."""

    def prepare(self, tensors: list[TensorInfo], tick: Tick) -> None:  # noqa: B027 - most need not
        """Look at all nested tensors before the first is written."""

    @abstractmethod
    def blocks(self, info: TensorInfo) -> Iterator[tuple[Words, Counters]]:
        """The tensor's weights and counters."""


def words_of(network: Checkpoint, info: TensorInfo, size: int = BLOCK) -> Iterator[Words]:
    """The bit patterns of a tensor's weights, block by block."""
    for block in network.blocks(info.name, size):
        yield block.view(info.dtype.words)
