"""The training loop of a phase: batches, masked steps, evaluation, data parallel over devices."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from elsa_train import _method
from elsa_train._errors import BadRecipe, NonFiniteLoss
from elsa_train._multilevel import Network
from elsa_train._recipe import Recipe
from elsa_train._sparsify import apply_mask, keep_all
from elsa_train._task import task_of
from elsa_train.data.prefetch import Prefetch
from elsa_train.data.protocol import Data, Split, take_batch
from elsa_train.models import build

PyTree = Any
CHECK_EVERY, QUEUED = 20, 2


class Carry(NamedTuple):
    """What a step changes."""

    params: PyTree
    state: PyTree
    optimizer: PyTree


class Phase(NamedTuple):
    """A phase in progress: all that a resumed run needs of it."""

    step: int
    carry: Carry
    kept: PyTree


class MaskRule(Protocol):
    """What decides the mask of a sparsify phase."""

    @property
    def needs_gradients(self) -> bool:
        """Tell whether `mask` looks at the gradients."""
        ...

    def updates_at(self, step: int) -> bool:
        """Tell whether the mask changes before this step."""
        ...

    def mask(self, params: PyTree, grads: PyTree, n: PyTree, step: int) -> PyTree:
        """Return what to keep from this step on."""
        ...


@dataclass(frozen=True)
class Plan:
    """One phase: its number in the run (which decides its random numbers), length and rate."""

    number: int
    name: str
    steps: int
    peak: float
    warmup: int
    rule: MaskRule | None = None

    def rate(self, step: int) -> float:
        """Return the learning rate: linear warmup, then half a cosine."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.peak * 0.5 * (1 + float(np.cos(np.pi * done)))


class Report(NamedTuple):
    """What a phase tells while it runs."""

    phase: str
    step: int
    steps: int
    loss: float
    accuracy: float
    sparsity: float
    advanced: int
    labels: int
    unit: str


Watch = Callable[[Report], None]
OnStep = Callable[[Plan, Phase], None]


def make_optimizer(recipe: Recipe) -> optax.GradientTransformation:
    """Build the optimizer with rate -1; the step scales by the rate, so one program serves all."""
    if recipe.optimizer == "sgd":
        core = [
            optax.add_decayed_weights(recipe.weight_decay),
            optax.trace(recipe.momentum, nesterov=recipe.nesterov),
        ]
    elif recipe.optimizer == "adam":
        core = [optax.add_decayed_weights(recipe.weight_decay), optax.scale_by_adam()]
    else:
        core = [optax.scale_by_adam(), optax.add_decayed_weights(recipe.weight_decay)]
    return optax.chain(*core, optax.scale(-1.0))


