"""Nested networks from your own flax model, with your own training loop.

pip install '.[train]'
python examples/own_flax_model.py
"""

import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import linen as nn
from sklearn.datasets import load_digits

import elsa_format
import elsa_train as et

images, labels = load_digits(return_X_y=True)
order = np.random.default_rng(0).permutation(len(labels))
images, labels = (images[order] / 16).astype(np.float32), labels[order]
train_x, train_y, test_x, test_y = images[:1400], labels[:1400], images[1400:], labels[1400:]


class Net(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.relu(nn.Dense(128)(x))
        return nn.Dense(10)(nn.relu(nn.Dense(64)(x)))


model = Net()
optimizer = optax.adamw(3e-3)


@jax.jit
def step(params: Any, state: Any, counters: Any, kept: Any, x: Any, y: Any) -> Any:
    def loss(params: Any) -> Any:
        logits = model.apply({"params": params}, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    grads = jax.grad(loss)(params)
    updates, state = optimizer.update(grads, state, params)
    # Frozen weights stay as they are, bit by bit; pruned ones stay zero.
    return et.apply_mask(et.apply_updates(params, updates, counters), kept), state


def train(params: Any, counters: Any, pruner: et.Pruner | None = None, steps: int = 300) -> Any:
    rng = np.random.default_rng(0)
    state, kept = optimizer.init(params), et.keep_all(params)
    for number in range(steps):
        if pruner is not None and pruner.updates_at(number):
            kept = pruner.mask(params, None, counters, number)
        batch = rng.integers(0, len(train_y), 128)
        params, state = step(params, state, counters, kept, train_x[batch], train_y[batch])
    return params


def sparsify(network: et.Network, counters: Any, level: et.Level) -> et.Network:
    pruner = et.Pruner(scope, level, et.Schedule(start=0, end=200, every=20))
    return et.Network(train(network.params, counters, pruner))


def densify(network: et.Network, counters: Any, level: et.Level) -> et.Network:
    return et.Network(train(network.params, counters, steps=100))


def evaluate(network: et.Network) -> dict[str, float]:
    logits = model.apply({"params": network.params}, test_x)
    return {"accuracy": float((logits.argmax(axis=1) == test_y).mean())}


levels, scope = et.parse_levels("95,90,80"), et.Scope("global")
params = model.init(jax.random.key(0), train_x[:1])["params"]
initial = train(params, et.counters(params))
result = et.multi_level(
    et.Network(initial), levels, sparsify, densify, scope=scope, evaluate=evaluate
)

path = Path(tempfile.mkdtemp()) / "digits.safetensors"
et.write_file(path, result)  # and checks that the file gives back every level, bit by bit
with elsa_format.open(path) as file:
    for number, level in enumerate(file.levels, 1):
        accuracy, sparsity = level.metrics["accuracy"], file.sparsity(number)
        print(f"level {number}: {sparsity:.1%} zeros, accuracy {accuracy:.1%}")
    print(f"dense: accuracy {file.profile.dense_metrics['accuracy']:.1%}")
