"""A phase of training: how long, at which rate, by which rule; and how far it is."""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from elsa_train._joint import DENSE, Joint
from elsa_train._multilevel import Network

PyTree = Any


class Carry(NamedTuple):
    """What a step changes."""

    params: PyTree
    state: PyTree
    optimizer: PyTree


class Phase(NamedTuple):
    """A phase in progress: all that a resumed run needs of it."""

    step: int
    carry: Carry
    kept: PyTree
    """The mask of a sparsify phase; in joint training the counters."""

    @property
    def network(self) -> Network:
        """Return the network as it is."""
        return Network(self.carry.params, self.carry.state)


class MaskRule(Protocol):
    """What decides the mask of a sparsify phase."""

    @property
    def needs_gradients(self) -> bool:
        """Tell whether `mask` looks at the gradients."""
        ...

    def updates_at(self, step: int) -> bool:
        """Tell whether the mask changes before this step."""
        ...

    def mask(self, params: PyTree, grads: PyTree, n: PyTree, step: int) -> PyTree:
        """Return what to keep from this step on."""
        ...


@dataclass(frozen=True)
class Plan:
    """One phase: its number in the run (which decides its random numbers), length and rate."""

    number: int
    name: str
    steps: int
    peak: float
    warmup: int
    rule: MaskRule | Joint | None = None

    @property
    def revives_at(self) -> int | None:
        """Return the step before which weights that stayed at zero are drawn anew.

        The first at which the mask changes: all that has a gradient has moved by then, whether or
        not a densify phase came before.
        """
        if self.rule is None or isinstance(self.rule, Joint):
            return None
        return next((step for step in range(self.steps) if self.rule.updates_at(step)), None)

    def level_name(self, t: int) -> str:
        """Return what a level of joint training is called."""
        assert isinstance(self.rule, Joint)
        return self.rule.levels[t - 1].name if t != DENSE else "dense"

    def rate(self, step: int) -> float:
        """Return the learning rate: linear warmup, then half a cosine."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.peak * 0.5 * (1 + float(np.cos(np.pi * done)))
