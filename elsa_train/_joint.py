"""Joint training: every level at once, nothing frozen before the end.

A file needs nested masks and weights that levels share; freezing is one way to get them. Here all
prunable weights are ranked together from time to time, the counter of a weight is the first level
whose budget covers its rank, and each step trains one level, or the dense network.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from elsa_train import _method
from elsa_train._errors import InfeasibleTraining
from elsa_train._levels import DENSE, Level, Schedule, drawn, usual_shares
from elsa_train._multilevel import Network, Result, multi_level
from elsa_train._sparsify import Scope

PyTree = Any


def masked(params: PyTree, counters: PyTree, t: int | jax.Array) -> PyTree:
    """Return the weights that level t has, the others zero; DENSE has all.

    Inside a loss its gradient is zero where a level has no weight.

    >>> params, n = {"kernel": jnp.array([0.5, -2.0, 3.0])}, {"kernel": jnp.array([0, 2, 1])}
    >>> masked(params, n, 1)["kernel"].tolist(), masked(params, n, DENSE)["kernel"].tolist()
    ([0.0, 0.0, 3.0], [0.5, -2.0, 3.0])
    """

    def leaf(p: jax.Array, n: jax.Array) -> jax.Array:
        return jnp.where((t == DENSE) | ((n > 0) & (n <= t)), p, jnp.zeros_like(p))

    return jax.tree.map(leaf, params, counters)


def divergence(logits: jax.Array, wanted: jax.Array) -> jax.Array:
    """Return the mean Kullback-Leibler divergence of logits from those of another network, in nats.

    >>> round(float(divergence(jnp.zeros((1, 2)), jnp.array([[1.0, -1.0]]))), 3)
    0.328

    Args:
        logits: Those of a level, classes on the last axis.
        wanted: Those that it learns from. No gradient goes through them.
    """
    log_p = jax.nn.log_softmax(jax.lax.stop_gradient(wanted))
    return jnp.mean(jnp.sum(jnp.exp(log_p) * (log_p - jax.nn.log_softmax(logits)), -1))


@dataclass(frozen=True)
class Joint:
    """Which weights the levels have at a step, and which level a step trains.

    `shares` says how many steps of a round each level gets, in the levels' order, the dense
    network last (default: `usual_shares`); a round is shuffled anew each time.

    >>> joint = Joint(Scope(), (Level("75%", 0.75), Level("50%", 0.5)), Schedule(0, 0, 1))
    >>> params = {"kernel": jnp.array([0.5, -2.0, 0.1, 3.0]), "bias": jnp.zeros(1)}
    >>> joint.rank(params, step=0)["kernel"].tolist()
    [0, 2, 0, 1]
    >>> sorted(joint.draw(step, seed=(0,)) for step in range(8))
    [0, 1, 1, 1, 2, 2, 2, 2]
    """

    scope: Scope
    levels: tuple[Level, ...]
    schedule: Schedule
    shares: tuple[int, ...] = ()
    fixed: bool = False
    """Whether the counters that training starts with stay."""

    def __post_init__(self) -> None:
        """Refuse shares that fit no level."""
        if self.shares and (
            len(self.shares) != len(self.levels) + 1
            or min(self.shares) < 0
            or sum(self.shares) == 0
        ):
            raise InfeasibleTraining(
                f"shares: found {list(self.shares)}, expected {len(self.levels) + 1} whole "
                "numbers: one for each level, then the dense network's"
            )

    def start(self, params: PyTree) -> PyTree:
        """Return the counters before the first ranking: every level has every weight."""
        return jax.tree.map(lambda p: jnp.ones(p.shape, jnp.uint8), params)

    def updates_at(self, step: int) -> bool:
        """Tell whether weights are ranked before this step."""
        return bool(self.levels) and not self.fixed and self.schedule.updates_at(step)

    def rank(self, params: PyTree, step: int) -> PyTree:
        """Return the counters from this step on: 0 for weights that no level has."""
        full = self.scope.budgets(params, Level("dense", 0.0))
        progress = self.schedule.progress(step)
        budgets = []
        for level in self.levels:
            final = self.scope.budgets(params, level)
            budgets.append(
                [round(a - (a - b) * progress) for a, b in zip(full, final, strict=True)]
            )
        return self.scope.rank(params, budgets, [level.pattern for level in self.levels])

    def draw(self, step: int, seed: Sequence[int]) -> int:
        """Return the level that a step trains, a function of step and seed alone."""
        return drawn(step, self._shares, seed)

    @cached_property
    def _shares(self) -> tuple[int, ...]:
        return self.shares or usual_shares(len(self.levels))


def nest(
    network: Network,
    counters: PyTree,
    levels: Sequence[Level],
    statistics: Callable[[PyTree], PyTree] | None = None,
    *,
    choose: Callable[[Network, Network], Network] = lambda sparse, dense: dense,
    **settings: Any,
) -> Result:
    """Freeze levels that were trained together, one after the other, by `multi_level`.

    `statistics(params)` recomputes what each level keeps for itself; `choose(last level, dense)`
    may return either as the dense network. `settings` are those of `multi_level`.

    >>> joint = Joint(Scope(), (Level("75%", 0.75), Level("50%", 0.5)), Schedule(0, 0, 1))
    >>> params = {"kernel": jnp.array([0.5, -2.0, 0.1, 3.0])}
    >>> result = nest(Network(params), joint.rank(params, step=0), joint.levels)
    >>> [level.nonzero for level in result.levels], result.counters["kernel"].tolist()
    ([1, 2], [0, 2, 0, 1])
    """

    trained, reached = network, counters

    def with_statistics(params: PyTree) -> Network:
        return Network(params, statistics(params) if statistics else trained.state)

    def sparsify(network: Network, counters: PyTree, level: Level) -> Network:
        level_weights = _method.sparse(trained.params, reached, levels.index(level) + 1)
        return with_statistics(_keep_frozen(level_weights, network.params, counters))

    def densify(network: Network, counters: PyTree, level: Level) -> Network:
        del level
        dense = _keep_frozen(trained.params, network.params, counters)
        return choose(network, with_statistics(dense))

    return multi_level(network, levels, sparsify, densify, densify_between=False, **settings)


_keep_frozen = jax.jit(_method.keep_frozen)
