"""Frozen weights keep every bit, and counters are written as elsa_format writes them."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from internals import _method

import elsa_format

DTYPES = [np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)]
WORD = {2: np.uint16, 4: np.uint32}


def patterns(dtype: np.dtype, count: int = 4096) -> np.ndarray:
    """Return every finite value of a 16-bit type, or a sample with all the edges of a wider one."""
    word = WORD[dtype.itemsize]
    if dtype.itemsize == 2:
        words = np.arange(1 << 16, dtype=np.uint32).astype(word)
    else:
        rng = np.random.default_rng(0)
        edges = np.array([0, 1, 7, 0x007FFFFF, 0x00800000, 0x00800001, 0x7F7FFFFF, 0x7F7FFFFC])
        words = np.concatenate([edges, edges | 0x80000000, rng.integers(0, 1 << 32, count)])
        words = words.astype(word)
    values = words.view(dtype)
    exponent = int(np.asarray(np.inf, dtype).view(word))
    return values[(words & exponent) != exponent]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rounding", ["nearest", "overwrite"])
@pytest.mark.parametrize("bits", [1, 2, 3, 6])
def test_embed_gives_the_bits_of_elsa_format(dtype, rounding, bits):
    values = patterns(dtype)
    counters = np.random.default_rng(1).integers(0, 1 << bits, values.shape).astype(np.uint8)
    counters[values == 0] = 0
    expected = elsa_format.embed_counters(values, counters, bits, rounding=rounding)
    found = np.asarray(_method.embed(jnp.asarray(values), jnp.asarray(counters), bits, rounding))
    word = WORD[dtype.itemsize]
    np.testing.assert_array_equal(found.view(word), expected.view(word))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", [1, 3])
def test_freezing_marks_what_is_not_zero_and_no_stamp_is_denormal(dtype, bits):
    values = jnp.asarray(patterns(dtype))
    n = jnp.zeros(values.shape, jnp.uint8)
    theta, n = _method.freeze({"w": values}, {"w": n}, 1, bits=bits)
    theta, n = np.asarray(theta["w"]), np.asarray(n["w"])
    word = WORD[dtype.itemsize]
    assert np.all((n == 1) == (theta.view(word) != 0))
    smallest = float(ml_dtypes.finfo(dtype).smallest_normal)
    assert np.all(np.abs(theta[n == 1].astype(np.float64)) >= smallest)
    np.testing.assert_array_equal(elsa_format.read_counters(theta, bits), n)


def test_later_freezes_keep_earlier_bits_and_levels_come_back():
    rng = np.random.default_rng(0)
    params = {"a": jnp.asarray(rng.normal(size=(40, 5)), jnp.float32), "b": jnp.zeros(3)}
    n = _method.counters(params)
    levels = []
    for t, keep in enumerate([0.05, 0.3, 0.8], 1):
        kept = rng.random((40, 5)) < keep
        theta = jnp.where((n["a"] > 0) | kept, params["a"], 0.0)
        params, n = _method.freeze({**params, "a": theta}, n, t, bits=2)
        levels.append(jax.tree.map(np.array, params))
        # What a densify routine does: only learnable weights move.
        noise = jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), p.dtype), params)
        params = _method.apply_updates(params, noise, n)
    dense = _method.finish(params, n, bits=2)
    for t, level in enumerate(levels, 1):
        by_counters = _method.sparse(dense, n, t)
        for name in level:
            by_bits = elsa_format.mask_level(np.asarray(dense[name]), 2, t)
            for found in (by_counters[name], by_bits):
                assert np.asarray(found).tobytes() == level[name].tobytes()


OPTIMIZERS = {
    "sgd": lambda: optax.chain(
        optax.add_decayed_weights(5e-4), optax.sgd(0.1, momentum=0.9, nesterov=True)
    ),
    "adam": lambda: optax.adam(0.01),
    "adamw": lambda: optax.adamw(0.01, weight_decay=0.1),
}


@pytest.mark.parametrize("dtype", [np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)], ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_frozen_weights_never_change_by_a_bit(optimizer, dtype, data):
    """Over optimizers and types; denormals, signed zeros and the largest values included."""
    size, word = 64, WORD[dtype.itemsize]
    top = int(np.asarray(np.inf, dtype).view(word))
    magnitude = st.one_of(st.integers(0, 200), st.integers(0, top - 1))
    drawn = st.tuples(magnitude, st.booleans())
    pairs = data.draw(st.lists(drawn, min_size=size, max_size=size))
    sign = 1 << (8 * dtype.itemsize - 1)
    words = np.array([m | (sign if negative else 0) for m, negative in pairs], word)
    n = jnp.asarray(data.draw(st.lists(st.integers(0, 3), min_size=size, max_size=size)), jnp.uint8)
    params = jnp.asarray(words.view(dtype))
    transform = optax.chain(OPTIMIZERS[optimizer](), _method.freeze_updates())
    after, updates = _train(optimizer, transform, params, n)
    frozen = np.asarray(n) > 0
    np.testing.assert_array_equal(np.asarray(after).view(word)[frozen], words[frozen])
    assert not np.asarray(updates).astype(np.float32)[frozen].any()
    assert np.any(np.asarray(after).view(word)[~frozen] != words[~frozen]) or not (~frozen).any()


_COMPILED: dict = {}


def _train(name, transform, params, n):
    key = (name, params.dtype)
    if key not in _COMPILED:

        @jax.jit
        def steps(params, n):
            state = transform.init(params)
            for _ in range(3):
                grads = jnp.sign(params) + jnp.asarray(0.5, params.dtype)
                updates, state = transform.update(grads, state, params, counters=n)
                params = _method.apply_updates(params, updates, n)
            return params, updates

        _COMPILED[key] = steps
    return _COMPILED[key](params, n)


def test_the_transform_alone_is_exact_for_weights_that_were_frozen():
    """With optax's own apply_updates: freezing leaves no denormal that `x + 0` would flush."""
    values = jnp.asarray(patterns(np.dtype(np.float32)))
    params, n = _method.freeze(values, jnp.zeros(values.shape, jnp.uint8), 1, bits=2)
    transform = optax.chain(optax.sgd(0.1, momentum=0.9), _method.freeze_updates())
    grads = jnp.full_like(params, jnp.inf)
    updates, _ = transform.update(grads, transform.init(params), params, counters=n)
    after = jax.jit(optax.apply_updates)(params, updates)
    frozen = np.asarray(n) > 0
    same = np.asarray(after).view(np.uint32) == np.asarray(params).view(np.uint32)
    assert frozen.any()
    assert same[frozen].all()


def test_storage_type_is_exact_after_freezing():
    values = jnp.asarray(np.random.default_rng(0).normal(size=999), jnp.float32)
    n = jnp.zeros(values.shape, jnp.uint8)
    theta, n = _method.freeze(values, n, 2, bits=2, dtype=jnp.bfloat16)
    stored = np.asarray(theta).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(stored.astype(np.float32), np.asarray(theta))
    np.testing.assert_array_equal(elsa_format.read_counters(stored, 2), np.asarray(n))
