"""Selection is exact: so many weights, the best ones, frozen ones first, ties to lower indices."""

import jax.numpy as jnp
import numpy as np
import pytest
from internals import InfeasibleTraining, apply_mask

from elsa_train import Pruner, Schedule, Scope, parse_levels


def weights(seed=0):
    rng = np.random.default_rng(seed)
    # Few distinct values: ties at every threshold.
    return {
        "conv": {"kernel": jnp.asarray(rng.integers(-5, 6, (3, 3, 4, 16)), jnp.float32)},
        "head": {"kernel": jnp.asarray(rng.normal(size=(16, 8)), jnp.float32), "bias": jnp.ones(8)},
    }


def frozen(seed=1, share=0.1):
    rng = np.random.default_rng(seed)
    params = weights()
    return {
        "conv": {"kernel": jnp.asarray(rng.random((3, 3, 4, 16)) < share, jnp.uint8)},
        "head": {
            "kernel": jnp.asarray(rng.random((16, 8)) < share, jnp.uint8),
            "bias": jnp.zeros(params["head"]["bias"].shape, jnp.uint8),
        },
    }


def best(scores, n, k):
    """Keep k by (frozen, score, lower index): the definition, with a sort."""
    order = np.lexsort((np.arange(scores.size), -np.abs(scores), -(n > 0).astype(int)))
    kept = np.zeros(scores.size, bool)
    kept[order[:k]] = True
    return kept


@pytest.mark.parametrize("level", parse_levels("85,70,50,20"), ids=lambda x: x.name)
def test_global_selection_is_the_sorted_one(level):
    params, n, scope = weights(), frozen(), Scope("global")
    budgets = scope.budgets(params, level)
    kept = scope.select(params, n, budgets, None)
    flat = [
        np.concatenate([np.asarray(t[m]["kernel"]).ravel() for m in ("conv", "head")])
        for t in (params, n, kept)
    ]
    np.testing.assert_array_equal(flat[2], best(flat[0], flat[1], budgets[0]))
    assert np.all(kept["head"]["bias"])


@pytest.mark.parametrize("level", parse_levels("85,70,50,20"), ids=lambda x: x.name)
def test_uniform_selection_is_the_sorted_one_in_each_tensor(level):
    params, n, scope = weights(), frozen(), Scope("uniform")
    budgets = scope.budgets(params, level)
    kept = scope.select(params, n, budgets, None)
    for k, module in zip(budgets, ("conv", "head"), strict=True):
        found = np.asarray(kept[module]["kernel"]).ravel()
        p, c = (np.asarray(tree[module]["kernel"]).ravel() for tree in (params, n))
        np.testing.assert_array_equal(found, best(p, c, k))


@pytest.mark.parametrize("axis", [-1, 2])
def test_nm_levels_nest_along_their_axis(axis):
    params = {"conv": {"kernel": weights()["conv"]["kernel"][:, :, :, :8].repeat(2, axis=2)}}
    n = {"conv": {"kernel": jnp.zeros(params["conv"]["kernel"].shape, jnp.uint8)}}
    scope = Scope("nm", axis=axis)
    levels = parse_levels("1:8,1:4,2:4")
    scope.check(params, levels)
    for t, level in enumerate(levels, 1):
        kept = scope.select(params, n, (), level.pattern)["conv"]["kernel"]
        keep, length = level.pattern.n, level.pattern.m
        moved = np.moveaxis(np.asarray(kept), axis, -1).reshape(-1, length)
        assert np.all(moved.sum(1) == keep)
        old = np.asarray(n["conv"]["kernel"])
        assert np.all(np.asarray(kept)[old > 0])
        n = {
            "conv": {"kernel": jnp.where((n["conv"]["kernel"] == 0) & kept, t, n["conv"]["kernel"])}
        }


def test_blocks_that_do_not_divide_are_refused_by_name():
    with pytest.raises(InfeasibleTraining, match=r"head/kernel.*divisible by 16.*exclude"):
        Scope("nm").check(weights(), parse_levels("1:16"))
    Scope("nm", exclude="^head/").check(weights(), parse_levels("1:16"))


def test_nothing_to_prune_and_wrong_kind_of_level_are_refused():
    with pytest.raises(InfeasibleTraining, match="no tensor matches"):
        Scope(prune="nothing").check(weights(), parse_levels("90"))
    with pytest.raises(InfeasibleTraining, match="takes sparsities"):
        Scope().check(weights(), parse_levels("2:4"))
    with pytest.raises(InfeasibleTraining, match="no more than"):
        Scope(prune="bias").check(weights(), parse_levels("90,89"))


@pytest.mark.parametrize(
    ("start", "end", "every"), [(0, 75, 10), (5, 71, 7), (3, 3, 10), (0, 5, 9)]
)
def test_schedule_meets_its_target_for_any_frequency(start, end, every):
    schedule = Schedule(start, end, every)
    steps = [step for step in range(100) if schedule.updates_at(step)]
    assert steps[-1] == end
    progress = [schedule.progress(step) for step in steps]
    assert progress[-1] == 1
    assert progress == sorted(progress)


@pytest.mark.parametrize("score", ["magnitude", "gradient", "saliency"])
def test_pruner_reaches_the_budget_and_keeps_what_is_frozen(score):
    (level,) = parse_levels("80")
    params, n = weights(), frozen()
    pruner = Pruner(Scope("uniform"), level, Schedule(0, 6, 2), score)
    for step in range(7):
        if pruner.updates_at(step):
            kept = pruner.mask(params, weights(3), n, step)
            params = apply_mask(params, kept)
    assert int(kept["conv"]["kernel"].sum()) == round(0.2 * 576)
    assert np.all(np.asarray(kept["conv"]["kernel"])[np.asarray(n["conv"]["kernel"]) > 0])
