"""Any jaxpruner updater as the sparsify routine.

jaxpruner (github.com/google-research/jaxpruner) is imported only when this is used. What would lose
frozen weights, or miss the target without a word, is refused before training starts.
"""

import copy
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from elsa_format.levels import kept_count
from elsa_train._errors import BadRecipe, FrozenWeightChanged, InfeasibleTraining, TrainError
from elsa_train._levels import Level, Schedule, check_blocks, check_levels, parse_levels
from elsa_train._sparsify import Scope
from elsa_train._tree import flatten

PyTree = Any
ASKED = 1 << 16
"""Steps for which a schedule is asked at a time."""


def load_jaxpruner() -> Any:
    """Import jaxpruner, with the alias it needs on today's JAX."""
    if not hasattr(jax, "tree_map"):
        jax.tree_map = jax.tree.map  # type: ignore[attr-defined]
    try:
        return importlib.import_module("jaxpruner")
    except ImportError as error:
        raise TrainError(
            f"jaxpruner is not installed ({error}); it is on GitHub, not on PyPI"
        ) from None


@dataclass(frozen=True)
class JaxprunerRule:
    """The mask rule of one level, by a jaxpruner updater that pins frozen weights."""

    updater: Any
    needs_gradients: bool = True

    def updates_at(self, step: int) -> bool:
        """Tell whether the updater's schedule changes the mask before this step."""
        block, place = divmod(step, ASKED)
        if block not in self._due:
            self._due[block] = _update_steps(self.updater, block * ASKED, ASKED)
        return bool(self._due[block][place])

    @cached_property
    def _due(self) -> dict[int, NDArray[np.bool_]]:
        # An answer is an array on the device: waited for once, not in every step.
        return {}

    @cached_property
    def _masks(self) -> Any:
        updater = copy.copy(self.updater)
        normalize = getattr(updater, "use_normalization", False)
        if normalize:
            # Normalised after pinning, +inf becomes NaN and every frozen weight is lost.
            updater.use_normalization = False

        def masks(params: PyTree, grads: PyTree, n: PyTree, step: jax.Array) -> PyTree:
            target = target_sparsities(updater, params)
            sparsities = updater.scheduler.get_sparsity_at_step(target, step)
            scores = updater.calculate_scores(params, sparse_state=None, grads=grads)
            if normalize:
                eps = updater.normalization_eps
                scores = jax.tree.map(lambda s: s / (jnp.linalg.norm(s) + eps), scores)
            pinned = jax.tree.map(lambda s, n: jnp.where(n > 0, jnp.inf, s), scores, n)
            found = updater.create_masks(pinned, sparsities)
            leaves = jax.tree.leaves(found, is_leaf=lambda mask: mask is None)
            kept = [
                jnp.ones(p.shape, bool) if mask is None else mask.astype(bool)
                for p, mask in zip(jax.tree.leaves(params), leaves, strict=True)
            ]
            tree = jax.tree.unflatten(jax.tree.structure(params), kept)
            lost = jax.tree.map(lambda k, n: jnp.any((n > 0) & ~k), tree, n)
            return tree, jnp.any(jnp.stack(jax.tree.leaves(lost)))

        return jax.jit(masks)

    def mask(self, params: PyTree, grads: PyTree, n: PyTree, step: int) -> PyTree:
        """Return what the updater keeps; frozen weights must be among it."""
        kept, lost = self._masks(params, grads, n, jnp.int32(step))
        if lost:
            name = type(self.updater).__name__
            raise FrozenWeightChanged(f"jaxpruner's {name} drops frozen weights at step {step}")
        return kept


def _update_steps(updater: Any, start: int, count: int) -> NDArray[np.bool_]:
    """Ask a schedule for many steps at once; one that never prunes gives a single answer."""
    found = updater.scheduler.is_mask_update_iter(jnp.arange(start, start + count))
    return np.broadcast_to(np.asarray(found, bool), (count,))


def target_sparsities(updater: Any, params: PyTree) -> Any:
    """Return one sparsity for a global updater, else a tree with None where nothing is pruned."""
    if hasattr(updater, "use_normalization"):
        return updater.sparsity
    return updater.sparsity_distribution_fn(params)


def jaxpruner_rules(
    updaters: Sequence[Any], params: PyTree, steps: int
) -> tuple[JaxprunerRule, ...]:
    """Check one updater per level, sparsest first, for phases of so many steps."""
    for updater in updaters:
        _check_class(updater)
        _check_schedule(updater, params, steps)
    for sparser, denser in pairwise(updaters):
        _check_nesting(sparser, denser, params)
    _check_patterns(updaters, params)
    return tuple(JaxprunerRule(updater) for updater in updaters)


def _check_class(updater: Any) -> None:
    base = importlib.import_module("jaxpruner").BaseUpdater
    kind, name = type(updater), type(updater).__name__
    if not isinstance(updater, base):
        raise BadRecipe(f"{name} is not a jaxpruner updater")
    if kind.calculate_scores is base.calculate_scores or kind.update_state is not base.update_state:
        raise InfeasibleTraining(
            f"jaxpruner's {name} does not choose its masks by calculate_scores, so frozen weights "
            "can't be pinned"
        )


