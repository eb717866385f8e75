"""Moments are those of all inputs at once, in whatever batches these come."""

import numpy as np
import pytest
from elsa_converters.calibrate import Layer, Weights
from hypothesis import given, settings
from hypothesis import strategies as st
from internals import Collector, Work, apply, mixed

import elsa_format as elsa


@settings(max_examples=40)
@given(
    st.integers(0, 2**32 - 1),
    st.lists(st.integers(0, 9), max_size=5),
    st.booleans(),
    st.floats(-1000, 1000),
)
def test_moments_in_batches(seed: int, batches: list[int], centred: bool, mean: float) -> None:
    rng = np.random.default_rng(seed)
    count, layer = sum(batches), Layer("w", np.dtype(np.float32), 2, 3, 4, bias=centred)
    x = (rng.standard_normal((2, count, 4)) + mean * centred).astype(np.float32)
    y = (rng.standard_normal((2, count, 3)) - mean * centred).astype(np.float32)
    collector, at = Collector(layer), 0
    for size in batches:
        collector.add(x[:, at : at + size], y[:, at : at + size])
        at += size
    found = collector.moments()
    assert found.count == count
    if not count:
        assert not found.xx.any()
        return
    for group in range(2):
        both = np.concatenate([x[group], y[group]], 1).astype(np.float64)
        if centred:
            want = np.cov(both.T, bias=True)
            want_x, want_y = x[group].mean(0, dtype=np.float64), y[group].mean(0, dtype=np.float64)
            np.testing.assert_allclose(found.mean_x[group], want_x, rtol=1e-6, atol=1e-6)
            np.testing.assert_allclose(found.mean_y[group], want_y, rtol=1e-6, atol=1e-6)
        else:
            want = both.T @ both / count
            assert not found.mean_x.any()
            assert not found.mean_y.any()
        np.testing.assert_allclose(found.xx[group], want[:4, :4], rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(found.yx[group], want[4:, :4], rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(found.yy[group], np.diag(want)[4:], rtol=1e-4, atol=1e-4)


@settings(max_examples=20)
@given(st.integers(0, 2**32 - 1), st.floats(0, 1), st.booleans())
def test_mixed_targets_lie_between_the_original_and_what_its_weights_give(
    seed: int, mix: float, centred: bool
) -> None:
    rng = np.random.default_rng(seed)
    layer = Layer("w", np.dtype(np.float32), 1, 3, 4, bias=centred)
    x = rng.standard_normal((1, 50, 4)).astype(np.float32)
    y = rng.standard_normal((1, 50, 3)).astype(np.float32)
    bias = rng.standard_normal(3).astype(np.float32) if centred else None
    own = Weights(rng.standard_normal((1, 3, 4)).astype(np.float32), bias)
    plain, direct = Collector(layer), Collector(layer)
    plain.add(x, y)
    direct.add(x, mix * y + (1 - mix) * apply(x, own, 1))
    found, want = mixed(plain.moments(), own, mix, Work(1)), direct.moments()
    np.testing.assert_allclose(found.mean_y, want.mean_y, atol=1e-4)
    np.testing.assert_allclose(found.yx, want.yx, atol=1e-4)
    np.testing.assert_allclose(found.yy, want.yy, atol=1e-4)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e30])
def test_inputs_that_cannot_be_computed_with_are_refused(bad: float) -> None:
    collector = Collector(Layer("conv.w", np.dtype(np.float32), 1, 1, 2))
    x = np.array([[[1, 2], [3, 4], [bad, 5]]], np.float32)
    with np.errstate(all="ignore"):
        collector.add(x, x[..., :1])
        with pytest.raises(elsa.FormatError, match=r"layer 'conv\.w'.*NaN or infinite") as caught:
            collector.moments()
    assert "\n" not in str(caught.value)
