"""jaxpruner updaters as sparsify routine.

The package is on GitHub alone, so what CI tests is a stand-in with its public interface; the same
tests take the real one where it is installed.
"""

import sys
from functools import partial

import jax
import jax.numpy as jnp
import jaxpruner_stand_in
import numpy as np
import pytest
from internals import (
    BadRecipe,
    FrozenWeightChanged,
    InfeasibleTraining,
    JaxprunerRule,
    TrainError,
    _method,
    apply_mask,
    load_jaxpruner,
    make_updater,
)

from elsa_train import (
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
def jaxpruner(monkeypatch):
    """Return the real package, or what stands in for it."""
    try:
        return load_jaxpruner()
    except TrainError:
        return jaxpruner_stand_in.install(monkeypatch)


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
def test_updaters_keep_frozen_weights_and_reach_their_target(jaxpruner, name, kind):
    scope = Scope(kind)
    levels = parse_levels("1:8,1:4,2:4" if kind == "nm" else "90,75,50")
    updaters = [make_updater(name, scope, level, Schedule(0, 6, 3)) for level in levels]
    result = train(jaxpruner_rules(updaters, PARAMS, STEPS), levels)
    for level, frozen in zip(levels, result.levels, strict=True):
        assert frozen.nonzero == 8 + sum(scope.budgets(PARAMS, level))


def test_global_pruning_without_the_fix_would_lose_frozen_weights(jaxpruner):
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
def test_updaters_that_ignore_scores_are_refused(jaxpruner, name):
    updater = getattr(jaxpruner, name)()
    with pytest.raises(InfeasibleTraining, match="calculate_scores"):
        jaxpruner_rules([updater], PARAMS, STEPS)


def test_schedules_that_miss_the_target_are_refused(jaxpruner):
    (level,) = parse_levels("90")
    updater = make_updater("magnitude", Scope("uniform"), level, Schedule(0, 6, 3))
    updater.scheduler = jaxpruner.PolynomialSchedule(4, 0, 7)
    with pytest.raises(InfeasibleTraining, match="multiple of"):
        jaxpruner_rules([updater], PARAMS, STEPS)
    updater.scheduler = jaxpruner.NoUpdateSchedule()
    with pytest.raises(InfeasibleTraining, match="never prunes"):
        jaxpruner_rules([updater], PARAMS, STEPS)


def test_budgets_below_what_is_frozen_are_refused(jaxpruner):
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


def test_nm_levels_that_do_not_nest_are_refused(jaxpruner):
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


def test_a_schedule_is_asked_once_for_a_phase(jaxpruner, monkeypatch):
    """Its answer is an array on the device: every step would wait for that one."""
    (level,) = parse_levels("90")
    updater = make_updater("magnitude", Scope("uniform"), level, Schedule(0, 6, 3))
    kind, asked = type(updater.scheduler), []
    answer = kind.is_mask_update_iter

    def counted(self, step):
        asked.append(step)
        return answer(self, step)

    monkeypatch.setattr(kind, "is_mask_update_iter", counted)
    rule = JaxprunerRule(updater)
    assert [step for step in range(2000) if rule.updates_at(step)] == [0, 3, 6]
    assert len(asked) == 1
    assert not rule.updates_at(10**6)
    updater.scheduler = jaxpruner.OneShotSchedule(5)
    assert [step for step in range(9) if JaxprunerRule(updater).updates_at(step)] == [5]
    updater.scheduler = jaxpruner.NoUpdateSchedule()
    assert not JaxprunerRule(updater).updates_at(0)


def test_an_updater_that_drops_frozen_weights_is_stopped(jaxpruner):
    class Reckless(jaxpruner.MagnitudePruning):
        def create_masks(self, scores, sparsities):
            return super().create_masks(jax.tree.map(lambda s: -s, scores), sparsities)

    n = jax.tree.map(lambda p: jnp.ones(p.shape, jnp.uint8).at[..., 1:].set(0), PARAMS)
    (level,) = parse_levels("50")
    settings = vars(make_updater("magnitude", Scope("uniform"), level, Schedule(0, 0, 1)))
    rule = JaxprunerRule(Reckless(**settings))
    with pytest.raises(FrozenWeightChanged, match="Reckless"):
        rule.mask(PARAMS, PARAMS, n, 2)


def test_the_interface_is_checked(jaxpruner):
    with pytest.raises(InfeasibleTraining, match="calculate_scores"):
        jaxpruner_rules([jaxpruner.BaseUpdater()], PARAMS, STEPS)
    with pytest.raises(BadRecipe, match="not a jaxpruner updater"):
        jaxpruner_rules([object()], PARAMS, STEPS)
    rising = [
        make_updater("magnitude", Scope("uniform"), level, Schedule(0, 0, 1))
        for level in (*parse_levels("50"), *parse_levels("90"))
    ]
    with pytest.raises(InfeasibleTraining, match="are frozen when"):
        jaxpruner_rules(rising, PARAMS, STEPS)


def test_its_absence_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "jaxpruner", None)
    with pytest.raises(TrainError, match="not installed"):
        load_jaxpruner()
