"""flax.nnx models: their states are networks, called as linen's are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from internals import TrainError, flatten

import elsa_format
from elsa_train import (
    Network,
    Pruner,
    Schedule,
    Scope,
    multi_level,
    parse_levels,
    revive,
    write_file,
)


class Net(nnx.Module):
    """What has names of every kind: a list, statistics, and random keys that are no weights."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(2)])
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.drop(self.norm(x))


def one_shot(network, counters, level):
    anew = jax.tree.map(lambda p: jnp.full_like(p, 0.5), network.params)
    network = network._replace(params=revive(network.params, anew, counters))
    kept = Pruner(Scope(), level, Schedule(0, 0, 1)).mask(network.params, None, counters, 0)
    return network._replace(params=jax.tree.map(lambda p, k: p * k, network.params, kept))


def test_a_state_is_a_network_and_its_file_that_of_plain_dictionaries(tmp_path):
    graph, params, statistics, rest = nnx.split(Net(), nnx.Param, nnx.BatchStat, ...)
    result = multi_level(Network(params, statistics), parse_levels("75,50"), one_shot)
    write_file(tmp_path / "states.safetensors", result)
    with elsa_format.open(tmp_path / "states.safetensors") as file:
        assert set(file.nested) == {
            *(f"layers/{i}/{kind}" for i in (0, 1) for kind in ("kernel", "bias")),
            *("norm/scale", "norm/bias"),
        }
        assert set(file.per_level) == {"norm/mean", "norm/var"}
        dense = file.load("dense")
    plain = Network(nnx.to_pure_dict(params), nnx.to_pure_dict(statistics))
    write_file(tmp_path / "plain.safetensors", multi_level(plain, parse_levels("75,50"), one_shot))
    one, other = (tmp_path / f"{name}.safetensors" for name in ("states", "plain"))
    assert one.read_bytes() == other.read_bytes()
    model = nnx.merge(graph, *result.network, rest)
    np.testing.assert_array_equal(model.layers[1].kernel[...], dense["layers/1/kernel"])


def test_names_are_linens():
    class Same(linen.Module):
        @linen.compact
        def __call__(self, x):
            return linen.Dense(3, name="first")(x)

    class Other(nnx.Module):
        def __init__(self) -> None:
            self.first = nnx.Linear(2, 3, rngs=nnx.Rngs(0))

    params = Same().init(jax.random.key(0), jnp.ones((1, 2)))["params"]
    assert flatten(params).keys() == flatten(nnx.state(Other())).keys()


def test_sharded_linen_parameters_have_the_names_of_plain_ones():
    box = {"first": {"kernel": linen.Partitioned(jnp.ones((2, 2)), ("in", "out"))}}
    assert list(flatten(box)) == ["first/kernel"]


def test_a_whole_model_is_refused_with_what_to_do():
    with pytest.raises(TrainError, match=r"'drop/rngs/count' is uint32.*split into nnx.Param"):
        multi_level(Network(Net()), parse_levels("50"), one_shot)
    with pytest.raises(TrainError, match="no parameters"):
        multi_level(Network({}), parse_levels("50"), one_shot)
