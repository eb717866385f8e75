"""Masks have the size that was asked, hold what is frozen, and keep what the outputs need."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from internals import Work, admm, counters_of, inverse_of, largest, solve_alone

from elsa_format.levels import Pattern

seeds = st.integers(0, 2**32 - 1)


@settings(max_examples=60)
@given(seeds, st.integers(1, 3), st.integers(1, 5), st.integers(1, 7), st.booleans(), st.data())
def test_a_count_is_kept_exactly(
    seed: int, groups: int, rows: int, columns: int, ties: bool, data: st.DataObject
) -> None:
    rng = np.random.default_rng(seed)
    score = rng.random((groups, rows, columns)).astype(np.float32)
    if ties:
        score = np.round(score * 2)
    frozen = rng.random(score.shape) < 0.3
    budget = data.draw(st.integers(int(frozen.sum()), score.size))
    mask = largest(score, frozen, budget)
    assert mask.sum() == budget
    assert (mask >= frozen).all()
    free = score[~frozen]
    kept = score[mask & ~frozen]
    assert sorted(kept) == sorted(np.sort(free)[free.size - kept.size :])


@settings(max_examples=60)
@given(seeds, st.integers(1, 4), st.integers(1, 3), st.sampled_from([1, 3, 9]))
def test_patterns_count_along_the_inputs_between_the_places_of_a_kernel(
    seed: int, rows: int, blocks: int, kernel: int
) -> None:
    rng = np.random.default_rng(seed)
    score = rng.random((1, rows, blocks * 4 * kernel)).astype(np.float32)
    first = largest(score, np.zeros(score.shape, bool), Pattern(1, 4), kernel)
    second = largest(score, first, Pattern(2, 4), kernel)
    assert (second >= first).all()
    for mask, n in ((first, 1), (second, 2)):
        per_channel = mask.reshape(rows, blocks, 4, kernel)  # as a convolution's weight is laid out
        assert (per_channel.sum(2) == n).all()
    best = score.reshape(rows, blocks, 4, kernel).max(2, keepdims=True)
    assert (
        first.reshape(rows, blocks, 4, kernel) == (score.reshape(rows, blocks, 4, kernel) == best)
    ).all()


@settings(max_examples=15)
@given(seeds)
def test_nested_masks_by_alternating_directions(seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((200, 8)) @ rng.standard_normal((8, 8))
    x = (x / x.std(0)).astype(np.float32)
    weight = rng.standard_normal((1, 6, 8)).astype(np.float32)
    xx = (x.T @ x)[None] / np.float32(len(x))
    frozen, before = np.zeros(weight.shape, bool), np.inf
    for budget in (5, 12, 30, 48):
        mask, kept = admm(
            weight @ xx, weight, frozen, budget, inverse=inverse_of(xx, Work(1)), work=Work(1)
        )
        assert mask.sum() == budget
        assert (mask >= frozen).all()
        assert not kept[~mask].any()
        error = np.square(x @ (kept - weight)[0].T).mean()
        assert error <= before * 1.05
        frozen, before = mask, error
    assert before == 0


def test_masks_lose_less_of_the_outputs_than_those_by_magnitude() -> None:
    rng, lost = np.random.default_rng(0), {"magnitude": 0.0, "admm": 0.0}
    for _ in range(5):
        x = rng.standard_normal((300, 24)) @ rng.standard_normal((24, 24)) ** 3
        x = (x / x.std(0)).astype(np.float32)
        xx = (x.T @ x)[None] / np.float32(len(x))
        weight = rng.standard_normal((1, 16, 24)).astype(np.float32)
        nothing, inverse = np.zeros(weight.shape, bool), inverse_of(xx, Work(1))
        masks = {
            "magnitude": largest(np.abs(weight), nothing, 96),
            "admm": admm(weight @ xx, weight, nothing, 96, inverse=inverse, work=Work(1))[0],
        }
        for name, mask in masks.items():
            values = solve_alone(xx, weight @ xx, weight, mask, Work(1), 30)
            lost[name] += np.square(x @ (values - weight)[0].T).mean()
    assert lost["admm"] < 0.7 * lost["magnitude"]


@given(seeds, st.integers(1, 6))
def test_counters_are_the_first_level_that_keeps_a_weight(seed: int, levels: int) -> None:
    rng = np.random.default_rng(seed)
    want = rng.integers(0, levels + 1, (2, 3, 4))
    masks = [(want > 0) & (want <= level) for level in range(1, levels + 1)]
    assert (counters_of(masks) == want).all()
