"""Counts and places beyond a word; words are made small where large arrays would be needed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from elsa_train import Scope, _ranking, _wide
from elsa_train._sparsify import SCORES


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


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("score", ["magnitude", "saliency"])
def test_selection_needs_no_copy_of_the_network(score, together):
    params = [jnp.zeros((512, 1024)), jnp.zeros((2048, 256))]
    n = [jnp.zeros(p.shape, jnp.uint8) for p in params]
    ranking = _ranking.Ranking(SCORES[score], together, (None, None))
    budgets = _wide.wide([9] if together else [9, 9])
    compiled = _ranking._select.lower(ranking, params, params, n, budgets).compile()
    model = sum(p.nbytes for p in params)
    assert compiled.memory_analysis().temp_size_in_bytes < model / 100
