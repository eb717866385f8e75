"""Which weights to keep: scores, scopes, and the rule of gradual magnitude pruning.

Frozen weights get the highest score, so they are always among the kept (paper, Choice of
Subroutines). Selection is exact, ties go to the lower index, and it runs on the device without a
sort: thresholds are found bit by bit on the integer patterns of the scores.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from elsa_format.levels import Pattern, kept_count
from elsa_train._errors import InfeasibleTraining
from elsa_train._levels import Level, check_blocks, check_levels
from elsa_train._schedule import Schedule
from elsa_train._tree import flatten, names

PyTree = Any
ScopeName = Literal["global", "uniform", "nm"]
Score = Callable[[PyTree, PyTree], PyTree]
FROZEN = 0xFFFFFFFF


def magnitude(params: PyTree, grads: PyTree) -> PyTree:
    """Score |theta|."""
    del grads
    return jax.tree.map(jnp.abs, params)


def gradient(params: PyTree, grads: PyTree) -> PyTree:
    """Score |dL/dtheta|."""
    del params
    return jax.tree.map(jnp.abs, grads)


def saliency(params: PyTree, grads: PyTree) -> PyTree:
    """Score |theta * dL/dtheta|."""
    return jax.tree.map(lambda p, g: jnp.abs(p * g), params, grads)


SCORES: dict[str, Score] = {"gradient": gradient, "magnitude": magnitude, "saliency": saliency}


@dataclass(frozen=True)
class Scope:
    """Which weights compete for the budget of a level, and which are never pruned.

    global: all prunable weights together; uniform: each tensor for itself; nm: each block of M
    neighbours along `axis` for itself. `prune` and `exclude` are regular expressions on names.

    >>> scope = Scope("uniform", exclude="^head/")
    >>> scope.matches("conv/kernel"), scope.matches("conv/bias"), scope.matches("head/kernel")
    (True, False, False)
    >>> params = {"conv": {"kernel": jnp.ones((10, 10))}, "head": {"kernel": jnp.ones((10, 2))}}
    >>> scope.prunable(params), scope.budgets(params, Level("90%", 0.9))
    ({'conv': {'kernel': True}, 'head': {'kernel': False}}, (10,))
    >>> scope.check(params, [Level("95%", 0.95), Level("90%", 0.9)])
    2
    """

    kind: ScopeName = "global"
    prune: str = r"kernel$"
    exclude: str = ""
    axis: int = -1

    def prunable(self, params: PyTree) -> PyTree:
        """Tell for each leaf whether it may lose weights."""
        return jax.tree.map(self.matches, names(params))

    def matches(self, name: str) -> bool:
        """Tell whether the tensor of this name may lose weights."""
        excluded = self.exclude and re.search(self.exclude, name)
        return not excluded and bool(re.search(self.prune, name))

    def check(
        self,
        params: PyTree,
        levels: Sequence[Level],
        *,
        bits: int | None = None,
        dtype: str = "float32",
    ) -> int:
        """Refuse levels that can't be trained on these weights, and return tau."""
        bits = check_levels(levels, bits=bits, dtype=dtype, pattern_scope=self.kind == "nm")
        shapes = {n: p.shape for n, p in self._pruned(params).items()}
        if self.kind == "nm":
            check_blocks(shapes, levels, self.axis)
        for sparser, denser in pairwise(levels):
            before, after = sum(self.budgets(params, sparser)), sum(self.budgets(params, denser))
            if after <= before:
                raise InfeasibleTraining(
                    f"level {denser.name} keeps {after} weights, no more than the {before} that "
                    f"level {sparser.name} has frozen"
                )
        return bits

    def budgets(self, params: PyTree, level: Level) -> tuple[int, ...]:
        """Return how many weights each group keeps: one group for global, one per tensor else."""
        sizes = [p.size for p in self._pruned(params).values()]
        groups = [sum(sizes)] if self.kind == "global" else sizes
        return tuple(kept_count(1 - level.density, n) for n in groups)

    def select(
        self, scores: PyTree, n: PyTree, budgets: Sequence[int], pattern: Pattern | None
    ) -> PyTree:
        """Return what to keep: the best-scored weights within the budgets, frozen ones first."""
        prunable = tuple(jax.tree.leaves(self.prunable(n)))
        if self.kind == "nm":
            assert pattern is not None
            return _select_blocks(scores, n, prunable, pattern, self.axis)
        counts = jnp.asarray(budgets, jnp.uint32)
        return _select(scores, n, counts, prunable, self.kind == "global")

    def _pruned(self, params: PyTree) -> dict[str, Any]:
        chosen = flatten(self.prunable(params))
        found = {name: leaf for name, leaf in flatten(params).items() if chosen[name]}
        if not found:
            raise InfeasibleTraining(
                f"no tensor matches prune={self.prune!r} exclude={self.exclude!r}"
            )
        return found


