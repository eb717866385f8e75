"""Rules of a sparsify phase: what they keep, step by step.

A rule is a class: `updates_at` says when the mask changes, `mask` what is kept from then on. It
holds no state, so that a resumed run goes on as it would have. Whatever it keeps before, after its
schedule's end it keeps the level's budget, frozen weights first. Another rule is a subclass of
`Pruner` and a line in `RULES`.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax

from elsa_train._errors import InfeasibleTraining
from elsa_train._levels import Level, Schedule
from elsa_train._sparsify import SCORES, Scope, gradient, keep_all

PyTree = Any


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
class Pruner:
    """Gradual or one-shot pruning of one level.

    >>> pruner = Pruner(Scope(), Level("50%", 0.5), Schedule(0, 0, 1))
    >>> params = {"kernel": jax.numpy.array([0.5, -2.0, 0.1, 3.0])}
    >>> frozen = {"kernel": jax.numpy.array([0, 0, 1, 0])}  # is kept, small as it is
    >>> pruner.mask(params, None, frozen, step=0)["kernel"].tolist()
    [False, False, True, True]
    """

    scope: Scope
    level: Level
    schedule: Schedule
    score: str = "magnitude"

    @property
    def needs_gradients(self) -> bool:
        """Tell whether the score looks at the gradient."""
        return self.score != "magnitude"

    def updates_at(self, step: int) -> bool:
        """Tell whether the mask changes before this step."""
        return self.schedule.updates_at(step)

    def mask(self, params: PyTree, grads: PyTree, n: PyTree, step: int) -> PyTree:
        """Return what to keep from this step on; dispatched, not waited for."""
        return self._best(params, grads, n, self.schedule.progress(step))

    def _best(self, params: PyTree, grads: PyTree, n: PyTree, progress: float = 1.0) -> PyTree:
        """Return the best weights: of progress 0 all, of 1 those of the level."""
        final = self.scope.budgets(params, self.level)
        full = self.scope.budgets(params, Level("dense", 0.0))
        budgets = [round(a - (a - b) * progress) for a, b in zip(full, final, strict=True)]
        score = SCORES[self.score]
        return self.scope.select(params, n, budgets, self.level.pattern, score=score, grads=grads)


@dataclass(frozen=True)
class ACDC(Pruner):
    """Sparse and dense by turns, `schedule.every` steps each, dense first and sparse at the end.

    As in AC/DC (Peste et al. 2021), but that frozen weights are kept. What is let in again begins
    at zero.

    >>> rule = ACDC(Scope(), Level("50%", 0.5), Schedule(0, 5, 2))
    >>> params, n = {"kernel": jax.numpy.array([0.5, -2.0])}, {"kernel": jax.numpy.array([0, 0])}
    >>> [(step, rule.mask(params, None, n, step)["kernel"].tolist()) for step in (2, 4, 5)]
    [(2, [False, True]), (4, [True, True]), (5, [False, True])]
    """

    def __post_init__(self) -> None:
        """Refuse what would be pruned once."""
        check_turns("AC/DC", self.schedule)

    def mask(self, params: PyTree, grads: PyTree, n: PyTree, step: int) -> PyTree:
        """Return what to keep from this step on; dispatched, not waited for."""
        turn = (step - self.schedule.start) // self.schedule.every
        if step < self.schedule.end and turn % 2 == 0:
            return keep_all(params)
        return self._best(params, grads, n)


@dataclass(frozen=True)
class RigL(Pruner):
    """The level's sparsity from the first update on; then weights change places with others.

    As in RigL (Evci et al. 2020), but that it begins with the largest weights of a dense network,
    and that frozen weights are kept. Of a tensor's learnable weights that are kept the smallest
    leave, a part `drop` at first, none at the end, falling by a cosine. As many of the largest
    gradient take their places, beginning at zero.

    >>> rule = RigL(Scope(), Level("50%", 0.5), Schedule(0, 9, 1), drop=1.0)
    >>> params = {"kernel": jax.numpy.array([0.5, -2.0, 0.0, 0.0])}
    >>> grads = {"kernel": jax.numpy.array([0.0, 0.0, 7.0, 0.0])}
    >>> n = {"kernel": jax.numpy.array([0, 0, 0, 0])}
    >>> [(step, rule.mask(params, grads, n, step)["kernel"].tolist()) for step in (1, 5, 9)]
    [(1, [True, True, False, False]), (5, [False, True, True, False]), (9, [True, True, False, \
False])]
    """

    drop: float = 0.3

    def __post_init__(self) -> None:
        """Refuse what would be pruned once, and another score."""
        check_turns("RigL", self.schedule)
        if self.score != "magnitude":
            raise InfeasibleTraining(
                f"RigL drops weights by magnitude and adds them by gradient, not by {self.score!r}"
            )

    @property
    def needs_gradients(self) -> bool:
        """Tell that gradients say which weights are added."""
        return True

    def mask(self, params: PyTree, grads: PyTree, n: PyTree, step: int) -> PyTree:
        """Return what to keep from this step on; waits for how many weights are frozen and kept."""
        best = self._best(params, grads, n)
        first, end = self.schedule.first, self.schedule.end
        if not first < step < end:
            return best
        share = 0.5 * self.drop * (1 + math.cos(math.pi * (step - first) / (end - first)))
        # A tensor keeps its number of weights: by gradient alone some would lose all.
        each, pattern = replace(self.scope, kind="uniform"), self.level.pattern
        kept = each.count(best)
        stay = [k - round(share * (k - f)) for k, f in zip(kept, each.count(n), strict=True)]
        chosen = each.select(params, n, stay, None)

        def hold(c: jax.Array, b: jax.Array, n: jax.Array, prunable: bool) -> jax.Array:
            return ((c & b) | (n > 0)).astype(n.dtype) if prunable else n

        held = jax.tree.map(hold, chosen, best, n, self.scope.prunable(n))
        within = self.scope if pattern else each
        return within.select(params, held, kept, pattern, score=gradient, grads=grads)


def check_turns(rule: str, schedule: Schedule) -> None:
    """Refuse a schedule in which nothing could change after the first update."""
    if schedule.start + 2 * schedule.every >= schedule.end:
        raise InfeasibleTraining(
            f"{rule}: the mask changes every {schedule.every} steps from step {schedule.start} to "
            f"{schedule.end}, expected three times or more; lower mask_every, or lengthen the phase"
        )


RULES: dict[str, type[Pruner]] = {"acdc": ACDC, "gmp": Pruner, "rigl": RigL}
"""The rules that a recipe can name."""
