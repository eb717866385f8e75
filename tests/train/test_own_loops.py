"""Loops of others: whatever makes the updates, levels keep their bits and come back from the file.

The table of docs/training.md names what is tried here.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from internals import TrainError

import elsa_train as et

RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(64, 16)), jnp.float32)
Y = X @ jnp.asarray(RNG.normal(size=(16, 4)), jnp.float32)
LEVELS, STEPS = et.parse_levels("90,50"), 6


def params_():
    rng = np.random.default_rng(1)
    return {"layer": {"kernel": jnp.asarray(0.1 * rng.normal(size=(16, 4)), jnp.float32)}}


def loss(params):
    return jnp.mean((X @ params["layer"]["kernel"] - Y) ** 2)


def nested(params, start, step, finish=lambda params, state, *_: params, loss_scope=None):
    """Run Algorithm 2 with a loop of start, steps and what becomes of the result."""
    scope = loss_scope or et.Scope()

    def train(params, n, pruner=None):
        # Copied: steps may donate what they are given, and the caller still compares it.
        params, kept = jax.tree.map(jnp.copy, params), et.keep_all(params)
        state = start(params)
        for number in range(STEPS):
            if pruner and pruner.updates_at(number):
                kept = pruner.mask(params, None, n, number)
                params = et.apply_mask(params, kept)
            params, state = step(params, state, n, kept)
        return et.Network(finish(params, state, n, kept))

    def sparsify(network, n, level):
        return train(network.params, n, et.Pruner(scope, level, et.Schedule(0, 3, 1)))

    def densify(network, n, level):
        return train(et.revive(network.params, params, n), n)

    return et.multi_level(et.Network(params), LEVELS, sparsify, densify, scope=scope)


def check(result, params, tmp_path):
    """Each level has its weights, and the file gives them back into a tree like the params."""
    path = tmp_path / "own.safetensors"
    et.write_file(path, result)
    dense, n = result.network.params, result.counters
    for t in (1, 2, "dense"):
        found = et.load(path, t, like=params)
        assert jax.tree.structure(found) == jax.tree.structure(params)
        wanted = dense if t == "dense" else et.masked(dense, n, t)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    changed = jax.tree.map(lambda a, b: np.any(np.asarray(a) != np.asarray(b)), dense, params)
    assert all(jax.tree.leaves(changed))


def in_optax(optimizer, **also):
    """Return start and step of a loop with `et.apply_updates`, the primary way."""

    @jax.jit
    def step(params, state, n, kept):
        updates, state = optimizer.update(jax.grad(loss)(params), state, params, **also)
        return et.apply_mask(et.apply_updates(params, updates, n), kept), state

    return optimizer.init, step


def test_adamw(tmp_path):
    check(nested(params_(), *in_optax(optax.adamw(1e-2))), params_(), tmp_path)


def test_multi_steps(tmp_path):
    optimizer = optax.MultiSteps(optax.adamw(1e-2), every_k_schedule=2)
    check(nested(params_(), *in_optax(optimizer)), params_(), tmp_path)


def test_sam(tmp_path):
    optimizer = optax.contrib.sam(
        optax.sgd(1e-1, momentum=0.9), optax.sgd(0.05), sync_period=2, opaque_mode=True
    )
    loop = in_optax(optimizer, grad_fn=lambda params, _: jax.grad(loss)(params))
    check(nested(params_(), *loop), params_(), tmp_path)


def test_sam_in_steps_of_its_own(tmp_path):
    optimizer = optax.contrib.sam(optax.sgd(1e-1), optax.sgd(0.05), sync_period=2)
    check(nested(params_(), *in_optax(optimizer)), params_(), tmp_path)


def test_schedule_free(tmp_path):
    optimizer = optax.contrib.schedule_free_adamw(1e-1)

    def finish(params, state, n, kept):
        averaged = optax.contrib.schedule_free_eval_params(state, params)
        return et.apply_mask(et.keep_frozen(averaged, params, n), kept)

    check(nested(params_(), *in_optax(optimizer), finish), params_(), tmp_path)


def test_exponential_moving_average(tmp_path):
    optimizer = optax.adamw(1e-2)

    def start(params):
        return optimizer.init(params), params

    @jax.jit
    def step(params, state, n, kept):
        inner, average = state
        updates, inner = optimizer.update(jax.grad(loss)(params), inner, params)
        params = et.apply_mask(et.apply_updates(params, updates, n), kept)
        return params, (inner, optax.incremental_update(params, average, 0.3))

    def finish(params, state, n, kept):
        return et.apply_mask(et.keep_frozen(state[1], params, n), kept)

    check(nested(params_(), start, step, finish), params_(), tmp_path)


def test_train_state(tmp_path):
    def start(params):
        return TrainState.create(apply_fn=None, params=params, tx=optax.adamw(1e-2))

    @jax.jit
    def step(params, state, n, kept):
        updates, inner = state.tx.update(jax.grad(loss)(params), state.opt_state, params)
        params = et.apply_mask(et.apply_updates(params, updates, n), kept)
        return params, state.replace(step=state.step + 1, params=params, opt_state=inner)

    check(nested(params_(), start, step), params_(), tmp_path)


def test_a_step_that_donates(tmp_path):
    start, step = in_optax(optax.adamw(1e-2))
    donating = jax.jit(step, donate_argnums=(0, 1))
    check(nested(params_(), start, donating), params_(), tmp_path)


def test_donating_what_multi_level_keeps_is_said_to_be_that():
    step = jax.jit(lambda p: jax.tree.map(lambda x: 0.5 * x, p), donate_argnums=0)

    def sparsify(network, n, level):
        return et.Network(step(network.params))

    with pytest.raises(TrainError, match=r"donated.*copy"):
        et.multi_level(et.Network(params_()), LEVELS, sparsify)


def test_nnx_optimizer(tmp_path):
    class Net(nnx.Module):
        def __init__(self):
            self.layer = nnx.Linear(16, 4, use_bias=False, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.layer(x)

    graph, params = nnx.split(Net(), nnx.Param)

    def start(params):
        return nnx.state(
            nnx.Optimizer(
                nnx.merge(graph, params),
                optax.chain(optax.adamw(1e-2), et.freeze_updates()),
                wrt=nnx.Param,
            )
        )

    @jax.jit
    def step(params, state, n, kept):
        model = nnx.merge(graph, params)
        optimizer = nnx.Optimizer(
            model, optax.chain(optax.adamw(1e-2), et.freeze_updates()), wrt=nnx.Param
        )
        nnx.update(optimizer, state)
        grads = nnx.grad(lambda model: jnp.mean((model(X) - Y) ** 2))(model)
        optimizer.update(model, grads, counters=n)
        return et.apply_mask(nnx.state(model, nnx.Param), kept), nnx.state(optimizer)

    check(nested(params, start, step), params, tmp_path)


def test_equinox(tmp_path):
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.Linear(16, 4, use_bias=False, key=jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)
    optimizer = optax.adamw(1e-2)

    @jax.jit
    def step(params, state, n, kept):
        def loss(params):
            return jnp.mean((jax.vmap(eqx.combine(params, static))(X) - Y) ** 2)

        updates, state = optimizer.update(jax.grad(loss)(params), state, params)
        return et.apply_mask(et.apply_updates(params, updates, n), kept), state

    scope = et.Scope(prune="weight$")
    check(nested(params, optimizer.init, step, loss_scope=scope), params, tmp_path)


def test_haiku(tmp_path):
    hk = pytest.importorskip("haiku")
    model = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([4], with_bias=False)(x)))
    params, optimizer = model.init(jax.random.key(0), X), optax.adamw(1e-2)

    @jax.jit
    def step(params, state, n, kept):
        grads = jax.grad(lambda p: jnp.mean((model.apply(p, X) - Y) ** 2))(params)
        updates, state = optimizer.update(grads, state, params)
        return et.apply_mask(et.apply_updates(params, updates, n), kept), state

    scope = et.Scope(prune="w$")
    check(nested(params, optimizer.init, step, loss_scope=scope), params, tmp_path)


def test_load_gives_types_shapes_places_and_statistics(tmp_path):
    def sparsify(network, n, level):
        kept = et.Pruner(et.Scope(), level, et.Schedule(0, 0, 1)).mask(network.params, None, n, 0)
        return et.Network(et.apply_mask(network.params, kept), {"mean": jnp.ones(3)})

    start = et.Network(params_(), {"mean": jnp.zeros(3)})
    path = tmp_path / "net.safetensors"
    et.write_file(path, et.multi_level(start, LEVELS[:1], sparsify, scope=et.Scope()))
    everywhere = jax.NamedSharding(jax.make_mesh((1,), ("all",)), jax.P())
    like = et.Network(
        jax.tree.map(partial(jnp.asarray, dtype="bfloat16"), params_()),
        {"mean": jax.device_put(jnp.zeros(3), everywhere)},
    )
    found = et.load(path, 1, like=like)
    assert found.params["layer"]["kernel"].dtype == jnp.bfloat16
    assert found.state["mean"].sharding == everywhere
    assert found.state["mean"].tolist() == [1, 1, 1]
    shapes = jax.eval_shape(lambda: params_())
    assert et.load(path, "90%", like=shapes)["layer"]["kernel"].shape == (16, 4)
    with pytest.raises(TrainError, match="missing"):
        et.load(path, 1, like={"other": jnp.ones(3)})
    with pytest.raises(TrainError, match="expected"):
        et.load(path, 1, like={"layer": {"kernel": jnp.ones((4, 16))}})


@pytest.mark.parametrize("name", ["sparse", "learnable", "check_levels", "JaxprunerRule", "freeze"])
def test_former_names_work_with_a_warning(name):
    with pytest.warns(DeprecationWarning, match=f"elsa_train.{name} is now"):
        assert getattr(et, name)
    assert name not in et.__all__