def keys(scores: jax.Array, n: jax.Array) -> jax.Array:
    """Map scores to integers in the same order, frozen weights above all, NaN just below."""
    word: jax.Array = lax.bitcast_convert_type(jnp.abs(scores).astype(jnp.float32), jnp.uint32)
    return jnp.where(n > 0, jnp.uint32(FROZEN), word)


@partial(jax.jit, static_argnums=(3, 4))
def _select(
    scores: PyTree, n: PyTree, budgets: jax.Array, prunable: tuple[bool, ...], together: bool
) -> PyTree:
    leaves, tree = jax.tree.flatten(jax.tree.map(keys, scores, n))
    chosen = [k for k, use in zip(leaves, prunable, strict=True) if use]
    if sum(k.size for k in chosen) >= 2**32:
        raise InfeasibleTraining("more than 2**32 prunable weights")
    group = [0 if together else j for j in range(len(chosen))]
    order, position = [], 0
    for k in chosen:
        order.append(position + lax.iota(jnp.uint32, k.size).reshape(k.shape))
        position += k.size if together else 0

    def count(test: Callable[[int], jax.Array]) -> jax.Array:
        """Count, per group, where the test of each leaf holds."""
        totals = jnp.stack([jnp.sum(test(j), dtype=jnp.uint32) for j in range(len(chosen))])
        return jnp.sum(totals, keepdims=True) if together else totals

    def largest(enough: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """Return the largest x, per group, for which `enough` holds, from the top bit down."""

        def bit(i: jax.Array, x: jax.Array) -> jax.Array:
            candidate = x | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
            return jnp.where(enough(candidate), candidate, x)

        return jnp.asarray(lax.fori_loop(0, 32, bit, jnp.zeros_like(budgets)))

    def tied(j: int, limit: jax.Array) -> jax.Array:
        return jnp.logical_and(chosen[j] == threshold[group[j]], order[j] < limit[group[j]])

    threshold = largest(lambda x: count(lambda j: chosen[j] >= x[group[j]]) >= budgets)
    spare = budgets - count(lambda j: chosen[j] > threshold[group[j]])
    ties = count(lambda j: chosen[j] == threshold[group[j]])
    limit = lax.cond(
        jnp.all(ties == spare),
        lambda: jnp.full_like(budgets, FROZEN),
        lambda: largest(lambda x: count(lambda j: tied(j, x)) <= spare),
    )
    kept = iter([(chosen[j] > threshold[group[j]]) | tied(j, limit) for j in range(len(chosen))])
    return jax.tree.unflatten(
        tree,
        [
            next(kept) if use else jnp.ones(k.shape, bool)
            for k, use in zip(leaves, prunable, strict=True)
        ],
    )


@partial(jax.jit, static_argnums=(2, 3, 4))
def _select_blocks(
    scores: PyTree, n: PyTree, prunable: tuple[bool, ...], pattern: Pattern, axis: int
) -> PyTree:
    leaves, tree = jax.tree.flatten(jax.tree.map(keys, scores, n))
    keep, length = pattern.n, pattern.m

    def select(k: jax.Array) -> jax.Array:
        moved = jnp.moveaxis(k, axis, -1)
        block = moved.reshape(*moved.shape[:-1], -1, length)
        rank = jnp.zeros(block.shape, jnp.uint32)
        for j in range(length):
            other = block[..., j : j + 1]
            earlier = j < jnp.arange(length)
            rank += (other > block) | ((other == block) & earlier)
        return jnp.moveaxis((rank < keep).reshape(moved.shape), -1, axis)

    kept = [
        select(k) if use else jnp.ones(k.shape, bool)
        for k, use in zip(leaves, prunable, strict=True)
    ]
    return jax.tree.unflatten(tree, kept)


@dataclass(frozen=True)
class Pruner:
    """Gradual or one-shot pruning of one level: the mask rule of the bundled sparsify routines.

    >>> pruner = Pruner(Scope(), Level("50%", 0.5), Schedule(0, 0, 1))
    >>> params = {"kernel": jnp.array([0.5, -2.0, 0.1, 3.0])}
    >>> frozen = {"kernel": jnp.array([0, 0, 1, 0])}  # is kept, small as it is
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
        final = self.scope.budgets(params, self.level)
        full = self.scope.budgets(params, Level("dense", 0.0))
        progress = self.schedule.progress(step)
        budgets = [round(a - (a - b) * progress) for a, b in zip(full, final, strict=True)]
        return self.scope.select(SCORES[self.score](params, grads), n, budgets, self.level.pattern)


def keep_all(params: PyTree) -> PyTree:
    """Return the mask that prunes nothing."""
    return jax.tree.map(lambda p: jnp.ones(p.shape, bool), params)


def apply_mask(params: PyTree, kept: PyTree) -> PyTree:
    """Zero what is not kept."""
    return jax.tree.map(lambda p, k: jnp.where(k, p, jnp.zeros_like(p)), params, kept)
