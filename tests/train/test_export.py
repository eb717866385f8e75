"""Every compiled function lowers for GPUs and TPUs, with nothing that only a CPU has."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import tiny
from internals import (
    SCORES,
    Output,
    Reporter,
    Request,
    Run,
    Whole,
    _loop,
    _method,
    _ranking,
    _select_blocks,
    _selection,
    _sparsify,
    _wide,
)
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from elsa_format.levels import Pattern

PLATFORMS = ["cuda", "tpu"]
JITTED = re.compile(r"jax\.jit\b")
PACKAGE = Path(_method.__file__).parent


def lowered(function, *arguments, **words):
    """Export for accelerators; a custom call that only a CPU has is an error of that already."""
    text = jax.export.export(function, platforms=PLATFORMS)(*arguments, **words).mlir_module()
    assert "stablehlo.sort" not in text
    calls = set(re.findall(r"custom_call @(\w+)", text))
    assert calls <= {"Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape"}
    return text


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    recipe = tiny(method="joint", score="saliency", augment="crop-flip")
    return Run(recipe, 0, Output(tmp_path_factory.mktemp("run")), Reporter())


@pytest.fixture(scope="module")
def network(run):
    """A network, its counters, its mask and a batch: shapes alone."""
    like = run.trainer.like
    n = jax.eval_shape(_method.counters, like.params)
    kept = jax.eval_shape(_sparsify.keep_all, like.params)
    size = run.recipe.batch_size
    labels = jax.ShapeDtypeStruct((size,), jnp.int32)
    images = jax.ShapeDtypeStruct((size, *run.trainer.data.shape()), jnp.uint8)
    return like, n, kept, (images, labels)


def test_the_steps_of_a_run(run, network):
    like, n, kept, batch = network
    trainer, rate = run.trainer, jax.ShapeDtypeStruct((), jnp.float32)
    key = jax.eval_shape(lambda: jax.random.key(0))
    optimizer = jax.eval_shape(trainer.optimizer.init, like.params)
    carry = _loop.Carry(like.params, like.state, optimizer)
    lowered(trainer.draw, key)
    lowered(trainer.step, carry, n, kept, batch, key, rate)
    t = jax.ShapeDtypeStruct((), jnp.uint8)
    for teacher in (None, like):
        lowered(trainer.joint_step, carry, t, n, batch, key, rate, teacher)
    lowered(trainer.gradients, like.params, like.state, batch, key)
    lowered(trainer._evaluate, like, *batch)
    lowered(trainer._seen, like.params, batch[0], key)
    lowered(_loop._apply_mask, like.params, kept)
    lowered(_loop._revive, like.params, like.params, n)
    lowered(_loop._sparsity, kept)


def test_freezing_and_its_checks(network):
    like, n, kept, _ = network
    t = jax.ShapeDtypeStruct((), jnp.uint8)
    for rounding in ("nearest", "overwrite"):
        settings = {"bits": 2, "dtype": jnp.bfloat16, "rounding": rounding}
        lowered(
            jax.jit(lambda p, n, t, s=settings: _method.freeze(p, n, t, **s)), like.params, n, t
        )
        lowered(jax.jit(lambda p, n, s=settings: _method.finish(p, n, **s)), like.params, n)
    lowered(_method.frozen_unchanged, like.params, like.params, n)
    lowered(_method.count_nonzero, like.params)
    lowered(_method.count_frozen, n)
    lowered(_method.all_finite, like)
    lowered(_sparsify._extend, n, kept, t)
    lowered(jax.jit(_method.keep_frozen), like.params, like.params, n)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("split", [False, True], ids=["one place", "mesh"])
def test_every_selection(score, split):
    mesh = Mesh(np.array(jax.devices()), ("fsdp",))
    sharding = NamedSharding(mesh, PartitionSpec("fsdp")) if split else None
    params = [jnp.zeros((16, 8)), jnp.zeros((8, 8), jnp.bfloat16)]
    n = [jnp.zeros(p.shape, jnp.uint8) for p in params]
    both, score = (sharding, sharding), SCORES[score]
    for together in (True, False):
        ranking = _ranking.Ranking(score, together, both)
        budgets = _wide.wide([9] if together else [9, 9])
        lowered(_ranking._select, ranking, params, params, n, budgets)
    lowered(_select_blocks, Request(score, both, Pattern(2, 4), 0), params, params, n)
    if not split:
        budgets = np.array([3, 9], np.uint32)
        lowered(_selection.rank_whole, Whole(score, both), params, params, n, budgets)


def test_what_is_compiled_is_tried_here():
    """Where `jax.jit` stands in the package: a new one belongs into this file."""
    found = {
        str(path.relative_to(PACKAGE)): len(JITTED.findall(path.read_text("utf-8")))
        for path in PACKAGE.rglob("*.py")
        if not path.is_relative_to(PACKAGE / "torch") and "_calibrate" not in str(path)
    }
    assert {name: count for name, count in found.items() if count} == {
        "_jaxpruner.py": 1,  # what an updater of somebody else's does
        "_joint.py": 1,
        "_loop.py": 11,
        "_method.py": 4,
        "_multilevel.py": 2,
        "_recalibrate.py": 1,  # as Trainer._seen
        "_selection.py": 1,
        "_sharded/hosts.py": 1,  # between processes, which have one kind of device
        "_sharded/ranking.py": 1,
        "_sparsify.py": 2,
    }