class Trainer:
    """A model, its data and the compiled functions over all devices."""

    def __init__(self, recipe: Recipe, data: Data, seed: int) -> None:
        """Place the mesh; nothing is compiled before it is used."""
        self.recipe, self.data, self.seed = recipe, data, seed
        self.task = task_of(recipe, data)
        self.model: nn.Module = build(
            recipe.model,
            num_classes=data.num_classes,
            width=recipe.width,
            dropout=recipe.dropout,
            dtype=jnp.dtype(recipe.dtype),
        )
        self.optimizer = make_optimizer(recipe)
        self.mesh = Mesh(np.array(jax.devices()), ("data",))
        self.shared = NamedSharding(self.mesh, PartitionSpec())  # type: ignore[no-untyped-call]
        self.split = NamedSharding(self.mesh, PartitionSpec("data"))  # type: ignore[no-untyped-call]
        if recipe.batch_size % self.mesh.size:
            raise BadRecipe(
                f"batch_size: {recipe.batch_size} is not divisible by {self.mesh.size} devices"
            )
        if self.size("train") < recipe.batch_size:
            raise BadRecipe(f"batch_size: {recipe.batch_size} exceeds {self.size('train')} images")

    def size(self, split: Split) -> int:
        """Return how many images are used."""
        limit = self.recipe.train_images if split == "train" else self.recipe.test_images
        return min(limit or self.data.size(split), self.data.size(split))

    @property
    def steps_per_epoch(self) -> int:
        """Count whole batches; the rest of an epoch is dropped."""
        return self.size("train") // self.recipe.batch_size

    @cached_property
    def like(self) -> Network:
        """Return the shapes of the network; a model may be too deep for small images."""
        try:
            like: Network = jax.eval_shape(self.init)
            return like
        except Exception as error:
            first, *_ = str(error).splitlines() or [""]
            raise BadRecipe(
                f"model {self.recipe.model!r} can't take {self.task.unit} of "
                f"{self.data.shape()}: {first}"
            ) from None

    def init(self) -> Network:
        """Draw the initial weights."""

        def initialize(key: jax.Array) -> Network:
            variables = self.model.init(key, self.task.example(), train=False)
            return Network(variables["params"], variables.get("batch_stats", {}))

        network: Network = jax.jit(initialize, out_shardings=self.shared)(jax.random.key(self.seed))
        return network

    def loss(
        self, params: PyTree, state: PyTree, images: jax.Array, labels: jax.Array, key: jax.Array
    ) -> tuple[jax.Array, tuple[PyTree, jax.Array]]:
        """Return the smoothed cross-entropy, the new statistics and how many are right."""
        augment, dropout = jax.random.split(key)
        logits, changed = self.model.apply(
            {"params": params, "batch_stats": state},
            self.task.training_inputs(augment, images),
            train=True,
            mutable=["batch_stats"],
            rngs={"dropout": dropout},
        )
        wanted = optax.smooth_labels(
            jax.nn.one_hot(labels, logits.shape[-1]), self.recipe.label_smoothing
        )
        loss = jnp.mean(optax.softmax_cross_entropy(logits, wanted))
        right = jnp.sum(jnp.argmax(logits, -1) == labels)
        return loss, (changed.get("batch_stats", state), right)

    @cached_property
    def step(self) -> Callable[..., tuple[Carry, tuple[jax.Array, jax.Array]]]:
        """Compile one step: theta <- kept * (theta + M * update)."""

        def step(
            carry: Carry, n: PyTree, kept: PyTree, batch: Any, key: jax.Array, rate: jax.Array
        ) -> tuple[Carry, tuple[jax.Array, jax.Array]]:
            (loss, (state, right)), grads = jax.value_and_grad(self.loss, has_aux=True)(
                carry.params, carry.state, *batch, key
            )
            updates, optimizer = self.optimizer.update(grads, carry.optimizer, carry.params)
            updates = jax.tree.map(lambda u: rate * u, updates)
            params = apply_mask(_method.apply_updates(carry.params, updates, n), kept)
            return Carry(params, state, optimizer), (loss, right)

        return jax.jit(step, donate_argnums=0, out_shardings=self.shared)

    @cached_property
    def gradients(self) -> Callable[..., PyTree]:
        """Compile the gradient alone, for scores that look at it."""

        def gradients(params: PyTree, state: PyTree, batch: Any, key: jax.Array) -> PyTree:
            return jax.grad(self.loss, has_aux=True)(params, state, *batch, key)[0]

        return jax.jit(gradients, out_shardings=self.shared)

    @cached_property
    def _evaluate(self) -> Callable[..., tuple[jax.Array, jax.Array]]:
        def evaluate(network: Network, images: jax.Array, labels: jax.Array) -> Any:
            variables = {"params": network.params, "batch_stats": network.state}
            logits: Any = self.model.apply(variables, self.task.inputs(images), train=False)
            used = labels >= 0
            loss = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(labels, 0))
            right = used & (jnp.argmax(logits, -1) == labels)
            return jnp.sum(right), jnp.sum(jnp.where(used, loss, 0))

        return jax.jit(evaluate, out_shardings=self.shared)

    def evaluate(self, network: Network) -> dict[str, float]:
        """Measure the network on the test images, or text."""
        total, size = self.size("test"), self.recipe.batch_size
        sums = []
        for first in range(0, total, size):
            indices = np.arange(first, min(first + size, total))
            sums.append(self._evaluate(network, *self._batch("test", indices, 0, size)))
        right, loss = sum(int(r) for r, _ in sums), sum(float(s) for _, s in sums)
        labels = total * self.task.labels
        return self.task.metrics(right / labels, loss / labels)

    def _batch(self, split: Split, indices: np.ndarray, seed: int, size: int) -> Any:
        """Load this process's share of a batch, padded with label -1, onto its devices."""
        share = size // jax.process_count()
        start = share * jax.process_index()
        mine = indices[start : start + share]
        # A share without images still needs their shape and type.
        images, labels = take_batch(self.data, split, mine if len(mine) else indices[:1], seed)
        images, labels = images[: len(mine)], labels[: len(mine)]
        if missing := share - len(mine):
            images = np.concatenate([images, np.zeros((missing, *images.shape[1:]), images.dtype)])
            padding = np.full((missing, *labels.shape[1:]), -1, labels.dtype)
            labels = np.concatenate([labels, padding])
        place = partial(jax.make_array_from_process_local_data, self.split)
        return place(images), place(labels)

    def _batches(self, plan: Plan, start: int) -> Iterator[Any]:
        """Yield the batches of a phase from a step on; a function of seed, phase and step alone."""
        size, per_epoch = self.recipe.batch_size, self.steps_per_epoch
        order, known, seed = np.empty(0, np.int64), -1, 0
        for step in range(start, plan.steps):
            epoch, place = divmod(step, per_epoch)
            if epoch != known:
                rng = np.random.default_rng([self.seed, plan.number, epoch])
                order, known = rng.permutation(self.size("train")), epoch
                seed = int(rng.integers(2**31))
            yield self._batch("train", order[place * size : (place + 1) * size], seed, size)

    def start(self, network: Network) -> Phase:
        """Begin a phase with a fresh optimizer."""
        # The step donates its input, and the network is the caller's.
        params, state = jax.tree.map(jnp.copy, (network.params, network.state))
        optimizer = jax.jit(self.optimizer.init, out_shardings=self.shared)(params)
        return Phase(0, Carry(params, state, optimizer), self.replicate(keep_all(params)))

    def replicate(self, tree: PyTree) -> PyTree:
        """Put a tree on every device."""
        return jax.jit(lambda x: x, out_shardings=self.shared)(tree)

    def run(self, plan: Plan, phase: Phase, n: PyTree, watch: Watch, on_step: OnStep) -> Network:
        """Train through a phase; frozen weights keep their bits, masked ones are zero."""
        key = jax.random.fold_in(jax.random.key(self.seed), plan.number)
        batches = Prefetch(self._batches(plan, phase.step))
        carry, kept = phase.carry, phase.kept
        pending: list[tuple[jax.Array, jax.Array]] = []
        sparsity = _sparsity(kept)
        try:
            for step, batch in enumerate(batches, phase.step):
                here = jax.random.fold_in(key, step)
                if plan.rule and plan.rule.updates_at(step):
                    grads = None
                    if plan.rule.needs_gradients:
                        grads = self.gradients(carry.params, carry.state, batch, here)
                    kept = plan.rule.mask(carry.params, grads, n, step)
                    carry = carry._replace(params=_apply_mask(carry.params, kept))
                    sparsity = _sparsity(kept)
                rate = jnp.float32(plan.rate(step))
                carry, (loss, right) = self.step(carry, n, kept, batch, here, rate)
                pending.append((loss, right))
                last = step + 1 == plan.steps
                if len(pending) >= CHECK_EVERY + QUEUED or last:
                    # The newest steps are not waited for: the device always has work queued.
                    ready, pending = (
                        (pending, []) if last else (pending[:-QUEUED], pending[-QUEUED:])
                    )
                    losses = [float(loss) for loss, _ in ready]
                    if not np.all(np.isfinite(losses)):
                        raise NonFiniteLoss(
                            f"{plan.name}: the loss is {losses[-1]} at step {step + 1}"
                        )
                    advanced = len(ready)
                    labels = advanced * self.recipe.batch_size * self.task.labels
                    accuracy = sum(int(right) for _, right in ready) / labels
                    watch(
                        Report(
                            plan.name,
                            step + 1,
                            plan.steps,
                            float(np.mean(losses)),
                            accuracy,
                            float(sparsity),
                            advanced,
                            labels,
                            self.task.unit,
                        )
                    )
                on_step(plan, Phase(step + 1, carry, kept))
        finally:
            batches.close()
        if not _method.all_finite((carry.params, carry.state)):
            raise NonFiniteLoss(f"{plan.name}: weights or statistics are not finite at its end")
        return Network(carry.params, carry.state)


_apply_mask = jax.jit(apply_mask)


@jax.jit
def _sparsity(kept: PyTree) -> jax.Array:
    leaves = jax.tree.leaves(kept)
    total = sum(leaf.size for leaf in leaves)
    zeros = sum(jnp.sum(~leaf, dtype=jnp.uint32) for leaf in leaves)
    return jnp.asarray(zeros / total)
