"""Which weights to keep: scores, scopes, masks.

Frozen weights get the highest score, so they are always among the kept (paper, Choice of
Subroutines). Selection is exact, ties go to the lower index, and it runs on the device without a
sort.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from elsa_format.levels import Pattern, kept_count
from elsa_train._errors import InfeasibleTraining
from elsa_train._levels import Level, check_blocks, check_levels
from elsa_train._method import count_frozen
from elsa_train._selection import Leaves, Score, Whole, fits, keys, rank_whole
from elsa_train._sharded.ranking import Ranking, select_largest
from elsa_train._sharded.wide import whole
from elsa_train._tree import flatten, names, sharding_of

PyTree = Any
ScopeName = Literal["global", "uniform", "nm"]


def magnitude(params: PyTree, grads: PyTree) -> PyTree:
    """Score |theta|; of a score, selection does not see the sign."""
    del grads
    return params


def gradient(params: PyTree, grads: PyTree) -> PyTree:
    """Score |dL/dtheta|."""
    del params
    return grads


def saliency(params: PyTree, grads: PyTree) -> PyTree:
    """Score |theta * dL/dtheta|."""
    return jax.tree.map(jnp.multiply, params, grads)


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
        return jax.tree.map(lambda n, p: self.matches(n) and p.size > 0, names(params), params)

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

    def count(self, found: PyTree) -> tuple[int, ...]:
        """Count what a mask keeps, or counters say is frozen, of each group; waits for it."""
        counts = map(whole, count_frozen(self._pruned(found)))
        return (sum(counts),) if self.kind == "global" else tuple(counts)

    def select(
        self,
        scores: PyTree,
        n: PyTree,
        budgets: Sequence[int],
        pattern: Pattern | None,
        *,
        score: Score = magnitude,
        grads: PyTree = None,
    ) -> PyTree:
        """Return what to keep: the best-scored weights within the budgets, frozen ones first.

        Masks lie where the scores do, whatever their sharding. `score` makes scores of parameters
        and gradients.
        """
        prunable = jax.tree.leaves(self.prunable(n))

        def chosen(tree: PyTree) -> Leaves:
            return [x for x, use in zip(jax.tree.leaves(tree), prunable, strict=True) if use]

        leaves, counters = chosen(scores), chosen(n)
        if not leaves:
            return keep_all(n)
        gradients = None if grads is None else chosen(grads)
        shardings = tuple(sharding_of(leaf) for leaf in leaves)
        if self.kind == "nm":
            assert pattern is not None
            request = Request(score, shardings, pattern, self.axis)
            masks = _select_blocks(request, leaves, gradients, counters)
        elif fits(leaves, shardings):
            ranks = self._rank(score, shardings, leaves, gradients, counters, [budgets])
            masks = [rank == 1 for rank in ranks]
        else:
            together = self.kind == "global"
            masks = select_largest(
                Ranking(score, together, shardings), leaves, gradients, counters, budgets
            )
        found = iter(masks)
        kept = [
            next(found) if use else keep_all(leaf)
            for leaf, use in zip(jax.tree.leaves(n), prunable, strict=True)
        ]
        return jax.tree.unflatten(jax.tree.structure(n), kept)

    def rank(
        self,
        params: PyTree,
        budgets: Sequence[Sequence[int]],
        patterns: Sequence[Pattern | None],
    ) -> PyTree:
        """Return the first level that keeps a weight, by magnitude, 0 if none does.

        Budgets and patterns are the levels'; none keeps less than the one before.
        """
        chosen = flatten(self.prunable(params))
        leaves = [leaf for name, leaf in flatten(params).items() if chosen[name]]
        shardings = tuple(sharding_of(leaf) for leaf in leaves)
        n = jax.tree.map(lambda p: jnp.zeros_like(p, jnp.uint8), params)
        if self.kind == "nm" or not leaves or not fits(leaves, shardings):
            for t, (budget, pattern) in enumerate(zip(budgets, patterns, strict=True), 1):
                # What sparser levels have counts as frozen: denser ones have it too.
                n = _extend(n, self.select(params, n, budget, pattern), t)
            return n
        zeros = [zero for zero, use in zip(jax.tree.leaves(n), chosen.values(), strict=True) if use]
        found = iter(self._rank(magnitude, shardings, leaves, None, zeros, budgets))
        ranks = [
            next(found) if use else jnp.ones_like(zero)
            for zero, use in zip(jax.tree.leaves(n), chosen.values(), strict=True)
        ]
        return jax.tree.unflatten(jax.tree.structure(n), ranks)

    def _rank(
        self,
        score: Score,
        shardings: Sequence[NamedSharding | None],
        leaves: Leaves,
        grads: Leaves | None,
        n: Leaves,
        budgets: Sequence[Sequence[int]],
    ) -> Leaves:
        """Rank tensors together or, each by its own budgets, one by one."""
        sizes = np.array(budgets, np.uint32)
        if self.kind == "global":
            together: Leaves = rank_whole(
                Whole(score, tuple(shardings)), leaves, grads, n, sizes[:, 0]
            )
            return together
        ranks = []
        for j, leaf in enumerate(leaves):
            request = Whole(score, (shardings[j],))
            ranks += rank_whole(request, [leaf], grads and [grads[j]], [n[j]], sizes[:, j])
        return ranks

    def _pruned(self, params: PyTree) -> dict[str, Any]:
        chosen = flatten(self.prunable(params))
        found = {name: leaf for name, leaf in flatten(params).items() if chosen[name]}
        if not found:
            raise InfeasibleTraining(
                f"no tensor matches prune={self.prune!r} exclude={self.exclude!r}"
            )
        return found


class Request(NamedTuple):
    """What a selection is compiled for."""

    score: Score
    shardings: tuple[NamedSharding | None, ...]
    """Where the masks are to be: with their weights. None leaves it to the compiler."""
    pattern: Pattern | None = None
    axis: int = -1


@partial(jax.jit, static_argnums=0)
def _select_blocks(request: Request, params: Leaves, grads: Leaves | None, n: Leaves) -> Leaves:
    assert request.pattern is not None
    keep, length = request.pattern.n, request.pattern.m

    def select(k: jax.Array, sharding: NamedSharding | None) -> jax.Array:
        moved = jnp.moveaxis(k, request.axis, -1)
        block = moved.reshape(*moved.shape[:-1], -1, length)
        rank = jnp.zeros(block.shape, jnp.uint8 if length < 256 else jnp.uint32)
        for j in range(length):
            other = block[..., j : j + 1]
            earlier = j < jnp.arange(length)
            rank += (other > block) | ((other == block) & earlier)
        mask = jnp.moveaxis((rank < keep).reshape(moved.shape), -1, request.axis)
        if sharding is None:
            return mask
        placed: jax.Array = lax.with_sharding_constraint(mask, sharding)  # type: ignore[no-untyped-call]
        return placed

    found = keys(request.score, params, grads, n)
    return [select(k, s) for k, s in zip(found, request.shardings, strict=True)]


def keep_all(params: PyTree) -> PyTree:
    """Return the mask that prunes nothing.

    >>> keep_all({"kernel": jnp.array([0.5, -2.0])})["kernel"].tolist()
    [True, True]

    Args:
        params: Parameters, for their shapes and places.

    Returns:
        A mask for each of them.
    """
    return jax.tree.map(lambda p: jnp.ones_like(p, bool), params)


def apply_mask(params: PyTree, kept: PyTree) -> PyTree:
    """Zero the weights that a mask does not keep.

    >>> kept = {"kernel": jnp.array([True, False])}
    >>> apply_mask({"kernel": jnp.array([0.5, -2.0])}, kept)["kernel"].tolist()
    [0.5, 0.0]

    Args:
        params: The parameters.
        kept: A mask for each of them, as `Pruner.mask` and `keep_all` return them.

    Returns:
        The parameters, zero where the mask is false.
    """
    return jax.tree.map(lambda p, k: jnp.where(k, p, jnp.zeros_like(p)), params, kept)


@jax.jit
def _extend(n: PyTree, kept: PyTree, t: int) -> PyTree:
    return jax.tree.map(lambda n, k: jnp.where((n == 0) & k, jnp.asarray(t, n.dtype), n), n, kept)
