"""Counts and places beyond a word; words are made small where large arrays would be needed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from internals import SCORES, Request, _ranking, _select_blocks, _selection, _sparsity, _wide

from elsa_format.levels import Pattern
from elsa_train import Scope


@pytest.mark.parametrize(("a", "b"), [(5, 7), (2**32 - 1, 1), (2**40 + 3, 2**33 - 1), (0, 2**32)])
def test_numbers_of_two_words(a, b):
    x, y = (jax.tree.map(lambda word: word[0], _wide.wide([n])) for n in (a, b))
    assert _wide.whole(_wide.add(x, y)) == a + b
    assert _wide.whole(_wide.subtract(_wide.add(x, y), y)) == a
    assert bool(_wide.at_most(x, y)) == (a <= b)
    assert _wide.whole(_wide.smaller(x, y)) == min(a, b)


def test_a_tensor_that_a_word_cannot_count_is_numbered_by_rows(monkeypatch):
    monkeypatch.setattr(_wide, "WORD", 40)
    monkeypatch.setattr(_ranking, "SLAB", 16)
    monkeypatch.setattr(_selection, "WHOLE", 0)
    rng = np.random.default_rng(0)
    params = {"kernel": jnp.asarray(rng.integers(-2, 3, (7, 3, 11)), jnp.float32)}
    assert _wide.one_word_axes((7, 3, 11)) == 1
    assert _wide.whole(_wide.count(params["kernel"] > 0)) == int((params["kernel"] > 0).sum())
    ranked = np.argsort(-np.abs(np.asarray(params["kernel"]).ravel()), kind="stable")
    n = {"kernel": jnp.zeros((7, 3, 11), jnp.uint8)}
    jax.clear_caches()
    for budget in (1, 50, 100, 200, 231):
        kept = Scope().select(params, n, [budget], None)["kernel"]
        assert set(np.flatnonzero(kept)) == set(ranked[:budget])
    jax.clear_caches()


def test_the_sparsity_that_is_shown_counts_beyond_a_word():
    more = jax.ShapeDtypeStruct((1 << 17, 1 << 16), bool)
    assert jax.eval_shape(_sparsity, [more]).shape == ()
    masks = [jnp.arange(2**25) % 4 == 0, jnp.ones(3, bool)]
    assert float(_sparsity(masks)) == pytest.approx(0.75 * 2**25 / (2**25 + 3), rel=1e-6)


def two_kernels(dtype):
    params = [jnp.zeros((512, 1024), dtype), jnp.zeros((2048, 256), dtype)]
    return params, [jnp.zeros(p.shape, jnp.uint8) for p in params], sum(p.nbytes for p in params)


DTYPES = ["float32", "bfloat16", "float16", "float64"]
UNOPTIMIZED = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("score", "together"), [("magnitude", True), ("gradient", False), ("saliency", True)]
)
def test_selection_needs_no_copy_of_the_network(score, together, dtype):
    with jax.enable_x64(dtype == "float64"):
        params, n, model = two_kernels(dtype)
        ranking = _ranking.Ranking(SCORES[score], together, (None, None))
        budgets = _wide.wide([9] if together else [9, 9])
        lowered = _ranking._select.lower(ranking, params, params, n, budgets)
        used = lowered.compile(UNOPTIMIZED).memory_analysis()
    assert used.temp_size_in_bytes < model / 100


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("score", SCORES)
def test_selection_in_blocks_needs_one_copy_at_most(score, dtype):
    with jax.enable_x64(dtype == "float64"):
        params, n, model = two_kernels(dtype)
        request = Request(SCORES[score], (None, None), Pattern(2, 4), axis=0)
        lowered = _select_blocks.lower(request, params, params, n)
        used = lowered.compile(UNOPTIMIZED).memory_analysis()
    assert used.temp_size_in_bytes < 1.5 * model


@pytest.mark.parametrize("whole", [1 << 28, 0], ids=["whole", "slabs"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_words_of_two_bytes_are_ranked_by_their_bits(dtype, whole, monkeypatch):
    """Every one of them, four times: zeros, denormals, infinities and each NaN keep their order."""
    monkeypatch.setattr(_selection, "WHOLE", whole)
    words = np.random.default_rng(0).permutation(np.tile(np.arange(1 << 16, dtype=np.uint16), 4))
    params = {"kernel": jnp.asarray(words.view(dtype))}
    n = {"kernel": jnp.zeros(words.shape, jnp.uint8)}
    ranked = np.argsort(-(words & 0x7FFF).astype(np.int32), kind="stable")
    for budget in (9, 999, 5555, words.size // 2, words.size - 999, words.size - 9):
        kept = np.asarray(Scope().select(params, n, [budget], None)["kernel"])
        assert set(np.flatnonzero(kept)) == set(ranked[:budget])
