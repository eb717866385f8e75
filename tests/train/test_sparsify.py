"""Selection is exact: so many weights, the best ones, frozen ones first, ties to lower indices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from internals import InfeasibleTraining, _selection, apply_mask, cut_by_bits, cut_by_tables

from elsa_train import Joint, Pruner, Schedule, Scope, parse_levels


@pytest.fixture(params=[1 << 28, 0], ids=["whole", "slabs"])
def way(request, monkeypatch):
    """Rank tensors as one vector, and as those that are split or too large for that."""
    monkeypatch.setattr(_selection, "WHOLE", request.param)


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
def test_global_selection_is_the_sorted_one(level, way):
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
def test_uniform_selection_is_the_sorted_one_in_each_tensor(level, way):
    params, n, scope = weights(), frozen(), Scope("uniform")
    budgets = scope.budgets(params, level)
    kept = scope.select(params, n, budgets, None)
    for k, module in zip(budgets, ("conv", "head"), strict=True):
        found = np.asarray(kept[module]["kernel"]).ravel()
        p, c = (np.asarray(tree[module]["kernel"]).ravel() for tree in (params, n))
        np.testing.assert_array_equal(found, best(p, c, k))


def hard_to_rank(dtype):
    """Ties at every cut, zeros of both signs, denormals, infinities and NaNs."""
    rng = np.random.default_rng(5)
    few = rng.choice([0.0, -0.0, 1.0, -1.0, 1e-40, np.inf, np.nan, 0.25, 3.0], (40, 70))
    many = rng.normal(size=(70, 50))
    return {name: {"kernel": jnp.asarray(x, dtype)} for name, x in (("a", few), ("b", many))}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("kind", ["global", "uniform"])
def test_all_levels_in_one_search_are_those_found_one_after_the_other(kind, dtype, monkeypatch):
    with jax.enable_x64(dtype == "float64"):
        params = hard_to_rank(dtype)
        joint = Joint(Scope(kind), parse_levels("99,95,80,60,5"), Schedule(0, 10, 5))
        whole = [joint.rank(params, step) for step in (5, 10)]
        monkeypatch.setattr(_selection, "WHOLE", 0)
        slabs = [joint.rank(params, step) for step in (5, 10)]
    for one, other in zip(jax.tree.leaves(whole), jax.tree.leaves(slabs), strict=True):
        assert one.dtype == other.dtype == jnp.uint8
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("word", ["uint16", "uint32"])
def test_both_searches_find_the_same_cuts(word):
    rng = np.random.default_rng(3)
    high, low = rng.integers(0, 4, (2, 9000))
    flat = jnp.asarray((high << (8 * np.dtype(word).itemsize - 2)) | low, word)
    budgets = jnp.asarray([0, 1, 7, 2000, 2001, 6000, 8999, 9000], jnp.uint32)
    for one, other in zip(
        cut_by_bits(flat, budgets), jax.jit(cut_by_tables)(flat, budgets), strict=True
    ):
        np.testing.assert_array_equal(one[1:], other[1:])


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
