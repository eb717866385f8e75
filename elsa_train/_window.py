"""What a phase tells while it runs: measures of its steps, once they are known."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np

from elsa_train._errors import NonFiniteLoss
from elsa_train._plan import Plan

CHECK_EVERY, QUEUED = 20, 2


class Report(NamedTuple):
    """What a phase tells while it runs."""

    phase: str
    step: int
    steps: int
    loss: float
    accuracy: float
    sparsity: float
    advanced: int
    labels: int
    unit: str
    losses: dict[str, float]
    """In joint training, by level."""


Watch = Callable[[Report], None]


class Window:
    """Steps whose loss is not yet told: the newest are not waited for, to keep work queued."""

    def __init__(self, plan: Plan, labels: int, unit: str, watch: Watch) -> None:
        self._plan, self._labels, self._unit, self._watch = plan, labels, unit, watch
        self._pending: list[tuple[int | None, jax.Array, jax.Array]] = []

    def add(
        self, step: int, level: int | None, loss: jax.Array, right: jax.Array, sparsity: jax.Array
    ) -> None:
        """Take a step's measures, and report those that are ready."""
        self._pending.append((level, loss, right))
        last = step + 1 == self._plan.steps
        if len(self._pending) < CHECK_EVERY + QUEUED and not last:
            return
        cut = len(self._pending) if last else -QUEUED
        ready, self._pending = self._pending[:cut], self._pending[cut:]
        losses = [float(loss) for _, loss, _ in ready]
        if not np.all(np.isfinite(losses)):
            raise NonFiniteLoss(f"{self._plan.name}: the loss is {losses[-1]} at step {step + 1}")
        labels = len(ready) * self._labels
        by_level: dict[str, list[float]] = {}
        for (level, _, _), found in zip(ready, losses, strict=True):
            if level is not None:
                by_level.setdefault(self._plan.level_name(level), []).append(found)
        self._watch(
            Report(
                phase=self._plan.name,
                step=step + 1,
                steps=self._plan.steps,
                loss=float(np.mean(losses)),
                accuracy=sum(int(right) for _, _, right in ready) / labels,
                sparsity=float(sparsity),
                advanced=len(ready),
                labels=labels,
                unit=self._unit,
                losses={name: float(np.mean(found)) for name, found in by_level.items()},
            )
        )