def _check_schedule(updater: Any, params: PyTree, steps: int) -> None:
    name = type(updater).__name__
    at = _update_steps(updater, 0, steps)
    if not at.any():
        raise InfeasibleTraining(f"jaxpruner's {name}: its schedule never prunes in {steps} steps")
    target = target_sparsities(updater, params)
    last = int(at.nonzero()[0][-1])
    reached = updater.scheduler.get_sparsity_at_step(target, jnp.int32(last))
    for wanted, found in zip(jax.tree.leaves(target), jax.tree.leaves(reached), strict=True):
        if not np.isclose(wanted, found, rtol=0, atol=1e-6):
            raise InfeasibleTraining(
                f"jaxpruner's {name}: its last update, at step {last} of {steps}, reaches sparsity "
                f"{float(found):.4f}, not {float(wanted):.4f}; the end step must be a multiple of "
                "the update frequency"
            )


def _budgets(updater: Any, params: PyTree) -> dict[str, int]:
    target = target_sparsities(updater, params)
    if hasattr(updater, "use_normalization"):
        total = sum(p.size for k, p in _paths(params) if updater.filter_fn(k, p))
        return {"all tensors together": kept_count(Fraction(str(float(target))), total)}
    leaves = jax.tree.leaves(target, is_leaf=lambda s: s is None)
    named = zip(flatten(params).items(), leaves, strict=True)
    return {name: kept_count(Fraction(str(float(s or 0))), p.size) for (name, p), s in named}


def _paths(params: PyTree) -> list[tuple[tuple[str, ...], Any]]:
    return [(tuple(name.split("/")), p) for name, p in flatten(params).items()]


def _check_nesting(sparser: Any, denser: Any, params: PyTree) -> None:
    before, after = _budgets(sparser, params), _budgets(denser, params)
    if before.keys() != after.keys():
        raise InfeasibleTraining("global and per-layer jaxpruner updaters don't mix")
    for name in before:
        if after[name] < before[name]:
            raise InfeasibleTraining(
                f"{name}: {before[name]} weights are frozen when the next level may keep only "
                f"{after[name]}"
            )
    if sum(after.values()) <= sum(before.values()):
        raise InfeasibleTraining("sparsities must fall from level to level")


def _check_patterns(updaters: Sequence[Any], params: PyTree) -> None:
    patterns = [u.sparsity_type for u in updaters if type(u.sparsity_type).__name__ == "NByM"]
    if not patterns:
        return
    if len(patterns) < len(updaters) or len({p.axis for p in patterns}) > 1:
        raise InfeasibleTraining("N:M levels must all be N:M, along the same axis")
    levels = parse_levels([f"{p.n}:{p.m}" for p in patterns])
    check_levels(levels, dtype="float64", pattern_scope=True)
    target = jax.tree.leaves(target_sparsities(updaters[0], params), is_leaf=lambda s: s is None)
    named = zip(flatten(params).items(), target, strict=True)
    check_blocks({n: p.shape for (n, p), s in named if s is not None}, levels, patterns[0].axis)


def make_updater(name: str, scope: Scope, level: Level, schedule: Schedule) -> Any:
    """Build a registered jaxpruner algorithm for a level, with a scope and schedule of ours."""
    jaxpruner = load_jaxpruner()
    distributions = importlib.import_module("jaxpruner.sparsity_distributions")
    types = importlib.import_module("jaxpruner.sparsity_types")
    if name not in jaxpruner.ALGORITHM_REGISTRY:
        raise BadRecipe(f"updater {name!r}: jaxpruner has {sorted(jaxpruner.ALGORITHM_REGISTRY)}")
    if name.startswith("global_") != (scope.kind == "global"):
        raise BadRecipe(f"updater {name!r} does not fit scope {scope.kind!r}")
    kind = jaxpruner.ALGORITHM_REGISTRY[name]

    def prunable(key: Sequence[str], param: Any) -> bool:
        return scope.matches("/".join(key))

    settings: dict[str, Any] = {"scheduler": _scheduler(jaxpruner, schedule)}
    if scope.kind == "global":
        settings |= {"sparsity": level.target, "filter_fn": prunable}
    else:
        settings["sparsity_distribution_fn"] = partial(
            distributions.uniform, sparsity=level.target, filter_fn=prunable
        )
    if level.pattern:
        settings["sparsity_type"] = types.NByM(level.pattern.n, level.pattern.m, scope.axis)
    return kind(**settings)


def _scheduler(jaxpruner: Any, schedule: Schedule) -> Any:
    if schedule.start == schedule.end:
        return jaxpruner.OneShotSchedule(target_step=schedule.end)
    # jaxpruner updates at multiples of the frequency only: end at the last one.
    every = min(schedule.every, max(1, schedule.end))
    return jaxpruner.PolynomialSchedule(
        update_freq=every,
        update_start_step=schedule.start,
        update_end_step=schedule.end // every * every,
        power=schedule.power,
    )
