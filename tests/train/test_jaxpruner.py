"""jaxpruner updaters as sparsify routine: real ones where installed, else their interface."""

import sys
import types
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from internals import (
    BadRecipe,
    FrozenWeightChanged,
    InfeasibleTraining,
    TrainError,
    _method,
    apply_mask,
    load_jaxpruner,
    make_updater,
)

from elsa_train import (
    JaxprunerRule,
    Network,
    Schedule,
    Scope,
    jaxpruner_rules,
    multi_level,
    parse_levels,
)

RNG = np.random.default_rng(0)
PARAMS = {
    "conv": {"kernel": jnp.asarray(RNG.normal(size=(3, 3, 4, 16)), jnp.float32)},
    "head": {"kernel": jnp.asarray(RNG.normal(size=(16, 8)), jnp.float32), "bias": jnp.ones(8)},
}
STEPS = 9


@pytest.fixture
def jaxpruner():
    """Return the real package, or skip."""
    try:
        return load_jaxpruner()
    except TrainError:
        pytest.skip("jaxpruner is not installed")


def like(rng, p):
    return jnp.asarray(rng.normal(size=p.shape), p.dtype)


def train(rules, levels):
    """Run Algorithm 2 with one rule per level, the weights moving at random in between."""
    waiting = iter(rules)

    def sparsify(network, counters, level):
        rule, params = next(waiting), network.params
        kept = jax.tree.map(lambda p: jnp.ones(p.shape, bool), params)
        for step in range(STEPS):
            rng = np.random.default_rng(step)
            noise = jax.tree.map(partial(like, rng), params)
            if rule.updates_at(step):
                kept = rule.mask(params, noise, counters, step)
            params = apply_mask(_method.apply_updates(params, noise, counters), kept)
        return Network(params)

    return multi_level(Network(PARAMS), levels, sparsify)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("global_magnitude", "global"),
        ("global_saliency", "global"),
        ("magnitude", "uniform"),
        ("saliency", "uniform"),
        ("random", "uniform"),
        ("magnitude", "nm"),
    ],
)
def test_real_updaters_keep_frozen_weights_and_reach_their_target(jaxpruner, name, kind):
    scope = Scope(kind)
    levels = parse_levels("1:8,1:4,2:4" if kind == "nm" else "90,75,50")
    updaters = [make_updater(name, scope, level, Schedule(0, 6, 3)) for level in levels]
    result = train(jaxpruner_rules(updaters, PARAMS, STEPS), levels)
    for level, frozen in zip(levels, result.levels, strict=True):
        assert frozen.nonzero == 8 + sum(scope.budgets(PARAMS, level))


def test_real_global_pruning_without_the_fix_would_lose_frozen_weights(jaxpruner):
    """The trap itself: normalising after pinning makes NaN of every frozen weight's score."""
    (level,) = parse_levels("50")
    updater = make_updater("global_magnitude", Scope(), level, Schedule(0, 0, 1))
    assert updater.use_normalization
    n = jax.tree.map(lambda p: jnp.asarray(np.abs(p) < 0.1, jnp.uint8), PARAMS)
    pinned = jax.tree.map(lambda p, n: jnp.where(n > 0, jnp.inf, jnp.abs(p)), PARAMS, n)
    broken = updater.create_masks(pinned, 0.5)["conv"]["kernel"]
    assert not np.all(np.asarray(broken)[np.asarray(n["conv"]["kernel"]) > 0])
    kept = JaxprunerRule(updater).mask(PARAMS, PARAMS, n, 0)["conv"]["kernel"]
    assert np.all(np.asarray(kept)[np.asarray(n["conv"]["kernel"]) > 0])


@pytest.mark.parametrize(
    "name", ["SET", "RigL", "StaticRandomSparse", "SteMagnitudePruning", "NoPruning"]
)
def test_real_updaters_that_ignore_scores_are_refused(jaxpruner, name):
    updater = getattr(jaxpruner, name)()
    with pytest.raises(InfeasibleTraining, match="calculate_scores"):
        jaxpruner_rules([updater], PARAMS, STEPS)


def test_real_schedules_that_miss_the_target_are_refused(jaxpruner):
    (level,) = parse_levels("90")
    updater = make_updater("magnitude", Scope("uniform"), level, Schedule(0, 6, 3))
    updater.scheduler = jaxpruner.PolynomialSchedule(4, 0, 7)
    with pytest.raises(InfeasibleTraining, match="multiple of"):
        jaxpruner_rules([updater], PARAMS, STEPS)
    updater.scheduler = jaxpruner.NoUpdateSchedule()
    with pytest.raises(InfeasibleTraining, match="never prunes"):
        jaxpruner_rules([updater], PARAMS, STEPS)


