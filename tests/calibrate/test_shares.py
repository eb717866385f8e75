"""What layers keep adds up to what a level keeps, and never shrinks from level to level."""

from fractions import Fraction

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from internals import FLOOR, GRID, Curve, by_cost, by_magnitude, uniform

from elsa_format.levels import kept_count

LEVELS = [Fraction(9, 10), Fraction(8, 10), Fraction(1, 2), Fraction(1, 10)]
sizes = st.lists(st.integers(20, 5000), min_size=1, max_size=6)
seeds = st.integers(0, 2**32 - 1)


def check(budgets: list[dict[str, int]], sizes: dict[str, int]) -> None:
    before = dict.fromkeys(sizes, 0)
    for level, counts in zip(LEVELS, budgets, strict=True):
        assert sum(counts.values()) == kept_count(level, sum(sizes.values()))
        for name, count in counts.items():
            assert max(before[name], 1) <= count <= sizes[name]
        before = counts


@given(sizes)
def test_uniform_shares_are_those_of_every_tensor(counts: list[int]) -> None:
    found = uniform({str(at): size for at, size in enumerate(counts)}, LEVELS)
    for level, one in zip(LEVELS, found, strict=True):
        assert list(one.values()) == [kept_count(level, size) for size in counts]


@settings(max_examples=40)
@given(seeds, sizes, st.booleans())
def test_global_shares_are_those_of_one_sort(seed: int, counts: list[int], ties: bool) -> None:
    rng = np.random.default_rng(seed)
    weights = {
        str(at): (rng.standard_normal((1, 1, size)) * rng.uniform(0.5, 2)).astype(np.float32)
        for at, size in enumerate(counts)
    }
    if ties:
        weights = {name: np.round(w) for name, w in weights.items()}
    found = by_magnitude(lambda: weights.items(), LEVELS)
    check(found, {name: w.size for name, w in weights.items()})
    names = np.concatenate([np.full(w.size, name) for name, w in weights.items()])
    order = np.argsort(
        -np.abs(np.concatenate([w.ravel() for w in weights.values()])), kind="stable"
    )
    for level, one in zip(LEVELS, found, strict=True):
        kept = names[order[: kept_count(level, names.size)]]
        want = {name: int((kept == name).sum()) for name in weights}
        if min(want.values()):  # else one weight at least goes to each
            assert one == want


@settings(max_examples=30)
@given(seeds, sizes)
def test_shares_by_cost_add_up_are_nested_and_have_a_floor(seed: int, counts: list[int]) -> None:
    rng = np.random.default_rng(seed)
    curves = {
        str(at): Curve(
            size, np.sort(rng.random(len(GRID)))[::-1].tolist(), 10 ** rng.uniform(-6, 2)
        )
        for at, size in enumerate(counts)
    }
    found = by_cost(curves, LEVELS)
    check(found, {name: curve.weights for name, curve in curves.items()})
    for level, one in zip(LEVELS, found, strict=True):
        for name, count in one.items():
            assert count >= min(
                round(FLOOR * (1 - level) * curves[name].weights), curves[name].weights
            )


def test_fragile_layers_keep_more() -> None:
    errors = [float(np.exp(-5 * share)) for share in GRID]
    alike = by_cost({"a": Curve(1000, errors, 1.0), "b": Curve(1000, errors, 1.0)}, LEVELS)
    assert all(abs(one["a"] - one["b"]) <= 2 for one in alike)
    found = by_cost({"a": Curve(1000, errors, 1.0), "b": Curve(1000, errors, 10.0)}, LEVELS)
    assert all(one["b"] > one["a"] for one in found)


def test_shares_by_cost_are_nearly_the_best_there_are() -> None:
    """Every split of two layers on a fine grid is tried."""
    curves = {
        "a": Curve(1000, [0.9 ** (30 * share) for share in GRID], 1.0),
        "b": Curve(500, [0.9 ** (60 * share) for share in GRID], 3.0),
    }

    def cost(counts: dict[str, int]) -> float:
        total = 0.0
        for name, curve in curves.items():
            share = np.log(counts[name] / curve.weights)
            errors = np.log([1, *curve.errors, 1e-5])
            total += curve.sensitivity * np.exp(np.interp(share, np.log([1e-3, *GRID, 1]), errors))
        return total

    for level, found in zip(LEVELS, by_cost(curves, LEVELS), strict=True):
        want = kept_count(level, 1500)
        tried = [{"a": a, "b": want - a} for a in range(1, 1000) if 1 <= want - a <= 500]
        assert cost(found) <= min(map(cost, tried)) * 1.05
