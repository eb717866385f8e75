"""Cost of a masked step over a plain optax step of the same model, and of mask updates.

    python benchmarks/train_step.py [--model speedyresnet] [--width 8] [--batch-size 64]
    python benchmarks/train_step.py --ranking [--model resnet50]

With `--ranking`, the counters of joint training are made for 3 and for 50 levels of a whole model:
all levels in one search, and beside it one after the other in slabs, as split tensors are ranked.

Both steps are compiled from the same loss and optimizer and run in turn within one process, so the
ratio is what masking costs. The target is at most 1.05.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import _private  # noqa: F401 - finds internals
import jax
import jax.numpy as jnp
import numpy as np
import optax
from internals import Carry, Trainer, _method, _selection, make_recipe

from elsa_train import Joint, Pruner, Schedule, Scope, parse_levels
from elsa_train.data import ArrayData
from elsa_train.models import build


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="speedyresnet")
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=3, help="steps per measurement")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--quick", action="store_true", help="three rounds")
    parser.add_argument("--ranking", action="store_true", help="measure joint training's ranking")
    options = parser.parse_args()
    if options.ranking:
        measure_ranking(options.model, options.quick)
        return
    if options.quick:
        options.rounds = 3

    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (options.batch_size, 32, 32, 3)).astype(np.uint8)
    labels = rng.integers(0, 10, options.batch_size).astype(np.int32)
    data = ArrayData((images, labels), (images, labels), 10, (128.0,) * 3, (64.0,) * 3)
    recipe = make_recipe(
        {
            "model": options.model,
            "width": options.width,
            "batch_size": options.batch_size,
            "augment": "crop-flip",
            "validation": 0,
        }
    )
    trainer = Trainer(recipe, data, seed=0)
    network = trainer.init()
    batch = trainer.batches.take("train", np.arange(options.batch_size), 0)
    key, rate = jax.random.key(0), jnp.float32(1e-3)

    def plain(carry: Carry, batch: Any, key: jax.Array, rate: jax.Array) -> Any:
        (loss, (state, right)), grads = jax.value_and_grad(trainer.loss, has_aux=True)(
            carry.params, carry.state, *batch, key
        )
        updates, optimizer = trainer.optimizer.update(grads, carry.optimizer, carry.params)
        updates = jax.tree.map(lambda u: rate * u, updates)
        return Carry(optax.apply_updates(carry.params, updates), state, optimizer), (loss, right)

    plain_step = jax.jit(plain, donate_argnums=0, out_shardings=trainer.shared)
    (level,) = parse_levels("90")
    pruner = Pruner(Scope(), level, Schedule(0, 0, 1))
    n = trainer.replicate(_method.counters(network.params))
    kept = pruner.mask(network.params, None, n, 0)
    # Half of what is kept is frozen: both masks have work to do.
    n = jax.tree.map(
        lambda k: (k & (jnp.arange(k.size).reshape(k.shape) % 2 == 0)).astype("uint8"), kept
    )
    n = trainer.replicate(n)

    def masked_step(carry: Carry, batch: Any, key: jax.Array, rate: jax.Array) -> Any:
        return trainer.step(carry, n, kept, batch, key, rate)

    carries = {"plain": trainer.start(network).carry, "masked": trainer.start(network).carry}
    times: dict[str, list[float]] = {"plain": [], "masked": []}
    steps: dict[str, Callable[..., Any]] = {"plain": plain_step, "masked": masked_step}
    for turn in range(options.rounds + 1):
        # Taking turns in both orders: drift of the machine hits both alike.
        for name in sorted(steps, reverse=bool(turn % 2)):
            started = time.perf_counter()
            for _ in range(options.steps):
                carries[name], (loss, _) = steps[name](carries[name], batch, key, rate)
            jax.block_until_ready((carries[name], loss))
            if turn:
                times[name].append((time.perf_counter() - started) / options.steps)
    jax.block_until_ready(pruner.mask(network.params, None, n, 0))
    started = time.perf_counter()
    kept = pruner.mask(network.params, None, n, 0)
    dispatched = time.perf_counter() - started
    jax.block_until_ready(kept)
    update = time.perf_counter() - started

    plain_time, masked_time = (min(times[name]) for name in ("plain", "masked"))
    ratio = masked_time / plain_time
    weights = sum(p.size for p in jax.tree.leaves(network.params))
    print(
        f"{options.model} width {options.width}, {weights} weights, batch {options.batch_size}:\n"
    )
    print("| what | ms | ratio to a plain step | target |")
    print("| --- | --- | --- | --- |")
    print(f"| plain optax step | {1000 * plain_time:.1f} | 1 | |")
    print(f"| masked step | {1000 * masked_time:.1f} | {ratio:.3f} | ≤ 1.05 |")
    print(
        f"| mask update, every 50 steps or so | {1000 * update:.1f} | {update / plain_time:.3f} | |"
    )
    print(f"| mask update, until the host goes on | {1000 * dispatched:.1f} | | |")


def measure_ranking(name: str, quick: bool) -> None:
    """Rank random weights of a model both ways, check that they agree, and print the table."""
    model, shape = build(name, num_classes=1000), (1, 64, 64, 3)
    like = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros(shape))["params"]
    numbers = iter(jax.random.split(jax.random.key(0), len(jax.tree.leaves(like))))
    params = jax.tree.map(lambda p: 0.05 * jax.random.normal(next(numbers), p.shape), like)
    weights = sum(p.size for p in jax.tree.leaves(params))
    print(f"{name}, {weights} weights:\n")
    print("| what | s | ratio |")
    print("| --- | --- | --- |")
    whole = _selection.WHOLE
    for levels in ("95,90,80",) if quick else ("95,90,80", "99..50"):
        joint = Joint(Scope(), parse_levels(levels), Schedule(0, 0, 1))
        times, found = {}, {}
        for way, limit in (("one after the other", 0), ("in one search", whole)):
            _selection.WHOLE = limit
            jax.block_until_ready(joint.rank(params, 0))
            started = time.perf_counter()
            found[way] = jax.block_until_ready(joint.rank(params, 0))
            times[way] = time.perf_counter() - started
        one, other = (jax.tree.leaves(n) for n in found.values())
        assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
        for way, seconds in times.items():
            ratio = seconds / times["one after the other"]
            print(f"| {len(joint.levels)} levels {way} | {seconds:.2f} | {ratio:.3f} |")


if __name__ == "__main__":
    main()
