"""What a network's outputs are compared by, with the original's."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from elsa_converters.calibrate._model import Array

Classes = Literal["probabilities", "logits"] | None
FLOOR = 0.1
"""What rows of a head count that never decide, where all together count one."""


def probabilities(outputs: Array, classes: Classes) -> Array:
    """The first output as probabilities of classes."""
    if classes == "logits":
        outputs = np.exp(outputs - outputs.max(-1, keepdims=True))
        outputs = outputs / outputs.sum(-1, keepdims=True)
    return outputs


@dataclass
class Answers:
    """What the original says of the samples: how much each class matters, which it chose."""

    classes: Classes
    items: int = 0
    spread: Array = field(default_factory=lambda: np.zeros(0))
    chosen: Array = field(default_factory=lambda: np.zeros(0, np.int64))

    def add(self, outputs: Array) -> None:
        """Take in the first output for some items."""
        found = probabilities(outputs, self.classes)
        if not self.items:
            self.spread, self.chosen = np.zeros(found.shape[-1]), self.chosen.copy()
            self.chosen = np.zeros(found.shape[-1], np.int64)
        self.items += len(found)
        self.spread += (found * (1 - found)).sum(0, dtype=np.float64)
        self.chosen += np.bincount(found.argmax(-1), minlength=found.shape[-1])

    def matters(self) -> Array:
        """The weight of each row of the head: a diagonal Gauss-Newton matrix of the softmax."""
        weights = np.sqrt(np.maximum(self.spread / max(self.items, 1), 0))
        size = np.sqrt(np.square(weights).mean()) or 1.0
        weights = weights / size + FLOOR
        return np.asarray(weights / np.sqrt(np.square(weights).mean()), np.float32)

    @property
    def unseen(self) -> Array:
        """The classes that no item was given."""
        return np.flatnonzero(self.chosen == 0)


def distance(reference: Sequence[Array], outputs: Sequence[Array], classes: Classes) -> float:
    """How far outputs are from the original's: nats of classes, else relative to the variance."""
    if classes is not None:
        p, q = (probabilities(one[0], classes) for one in (reference, outputs))
        small = np.float32(1e-8)
        return float((p * np.log((p + small) / (q + small))).sum(-1).mean())
    differing = sum(float(np.square(a - b).sum()) for a, b in zip(reference, outputs, strict=True))
    spread = sum(float(np.square(a - a.mean(0)).sum()) for a in reference)
    return differing / max(spread, 1e-12)


@dataclass
class Compared:
    """A network's outputs beside the original's."""

    classes: Classes
    differing: float = 0.0
    size: float = 0.0
    same: int = 0
    items: int = 0

    def add(self, reference: Sequence[Array], outputs: Sequence[Array]) -> None:
        """Take in the outputs for some items."""
        for one, other in zip(reference, outputs, strict=True):
            self.differing += float(np.square(one - other, dtype=np.float64).sum())
            self.size += float(np.square(one, dtype=np.float64).sum())
        self.items += len(reference[0])
        if self.classes is not None:
            self.same += int((reference[0].argmax(-1) == outputs[0].argmax(-1)).sum())

    @property
    def relative_error(self) -> float:
        """The length of the difference, relative to that of the original's outputs."""
        return float(np.sqrt(self.differing / max(self.size, 1e-30)))

    @property
    def agreement(self) -> float | None:
        """How often the likeliest class is the original's."""
        return None if self.classes is None else self.same / max(self.items, 1)


def side_by_side(outputs: Sequence[Iterator[list[Array]]]) -> Iterator[tuple[list[Array], ...]]:
    """The outputs of several networks, batch after batch."""
    return zip(*outputs, strict=True)


def joined(outputs: Iterable[list[Array]]) -> list[Array]:
    """All batches' outputs as one."""
    return [np.concatenate(parts) for parts in zip(*outputs, strict=True)]