def test_real_budgets_below_what_is_frozen_are_refused(jaxpruner):
    from jaxpruner import sparsity_distributions as distributions

    kinds = [(distributions.uniform, 0.9), (distributions.erk, 0.85)]
    updaters = [
        jaxpruner.MagnitudePruning(
            sparsity_distribution_fn=partial(kind, sparsity=sparsity),
            scheduler=jaxpruner.OneShotSchedule(0),
        )
        for kind, sparsity in reversed(kinds)
    ]
    with pytest.raises(InfeasibleTraining, match=r"are frozen when|must fall"):
        jaxpruner_rules(updaters, PARAMS, STEPS)


def test_real_nm_levels_that_do_not_nest_are_refused(jaxpruner):
    def updaters(text, axis=-1):
        return [
            make_updater("magnitude", Scope("nm", axis=axis), level, Schedule(0, 0, 1))
            for level in parse_levels(text)
        ]

    with pytest.raises(InfeasibleTraining):
        jaxpruner_rules(updaters("1:4,1:8"), PARAMS, STEPS)
    with pytest.raises(InfeasibleTraining, match="divisible"):
        jaxpruner_rules(updaters("1:16"), PARAMS, STEPS)
    mixed = [*updaters("1:8"), *updaters("1:4", axis=0)]
    with pytest.raises(InfeasibleTraining, match="same axis"):
        jaxpruner_rules(mixed, PARAMS, STEPS)


# Without jaxpruner: its documented interface, as far as the adapter uses it.


class OneShot:
    def is_mask_update_iter(self, step):
        return step == 2

    def get_sparsity_at_step(self, target, step):
        return target


@dataclass
class BaseUpdater:
    scheduler: object = None
    sparsity_type: object = None
    sparsity: float = 0.5

    def sparsity_distribution_fn(self, params):
        return {
            "conv": {"kernel": self.sparsity},
            "head": {"bias": None, "kernel": self.sparsity},
        }

    def calculate_scores(self, params, sparse_state=None, grads=None):
        raise NotImplementedError

    def update_state(self, sparse_state, params, grads):
        raise NotImplementedError

    def create_masks(self, scores, sparsities):
        def top(score, sparsity):
            if sparsity is None:
                return None
            k = round(score.size * (1 - sparsity))
            rank = jnp.argsort(jnp.argsort(-score.ravel())).reshape(score.shape)
            return (rank < k).astype("uint8")

        return {
            m: {k: top(s, sparsities[m][k]) for k, s in leaves.items()}
            for m, leaves in scores.items()
        }


class Magnitude(BaseUpdater):
    def calculate_scores(self, params, sparse_state=None, grads=None):
        return jax.tree.map(jnp.abs, params)


class Reckless(Magnitude):
    def create_masks(self, scores, sparsities):
        return super().create_masks(jax.tree.map(lambda s: -s, scores), sparsities)


@pytest.fixture
def stand_in(monkeypatch):
    module = types.ModuleType("jaxpruner")
    module.BaseUpdater = BaseUpdater
    monkeypatch.setitem(sys.modules, "jaxpruner", module)


def test_the_interface_alone_is_enough(stand_in):
    updaters = [Magnitude(OneShot(), None, sparsity) for sparsity in (0.9, 0.5)]
    result = train(jaxpruner_rules(updaters, PARAMS, STEPS), parse_levels("90,50"))
    assert [frozen.nonzero for frozen in result.levels] == [8 + 58 + 13, 8 + 288 + 64]


def test_an_updater_that_drops_frozen_weights_is_stopped(stand_in):
    n = jax.tree.map(lambda p: jnp.ones(p.shape, jnp.uint8).at[..., 1:].set(0), PARAMS)
    rule = JaxprunerRule(Reckless(OneShot(), None, 0.5))
    with pytest.raises(FrozenWeightChanged, match="Reckless"):
        rule.mask(PARAMS, PARAMS, n, 2)


def test_the_interface_is_checked(stand_in):
    with pytest.raises(InfeasibleTraining, match="calculate_scores"):
        jaxpruner_rules([BaseUpdater(OneShot())], PARAMS, STEPS)
    with pytest.raises(BadRecipe, match="not a jaxpruner updater"):
        jaxpruner_rules([object()], PARAMS, STEPS)
    rising = [Magnitude(OneShot(), None, sparsity) for sparsity in (0.5, 0.9)]
    with pytest.raises(InfeasibleTraining, match="are frozen when"):
        jaxpruner_rules(rising, PARAMS, STEPS)


def test_its_absence_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "jaxpruner", None)
    with pytest.raises(TrainError, match="not installed"):
        load_jaxpruner()
