"""Algorithm 2 on any pytree, with any routines; routines that break its contract are caught."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from internals import (
    FrozenWeightChanged,
    InfeasibleTraining,
    MissedBudget,
    _method,
    apply_mask,
    check_sparsity,
)

import elsa_format
from elsa_train import Network, Pruner, Schedule, Scope, multi_level, nest, parse_levels, write_file

RNG = np.random.default_rng(0)
# No flax here: tuples and lists of arrays, statistics beside them.
PARAMS = {
    "layers": [jnp.asarray(RNG.normal(size=(16, 16)), jnp.float32) for _ in range(2)],
    "out": (jnp.asarray(RNG.normal(size=16), jnp.float32), jnp.asarray(0.5)),
}
NETWORK = Network(PARAMS, {"mean": jnp.zeros(4)})
SCOPE = Scope("global", prune="^layers/")


def one_shot(network, counters, level):
    kept = Pruner(SCOPE, level, Schedule(0, 0, 1)).mask(network.params, None, counters, 0)
    state = jax.tree.map(lambda s: s + 1, network.state)
    return Network(apply_mask(network.params, kept), state)


def jitter(network, counters, level):
    noise = jax.tree.map(
        lambda p: jnp.asarray(np.random.default_rng(p.size).normal(size=p.shape), p.dtype),
        network.params,
    )
    return network._replace(params=_method.apply_updates(network.params, noise, counters))


def test_each_level_comes_back_from_the_file_as_it_froze(tmp_path):
    frozen = []

    def evaluate(network):
        frozen.append(jax.tree.map(np.array, network))
        return {"norm": float(sum(jnp.sum(p**2) for p in jax.tree.leaves(network.params)))}

    levels = parse_levels("90,75,50")
    result = multi_level(NETWORK, levels, one_shot, jitter, evaluate=evaluate)
    write_file(tmp_path / "net.safetensors", result)
    with elsa_format.open(tmp_path / "net.safetensors") as file:
        assert set(file.nested) == {"layers/0", "layers/1", "out/0", "out/1"}
        assert file.per_level == ("mean",)
        for t, network in enumerate(frozen[:-1], 1):
            found = file.load(t)
            for i in (0, 1):
                assert found[f"layers/{i}"].tobytes() == network.params["layers"][i].tobytes()
                assert found[f"out/{i}"].tobytes() == network.params["out"][i].tobytes()
            np.testing.assert_array_equal(found["mean"], np.full(4, t))
            assert file.levels[t - 1].metrics == result.levels[t - 1].metrics
            assert file.levels[t - 1].target == levels[t - 1].target
            kept = sum(int(np.count_nonzero(found[f"layers/{i}"])) for i in (0, 1))
            assert kept == round(512 * (1 - levels[t - 1].target))


def test_intermediate_densify_can_be_left_out():
    calls = []

    def densify(network, counters, level):
        calls.append(level.name)
        return network

    def sparsify(network, counters, level):  # begins dense by itself
        return one_shot(jitter(network, counters, level), counters, level)

    multi_level(NETWORK, parse_levels("90,75,50"), sparsify, densify, densify_between=False)
    assert calls == ["50%"]


def test_progress_resumes_to_the_same_bits():
    levels, seen = parse_levels("90,50"), []
    whole = multi_level(NETWORK, levels, one_shot, jitter, on_progress=seen.append)
    for progress in seen:
        again = multi_level(NETWORK, levels, one_shot, jitter, progress=progress)
        for a, b in zip(*map(jax.tree.leaves, (whole.network, again.network)), strict=True):
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
        assert [f.digest for f in again.levels] == [f.digest for f in whole.levels]


def test_a_sparsify_that_loses_frozen_weights_is_caught():
    def careless(network, counters, level):
        none = jax.tree.map(jnp.zeros_like, counters)
        return one_shot(
            network._replace(
                params=jax.tree.map(
                    jnp.roll, network.params, jax.tree.map(lambda _: 1, network.params)
                )
            ),
            none,
            level,
        )

    with pytest.raises(FrozenWeightChanged, match="sparsify at level 50%"):
        multi_level(NETWORK, parse_levels("90,50"), careless)


def test_a_densify_that_moves_frozen_weights_is_caught():
    def careless(network, counters, level):
        return network._replace(params=jax.tree.map(lambda p: p * 0.999, network.params))

    with pytest.raises(FrozenWeightChanged, match="densify after level 90%"):
        multi_level(NETWORK, parse_levels("90,50"), one_shot, careless)


def test_infeasible_levels_are_refused_before_any_routine():
    def never(network, counters, level):
        raise AssertionError

    with pytest.raises(InfeasibleTraining):
        multi_level(NETWORK, parse_levels("50,90"), never)


def prune_less(network, counters, level):
    (less,) = parse_levels("70")
    return one_shot(network, counters, less)


@pytest.mark.parametrize("scope", [SCOPE, None], ids=["scope", "no scope"])
@pytest.mark.parametrize(
    ("sparsify", "densify", "wrong"),
    [
        (lambda network, counters, level: network, jitter, "level 90%"),  # forgot its mask
        (prune_less, jitter, "level 90%"),
        (one_shot, lambda network, counters, level: network, "level 50%"),  # nothing new to keep
    ],
    ids=["dense", "too dense", "too sparse"],
)
def test_levels_that_miss_their_sparsity_are_refused(scope, sparsify, densify, wrong):
    seen = []
    with pytest.raises(MissedBudget, match=f"{wrong}: has"):
        multi_level(
            NETWORK,
            parse_levels("90,50"),
            sparsify,
            densify,
            scope=scope,
            evaluate=lambda network: seen.append(network) or {},
        )
    assert len(seen) == (wrong == "level 50%")  # before anything is measured


@pytest.mark.parametrize(
    ("levels", "scope"), [("51,50", None), ("50.1,50", SCOPE)], ids=["no scope", "scope"]
)
def test_a_level_that_is_the_one_before_is_refused(levels, scope):
    """Though it is within the slack: its biases alone may have changed."""

    def densify(network, counters, level):
        _, scalar = network.params["out"]
        return Network({**network.params, "out": (jnp.ones(16), scalar)}, network.state)

    start = Network({**PARAMS, "out": (jnp.zeros(16), jnp.asarray(0.5))}, NETWORK.state)
    _, second = parse_levels(levels)
    with pytest.raises(MissedBudget, match=f"level {second.name}: adds no nonzero weights to the"):
        multi_level(start, parse_levels(levels), one_shot, densify, scope=scope)


def test_joint_levels_that_miss_their_sparsity_are_refused():
    levels = parse_levels("90,50")
    everything = jax.tree.map(lambda p: jnp.ones(p.shape, jnp.uint8), PARAMS)
    for scope in (SCOPE, None):
        with pytest.raises(MissedBudget, match="level 90%"):
            nest(Network(PARAMS), everything, levels, scope=scope)


def test_a_scope_that_prunes_nothing_is_refused_before_any_routine():
    with pytest.raises(InfeasibleTraining, match="no tensor matches"):
        multi_level(NETWORK, parse_levels("90"), None, scope=Scope(prune="nothing"))


@pytest.mark.parametrize(
    "tensors",
    [
        [((100, 100), 1000), ((100,), 0), ((100,), 93)],  # biases left at zero
        [((100, 100), 1000), ((500, 100), 50_000)],  # embeddings, not pruned
        [((100, 100), 1000), ((500, 100), 49_900)],  # with a row of zeros
        [((100, 100), 750), ((20, 100), 450)],  # by magnitudes of all
        [((100, 100), 600), ((600,), 400), ((40, 10), 400)],  # one of them is kept entirely
        [((7,), 1)],  # at least one weight is kept
    ],
    ids=str,
)
def test_levels_that_some_scope_explains_pass(tensors):
    check_sparsity(parse_levels("90")[0], tensors)
