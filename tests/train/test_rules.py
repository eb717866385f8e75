"""Rules of a sparsify phase: budgets, frozen weights, and what each does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import tiny
from internals import RULES, BadRecipe, InfeasibleTraining, apply_mask

from elsa_train import ACDC, RigL, Schedule, Scope, parse_levels

SCHEDULE = Schedule(start=2, end=15, every=2)
SCOPES = {
    "global": (Scope(), "75"),
    "uniform": (Scope("uniform"), "75"),
    "outputs": (Scope("nm"), "2:8"),
    "inputs": (Scope("nm", axis=-2), "1:4"),
}


def like_network(seed, shares=None):
    """Draw values for two kernels and a bias; `shares` draws which of them are 1."""
    rng = np.random.default_rng(seed)
    shapes = {"a/kernel": (3, 4, 16), "b/kernel": (16, 8), "b/bias": (8,)}
    if shares is not None:
        return {n: jnp.asarray(rng.random(s) < shares, jnp.uint8) for n, s in shapes.items()}
    return {n: jnp.asarray(rng.normal(size=s), jnp.float32) for n, s in shapes.items()}


def frozen_by(scope, level):
    """Freeze about half of what the level will have."""
    best = scope.select(like_network(9), like_network(0, 0.0), budgets(scope, level), level.pattern)
    half = like_network(8, 0.5)
    return jax.tree.map(lambda b, h: (b & (h > 0)).astype(jnp.uint8), best, half)


def budgets(scope, level):
    return scope.budgets(like_network(0), level)


def walk(rule, n):
    """Train at random through a phase, and return each mask, with the weights that it changed."""
    params, kept, masks = like_network(0), None, {}
    for step in range(20):
        grads = like_network(100 + step)
        if rule.updates_at(step):
            kept = rule.mask(params, grads, n, step)
            masks[step] = (kept, params, grads)
            params = apply_mask(params, kept)
        params = jax.tree.map(lambda p, g, n: jnp.where(n == 0, p - 0.1 * g, p), params, grads, n)
        params = params if kept is None else apply_mask(params, kept)
    return masks


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", SCOPES)
def test_every_rule_ends_with_the_budget_and_never_drops_what_is_frozen(rule, name):
    scope, text = SCOPES[name]
    (level,) = parse_levels(text)
    n = frozen_by(scope, level)
    masks = walk(RULES[rule](scope, level, SCHEDULE), n)
    assert list(masks) == [4, 6, 8, 10, 12, 14, 15]
    for kept, _, _ in masks.values():
        assert all(np.all(kept[name] | (n[name] == 0)) for name in n)
        assert np.all(kept["b/bias"])
    kept, _, _ = masks[SCHEDULE.end]
    sizes = [int(kept[name].sum()) for name in ("a/kernel", "b/kernel")]
    assert sum(sizes) == sum(budgets(scope, level))
    if scope.kind == "uniform":
        assert sizes == list(budgets(scope, level))
    if level.pattern:
        for kernel in ("a/kernel", "b/kernel"):
            blocks = np.moveaxis(kept[kernel], scope.axis, -1).reshape(-1, level.pattern.m)
            assert np.all(blocks.sum(1) == level.pattern.n)


@pytest.mark.parametrize("name", SCOPES)
def test_acdc_is_sparse_and_dense_by_turns(name):
    scope, text = SCOPES[name]
    (level,) = parse_levels(text)
    masks = walk(ACDC(scope, level, SCHEDULE), like_network(0, 0.0))
    dense = [all(np.all(k) for k in kept.values()) for kept, _, _ in masks.values()]
    assert dense == [False, True, False, True, False, True, False]
    sparse = {sum(int(k.sum()) for k in m[0].values()) for m in list(masks.values())[::2]}
    assert sparse == {8 + sum(budgets(scope, level))}


@pytest.mark.parametrize("name", SCOPES)
def test_rigl_gives_places_of_the_smallest_to_the_largest_gradients(name):
    scope, text = SCOPES[name]
    (level,) = parse_levels(text)
    n = frozen_by(scope, level)
    masks = walk(RigL(scope, level, SCHEDULE, drop=0.5), n)
    changed = []
    for step, (kept, params, grads) in masks.items():
        assert sum(int(k.sum()) for k in kept.values()) == 8 + sum(budgets(scope, level))
        if step == SCHEDULE.first:
            continue
        flat = [np.concatenate([np.ravel(t[k]) for k in ("a/kernel", "b/kernel")])
                for t in (kept, params, grads, n)]  # fmt: skip
        kept, params, grads, frozen = flat[0], np.abs(flat[1]), np.abs(flat[2]), flat[3] > 0
        new, left = kept & (params == 0), ~kept & (params > 0)
        assert new.sum() == left.sum()
        assert not np.any(left & frozen)
        changed.append(int(new.sum()))
        if scope.kind != "nm" and step != SCHEDULE.end:
            done = (step - SCHEDULE.first) / (SCHEDULE.end - SCHEDULE.first)
            share = 0.25 * (1 + np.cos(np.pi * done))
            for tensor in ("a/kernel", "b/kernel"):
                kept, params, grads, frozen = (np.ravel(t[tensor]) for t in (*masks[step], n))
                before = np.count_nonzero(params)
                stay = before - round(share * (before - np.count_nonzero(frozen)))
                order = np.argsort(np.where(frozen, -np.inf, -abs(params)), kind="stable")
                held = np.isin(np.arange(kept.size), order[:stay])
                grown = np.argsort(np.where(held, -np.inf, -abs(grads)), kind="stable")[:before]
                np.testing.assert_array_equal(np.flatnonzero(kept), np.sort(grown))
    assert changed[0] > changed[-2] >= changed[-1] == 0


def test_what_would_prune_once_is_refused():
    (level,) = parse_levels("90")
    for rule in (ACDC, RigL):
        with pytest.raises(InfeasibleTraining, match="three times or more; lower mask_every"):
            rule(Scope(), level, Schedule(0, 20, 10))
    with pytest.raises(InfeasibleTraining, match="not by 'saliency'"):
        RigL(Scope(), level, SCHEDULE, "saliency")


@pytest.mark.parametrize(
    "also",
    [{"method": "joint"}, {"one_shot": True}, {"updater": "magnitude"}, {"score": "gradient"}],
)
def test_a_recipe_refuses_what_does_not_go_with_a_rule(also):
    (name,) = also
    with pytest.raises(BadRecipe, match=f"sparsify 'rigl' does not go with {name}"):
        tiny(sparsify="rigl", **also)
