"""Values are the best there are for given masks and scales: compared with dense solvers."""

import numpy as np
import scipy.linalg
from hypothesis import given, settings
from hypothesis import strategies as st
from internals import Work, best_scales, refit, solve_alone, solve_together

seeds = st.integers(0, 2**32 - 1)
work = Work(1)


def covariances(rng: np.random.Generator, groups: int, rows: int, columns: int):
    """Inputs with some correlation, wanted outputs, and their moments."""
    x = rng.standard_normal((groups, 60, columns)) + rng.standard_normal((groups, 60, 1))
    y = rng.standard_normal((groups, 60, rows)) + x[..., :1]
    xx = x.transpose(0, 2, 1) @ x / 60
    yx = y.transpose(0, 2, 1) @ x / 60
    return x, y, xx.astype(np.float32), yx.astype(np.float32)


@settings(max_examples=20)
@given(seeds, st.integers(1, 2), st.integers(1, 4), st.integers(1, 6))
def test_values_of_one_level_are_least_squares(
    seed: int, groups: int, rows: int, columns: int
) -> None:
    rng = np.random.default_rng(seed)
    x, y, xx, yx = covariances(rng, groups, rows, columns)
    mask = rng.random((groups, rows, columns)) < 0.6
    start = rng.standard_normal(mask.shape).astype(np.float32)
    found = solve_alone(xx, yx, start, mask, work, steps=50, rest_at_end=0)
    assert found.dtype == np.float32
    assert not found[~mask].any()
    for group in range(groups):
        for row in range(rows):
            kept = mask[group, row]
            if kept.any():
                best = scipy.linalg.lstsq(x[group][:, kept], y[group, :, row])[0]
                np.testing.assert_allclose(found[group, row, kept], best, rtol=1e-2, atol=1e-3)


@settings(max_examples=20)
@given(seeds, st.integers(1, 2), st.integers(1, 3), st.integers(2, 5))
def test_one_tensor_for_all_levels_minimises_the_sum_of_their_errors(
    seed: int, groups: int, rows: int, columns: int
) -> None:
    """The reference stacks all equations of a row: of every level, and of the ridge."""
    rng = np.random.default_rng(seed)
    data = [covariances(rng, groups, rows, columns) for _ in range(3)]
    first = rng.random((groups, rows, columns)) < 0.4
    masks = [first, first | (rng.random(first.shape) < 0.4), np.ones_like(first)]
    shares = [0.2, 0.3, 0.5]
    scales = [rng.uniform(0.5, 2, (groups, rows, 1)).astype(np.float32) for _ in data]
    near = rng.standard_normal(first.shape).astype(np.float32)
    ridge = rng.uniform(0.01, 0.1, (groups, columns)).astype(np.float32)
    found = solve_together(
        [xx for _, _, xx, _ in data],
        [yx for _, _, _, yx in data],
        [mask.astype(np.float32) for mask in masks],
        shares,
        scales,
        near,
        ridge,
        np.zeros_like(near),
        work,
        steps=60,
        rest_at_end=0,
    )
    for group in range(groups):
        for row in range(rows):
            left = [np.diag(np.sqrt(ridge[group]))]
            right = [np.sqrt(ridge[group]) * near[group, row]]
            for (x, y, _, _), mask, share, scale in zip(data, masks, shares, scales, strict=True):
                size = np.sqrt(share / 60)
                left.append(size * scale[group, row] * mask[group, row] * x[group])
                right.append(size * y[group, :, row])
            best = scipy.linalg.lstsq(np.concatenate(left), np.concatenate(right))[0]
            np.testing.assert_allclose(found[group, row], best, rtol=1e-2, atol=1e-3)


@settings(max_examples=20)
@given(seeds)
def test_scales_are_the_best_factors_within_their_bounds(seed: int) -> None:
    rng = np.random.default_rng(seed)
    x, y, xx, yx = covariances(rng, 2, 3, 4)
    weight = rng.standard_normal((2, 3, 4)).astype(np.float32)
    found = best_scales(weight, xx, yx, work)
    made = x @ weight.transpose(0, 2, 1)
    best = (made * y).sum(1) / np.square(made).sum(1)
    np.testing.assert_allclose(found[..., 0], np.clip(best, 0.5, 4), rtol=2e-2)


def test_rows_of_zeros_get_a_finite_scale() -> None:
    found = best_scales(np.zeros((1, 1, 3), np.float32), np.eye(3)[None], np.ones((1, 1, 3)), work)
    assert 0.5 <= found[0, 0, 0] <= 4


@settings(max_examples=20)
@given(seeds, st.floats(0, 1))
def test_small_weights_are_least_squares_drawn_to_the_original(seed: int, ridge: float) -> None:
    rng = np.random.default_rng(seed)
    x, y, xx, yx = covariances(rng, 3, 1, 4)
    near = rng.standard_normal((3, 1, 4))
    found = refit(xx, yx, near, ridge)
    for group in range(3):
        strength = np.sqrt(60 * (ridge * np.trace(xx[group]) / 4 + 1e-9))
        left = np.concatenate([x[group], strength * np.eye(4)])
        right = np.concatenate([y[group, :, 0], strength * near[group, 0]])
        best = scipy.linalg.lstsq(left, right)[0]
        np.testing.assert_allclose(found[group, 0], best, rtol=1e-3, atol=1e-4)
