"""What stands in for jaxpruner where it is not installed: it is on GitHub, in no package registry.

The names, signatures, defaults and behaviour of its public interface as far as the adapter uses
them, written anew from its source of 2024. Tests take the real package where there is one.
"""

import sys
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict


def more_than_one_axis(key, param):
    return param.ndim > 1


def uniform(params, sparsity, filter_fn=more_than_one_axis, custom_sparsity_map=None):
    special = custom_sparsity_map or {}
    chosen = {k: sparsity if filter_fn(k, p) else None for k, p in flatten_dict(params).items()}
    return unflatten_dict({k: special.get(k, s) for k, s in chosen.items()})


def erk(param_tree, sparsity, filter_fn=more_than_one_axis, custom_sparsity_map=None):
    """Give a tensor weights for the sum of its sides; one that would have too many is dense."""
    flat = flatten_dict(param_tree)
    sizes = {k: p.size for k, p in flat.items() if filter_fn(k, p)}
    sides = {k: sum(flat[k].shape) for k in sizes}
    dense: set[Any] = set()
    while True:
        open_ = sizes.keys() - dense
        kept = sum(n * (1 - sparsity) for n in sizes.values()) - sum(sizes[k] for k in dense)
        scale = kept / sum(sides[k] for k in open_)
        full = {k for k in open_ if scale * sides[k] > sizes[k]}
        if not full:
            break
        dense |= full
    found = {k: 0.0 if k in dense else 1 - scale * sides[k] / sizes[k] for k in sizes}
    return unflatten_dict({k: found.get(k) for k in flat})


@dataclass(frozen=True)
class Unstructured:
    pass


@dataclass(frozen=True)
class NByM:
    n: int
    m: int
    axis: int = -1


@dataclass(frozen=True)
class NoUpdateSchedule:
    def get_sparsity_at_step(self, target_sparsities, step):
        return target_sparsities

    def is_mask_update_iter(self, step):
        return False


@dataclass(frozen=True)
class OneShotSchedule(NoUpdateSchedule):
    target_step: int

    def is_mask_update_iter(self, step):
        return step == self.target_step


@dataclass(frozen=True)
class PeriodicSchedule(NoUpdateSchedule):
    update_freq: int
    update_start_step: int
    update_end_step: int

    def is_mask_update_iter(self, step):
        # An array on the device, whatever the step: who asks with `if` waits for it.
        within = jnp.logical_and(step >= self.update_start_step, step <= self.update_end_step)
        return jnp.logical_and(within, step % self.update_freq == 0)


@dataclass(frozen=True)
class PolynomialSchedule(PeriodicSchedule):
    power: int = 3

    def get_sparsity_at_step(self, target_sparsities, step):
        length = self.update_end_step - self.update_start_step
        done = jnp.clip(step + 1 - self.update_start_step, 0, length) / length if length else 1.0
        reached = 1 - (1 - done) ** self.power
        return jax.tree.map(lambda target: target * reached, target_sparsities)


@dataclass
class BaseUpdater:
    scheduler: Any = field(default_factory=NoUpdateSchedule)
    skip_gradients: bool = False
    is_sparse_gradients: bool = False
    sparsity_type: Any = field(default_factory=Unstructured)
    sparsity_distribution_fn: Any = field(default_factory=lambda: partial(uniform, sparsity=0.0))
    rng_seed: Any = None
    use_packed_masks: bool = False
    topk_fn: Any = None

    def __post_init__(self):
        kind = self.sparsity_type
        blocks = isinstance(kind, NByM)
        self.topk_fn = self.topk_fn or (partial(best_in_blocks, kind) if blocks else best)

    def calculate_scores(self, params, sparse_state=None, grads=None):
        raise TypeError("a subclass says what scores are")

    def create_masks(self, scores, sparsities):
        def mask(score, sparsity):
            return None if sparsity is None else self.topk_fn(score, sparsity)

        return jax.tree.map(mask, scores, sparsities)

    def update_state(self, sparse_state, params, grads):
        raise TypeError("the adapter asks for scores and masks, never for this")


