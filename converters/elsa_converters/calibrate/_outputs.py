"""What a network's outputs are compared by, with the original's."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from elsa_converters._errors import InvalidData
from elsa_converters.calibrate._model import Array

Classes = Literal["probabilities", "logits"] | None
FLOOR = 0.1
"""What rows of a head count that never decide, where all together count one."""
KEPT = 1 << 24
"""Numbers of the original's outputs that stay in memory, to be asked again and again."""
_SMALL = np.float32(1e-8)


def probabilities(outputs: Array, classes: Classes) -> Array:
    """The first output as probabilities of classes."""
    if classes == "logits":
        outputs = np.exp(outputs - outputs.max(-1, keepdims=True))
        outputs = outputs / outputs.sum(-1, keepdims=True)
    return outputs


def check_finite(outputs: Sequence[Array]) -> None:
    """Refuse samples for which the original has no answer."""
    if not all(np.isfinite(output).all() for output in outputs):
        raise InvalidData(
            "the network's outputs are NaN or infinite with these samples; "
            "take samples that it can process"
        )


@dataclass
class Answers:
    """What the original says of the samples: how much each class matters, which it chose."""

    classes: Classes
    items: int = 0
    spread: Array = field(default_factory=lambda: np.zeros(0))
    chosen: Array = field(default_factory=lambda: np.zeros(0, np.int64))

    def add(self, outputs: Array) -> bool:
        """Take in the first output for some items; whether they have as many classes as others."""
        found = probabilities(outputs, self.classes)
        if self.items and found.shape[-1] != len(self.chosen):
            return False
        if not self.items:
            self.spread = np.zeros(found.shape[-1])
            self.chosen = np.zeros(found.shape[-1], np.int64)
        self.items += len(found)
        self.spread += (found * (1 - found)).sum(0, dtype=np.float64)
        self.chosen += np.bincount(found.argmax(-1), minlength=found.shape[-1])
        return True

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


class Reference:
    """The original's outputs for some items of each batch, that others are compared with."""

    def __init__(self, outputs: Iterable[list[Array]], classes: Classes, batches: int) -> None:
        self._classes, self._batches = classes, batches
        self._batch_outputs = [self._some(found) for found in outputs]
        parts = list(zip(*self._batch_outputs, strict=True))
        self._spread = [_variation(part) for part in parts]

    def distance(self, outputs: Iterable[list[Array]]) -> float:
        """How far outputs are from the original's: nats of classes, else relative to variance."""
        lost, items = 0.0, 0
        for one, other in zip(self._batch_outputs, map(self._some, outputs), strict=True):
            if self._classes is None:
                pairs = zip(one, other, self._spread, strict=True)
                lost += sum(float(np.square(a - b).sum()) / size for a, b, size in pairs)
            else:
                p, q = one[0], other[0]
                lost += float((p * np.log((p + _SMALL) / (q + _SMALL))).sum())
                items += len(p)
        return lost / len(self._spread) if self._classes is None else lost / max(items, 1)

    def _some(self, outputs: list[Array]) -> list[Array]:
        if self._classes is not None:
            return [probabilities(self._fewer(outputs[0], 1), self._classes)]
        return [self._fewer(output, len(outputs)) for output in outputs]

    def _fewer(self, output: Array, outputs: int) -> Array:
        most = max(1, KEPT // (self._batches * outputs * max(output.shape[-1], 1)))
        return output[:: max(1, -(-len(output) // most))]


def _variation(parts: Sequence[Array]) -> float:
    """The squares of what an output differs from its mean, summed; never zero.

    Where batches have different numbers of features, such as the columns of pictures, all are one.
    """
    if len({part.shape[-1] for part in parts}) > 1:
        parts = [part.reshape(-1, 1) for part in parts]
    output = np.concatenate(parts)
    if not len(output):
        return 1e-12
    return max(float(np.square(output - output.mean(0)).sum()), 1e-12)


@dataclass
class Compared:
    """A network's outputs beside the original's."""

    classes: Classes
    differing: Array = field(default_factory=lambda: np.zeros(0))
    """Of each output, the squares of the differences, summed."""
    size: Array = field(default_factory=lambda: np.zeros(0))
    same: int = 0
    items: int = 0

    def add(self, reference: Sequence[Array], outputs: Sequence[Array]) -> None:
        """Take in the outputs for some items."""
        if not self.items:
            self.differing, self.size = np.zeros(len(reference)), np.zeros(len(reference))
        for at, (one, other) in enumerate(zip(reference, outputs, strict=True)):
            self.differing[at] += np.square(one - other, dtype=np.float64).sum()
            self.size[at] += np.square(one, dtype=np.float64).sum()
        self.items += len(reference[0])
        if self.classes is not None:
            self.same += int((reference[0].argmax(-1) == outputs[0].argmax(-1)).sum())

    @property
    def relative_error(self) -> float:
        """The length of the difference, relative to that of the original's outputs.

        Outputs that hold nothing, or zeros in both, do not count.
        """
        some = (self.size > 0) | (self.differing > 0)
        if not some.any():
            return 0.0
        return float(np.sqrt((self.differing[some] / np.maximum(self.size[some], 1e-30)).mean()))

    @property
    def agreement(self) -> float | None:
        """How often the likeliest class is the original's."""
        return None if self.classes is None else self.same / max(self.items, 1)


def side_by_side(outputs: Sequence[Iterator[list[Array]]]) -> Iterator[tuple[list[Array], ...]]:
    """The outputs of several networks, batch after batch."""
    return zip(*outputs, strict=True)
