"""Nested networks from a flax.nnx model, with your own loop, and each of them in ONNX Runtime.

pip install '.[flax-onnx]'
python examples/nnx_to_onnx.py
"""

import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnxruntime
import optax
from elsa_converters.flax_onnx import template_from_flax
from elsa_converters.onnx import export
from flax import nnx
from sklearn.datasets import load_digits

import elsa_format
import elsa_train as et

images, labels = load_digits(return_X_y=True)
order = np.random.default_rng(0).permutation(len(labels))
images, labels = (images[order] / 16).astype(np.float32), labels[order]
train_x, train_y, test_x, test_y = images[:1400], labels[:1400], images[1400:], labels[1400:]


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(64, 128, rngs=rngs)
        self.norm = nnx.BatchNorm(128, momentum=0.9, rngs=rngs)
        self.second = nnx.Linear(128, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.second(nnx.relu(self.norm(self.first(x))))


# Parameters are shared by the levels; each level has batch-norm statistics of its own.
graph, params, statistics = nnx.split(Net(nnx.Rngs(0)), nnx.Param, nnx.BatchStat)
optimizer = optax.chain(optax.adamw(3e-3), et.freeze_updates())


@jax.jit
def step(params: Any, statistics: Any, state: Any, counters: Any, kept: Any, x: Any, y: Any) -> Any:
    def loss(params: Any) -> Any:
        model = nnx.merge(graph, params, statistics, copy=True)  # the call changes statistics
        error = optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()
        return error, nnx.state(model, nnx.BatchStat)

    grads, statistics = jax.grad(loss, has_aux=True)(params)
    updates, state = optimizer.update(grads, state, params, counters=counters)
    params = et.apply_updates(params, updates, counters)
    params = jax.tree.map(lambda p, k: jnp.where(k, p, 0), params, kept)
    return params, statistics, state


def train(network: et.Network, counters: Any, pruner: et.Pruner | None, steps: int) -> et.Network:
    rng = np.random.default_rng(0)
    params, statistics = network
    state, kept = optimizer.init(params), jax.tree.map(lambda p: jnp.ones(p.shape, bool), params)
    for number in range(steps):
        if pruner is not None and pruner.updates_at(number):
            kept = pruner.mask(params, None, counters, number)
        batch = rng.integers(0, len(train_y), 128)
        params, statistics, state = step(
            params, statistics, state, counters, kept, train_x[batch], train_y[batch]
        )
    return et.Network(params, statistics)


def sparsify(network: et.Network, counters: Any, level: et.Level) -> et.Network:
    pruner = et.Pruner(scope, level, et.Schedule(start=0, end=200, every=20))
    return train(network, counters, pruner, steps=300)


def densify(network: et.Network, counters: Any, level: et.Level) -> et.Network:
    return train(network, counters, None, steps=100)


def evaluate(network: et.Network) -> dict[str, float]:
    model = nnx.merge(graph, *network)
    model.eval()
    return {"accuracy": float((model(test_x).argmax(axis=1) == test_y).mean())}


initial = train(et.Network(params, statistics), et.counters(params), None, steps=300)
levels, scope = et.parse_levels("95,90,80"), et.Scope("global")
result = et.multi_level(initial, levels, sparsify, densify, scope=scope, evaluate=evaluate)

folder = Path(tempfile.mkdtemp())
packed, template = folder / "digits.safetensors", folder / "digits.onnx"
et.write_file(packed, result)  # and checks that the file gives back every level, bit by bit
template_from_flax(nnx.merge(graph, *result.network), test_x[:1], packed, template)
with elsa_format.open(packed) as file:
    print(", ".join(file.nested))
    for number, level in enumerate(file.levels, 1):
        target = folder / f"level{number}.onnx"
        export(packed, template, target, level=number)
        (logits,) = onnxruntime.InferenceSession(target).run(None, {"x": test_x})
        accuracy = (logits.argmax(axis=1) == test_y).mean()
        print(f"level {number}: accuracy {level.metrics['accuracy']:.1%}, in ONNX {accuracy:.1%}")