def best(scores, sparsity):
    kept = jnp.round((1 - sparsity) * scores.size)
    rank = jnp.argsort(jnp.argsort(-scores.ravel(), stable=True), stable=True)
    return (rank < kept).reshape(scores.shape).astype("uint8")


def best_in_blocks(kind, scores, sparsity):
    moved = jnp.moveaxis(scores, kind.axis, -1)
    blocks = moved.reshape(-1, kind.m)
    rank = jnp.argsort(jnp.argsort(-blocks, axis=1, stable=True), axis=1, stable=True)
    return jnp.moveaxis((rank < kind.n).reshape(moved.shape), -1, kind.axis).astype("uint8")


class MagnitudePruning(BaseUpdater):
    def calculate_scores(self, params, sparse_state=None, grads=None):
        return jax.tree.map(jnp.abs, params)


class SaliencyPruning(BaseUpdater):
    def calculate_scores(self, params, sparse_state=None, grads=None):
        return jax.tree.map(lambda p, g: jnp.abs(p * g), params, grads)


class RandomPruning(BaseUpdater):
    def calculate_scores(self, params, sparse_state=None, grads=None):
        leaves, tree = jax.tree.flatten(params)
        keys = jax.random.split(jax.random.key(8), len(leaves))
        drawn = [jax.random.uniform(k, p.shape) for k, p in zip(keys, leaves, strict=True)]
        return jax.tree.unflatten(tree, drawn)


@dataclass
class GlobalPruning(BaseUpdater):
    custom_sparsity_map: Mapping[Any, float] | None = None
    filter_fn: Any = more_than_one_axis
    normalization_eps: float = 1e-8
    use_normalization: bool = True
    sparsity: float = 0.0

    def create_masks(self, scores, target_sparsity):
        flat = flatten_dict(scores)
        chosen = {k: s for k, s in sorted(flat.items()) if self.filter_fn(k, s)}
        if self.use_normalization:
            eps = self.normalization_eps
            chosen = {k: s / (jnp.linalg.norm(s) + eps) for k, s in chosen.items()}
        mask = self.topk_fn(jnp.concatenate(list(chosen.values()), axis=None), target_sparsity)
        ends = np.cumsum([s.size for s in chosen.values()])[:-1]
        parts = dict(zip(chosen, jnp.split(mask, ends), strict=True))
        return unflatten_dict(
            {k: parts[k].reshape(s.shape) if k in parts else None for k, s in flat.items()}
        )


class GlobalMagnitudePruning(GlobalPruning, MagnitudePruning):
    pass


class GlobalSaliencyPruning(GlobalPruning, SaliencyPruning):
    pass


class NoPruning(BaseUpdater):
    def update_state(self, sparse_state, params, grads):
        return sparse_state


class SET(BaseUpdater):
    def update_state(self, sparse_state, params, grads):
        return sparse_state


class RigL(SET):
    pass


class StaticRandomSparse(SET):
    pass


class SteMagnitudePruning(MagnitudePruning):
    def update_state(self, sparse_state, params, grads):
        return sparse_state


REGISTRY = {
    "global_magnitude": GlobalMagnitudePruning,
    "global_saliency": GlobalSaliencyPruning,
    "magnitude": MagnitudePruning,
    "no_prune": NoPruning,
    "random": RandomPruning,
    "rigl": RigL,
    "saliency": SaliencyPruning,
    "set": SET,
}


def install(monkeypatch):
    """Let `import jaxpruner`, and its two modules that the adapter uses, find this."""
    package = types.ModuleType("jaxpruner")
    package.ALGORITHM_REGISTRY = REGISTRY
    for name, value in globals().items():
        if isinstance(value, type) and value.__module__ == __name__:
            setattr(package, name, value)
    distributions = types.ModuleType("jaxpruner.sparsity_distributions")
    distributions.uniform, distributions.erk = uniform, erk
    kinds = types.ModuleType("jaxpruner.sparsity_types")
    kinds.Unstructured, kinds.NByM = Unstructured, NByM
    package.sparsity_distributions, package.sparsity_types = distributions, kinds
    for module in (package, distributions, kinds):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return package
