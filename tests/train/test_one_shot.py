"""One-shot magnitude levels: trainer and `elsa_format.pack` choose the same weights.

They share no code: one finds thresholds on devices, the other in passes over a checkpoint. Both
give ties to the tensor that comes first, then to the lower index; tensors come in the order of the
tree, which of dicts is sorted, and of the checkpoint. Of weights that no level has, the trainer
makes -0 and denormals +0, the packer keeps them.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from internals import apply_mask

import elsa_format
from elsa_train import (
    Joint,
    Network,
    Pruner,
    Schedule,
    Scope,
    multi_level,
    nest,
    parse_levels,
    write_file,
)

NOW = Schedule(0, 0, 1)
SHAPES = {"a/kernel": (3, 3, 4, 16), "b/kernel": (16, 24), "c/kernel": (40, 32)}
LEVELS = {"global": "97,90,60.5", "uniform": "97,90,60.5", "nm": "1:8,1:4,2:4"}


def weights(dtype):
    """Draw weights, half of them few values: ties at thresholds, and zeros, but none negative."""
    rng = np.random.default_rng(0)
    drawn = {name: rng.normal(size=shape) for name, shape in SHAPES.items()}
    drawn |= {name: np.round(2 * drawn[name]) / 4 + 0.0 for name in ("a/kernel", "c/kernel")}
    return {name: jnp.asarray(array, dtype) for name, array in drawn.items()}


def sequentially(params, scope, levels):
    def sparsify(network, counters, level):
        kept = Pruner(scope, level, NOW).mask(network.params, None, counters, 0)
        return Network(apply_mask(network.params, kept))

    def densify(network, counters, level):
        def restore(p, n, first):
            return jnp.where(n == 0, first, p)

        return Network(jax.tree.map(restore, network.params, counters, params))

    return multi_level(Network(params), levels, sparsify, densify)


def jointly(params, scope, levels):
    return nest(Network(params), Joint(scope, levels, NOW).rank(params, 0), levels)


@pytest.mark.parametrize(("train", "dtype"), [(sequentially, "float32"), (jointly, "bfloat16")])
@pytest.mark.parametrize("scope", LEVELS)
def test_trainer_and_packer_write_the_same_network(tmp_path, scope, train, dtype):
    params, levels = weights(dtype), parse_levels(LEVELS[scope])
    result = train(params, Scope(scope), levels)
    write_file(tmp_path / "trained.safetensors", result)
    arrays = {name: np.asarray(leaf) for name, leaf in params.items()}
    elsa_format.pack(
        arrays,
        tmp_path / "packed.safetensors",
        sparsities=LEVELS[scope],
        scope="global" if scope == "nm" else scope,
    )
    with (
        elsa_format.open(tmp_path / "trained.safetensors") as trained,
        elsa_format.open(tmp_path / "packed.safetensors") as packed,
    ):
        assert trained.nested == packed.nested
        for one, other in zip(trained.levels, packed.levels, strict=True):
            assert (one.name, one.nonzero, one.digest) == (other.name, other.nonzero, other.digest)
        for name, array in packed.load("dense").items():
            assert trained.load("dense")[name].tobytes() == array.tobytes()
            mask = (1 << result.bits) - 1
            word = np.uint16 if dtype == "bfloat16" else np.uint32
            counters = array.view(word) & mask
            np.testing.assert_array_equal(counters, np.asarray(result.counters[name]))
