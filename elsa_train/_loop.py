"""The training loop of a phase: masked steps, evaluation, statistics, on all devices."""

import re
from collections.abc import Callable
from functools import cached_property, partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from elsa_train import _method
from elsa_train._batches import Batches, Part
from elsa_train._errors import BadRecipe, NonFiniteLoss
from elsa_train._joint import Joint, divergence, masked
from elsa_train._multilevel import Network
from elsa_train._plan import JOINT, Plan
from elsa_train._recipe import Recipe
from elsa_train._sharded import wide
from elsa_train._sparsify import apply_mask, keep_all
from elsa_train._task import task_of
from elsa_train._tree import flatten, names, unflatten
from elsa_train.data.protocol import Data
from elsa_train.models import build, total_statistics

PyTree = Any
STATISTICS, MOST_BATCHES = 5000, 50
CHECK_EVERY, QUEUED = 20, 2
MEASURED = 3
"""Batches that evaluation has under way on the devices."""
REVIVED = 2**32 - 1
"""Folded into a phase's key where no step is: the weights drawn anew."""


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
    """The mask of a sparsify phase; in joint training the counters."""

    @property
    def network(self) -> Network:
        """Return the network as it is."""
        return Network(self.carry.params, self.carry.state)


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
    losses: dict[str, float]
    """In joint training, by level."""


Watch = Callable[[Report], None]
OnStep = Callable[[Plan, Phase], None]


class Window:
    """Steps whose loss is not yet told: the newest are not waited for, to keep work queued."""

    def __init__(self, plan: Plan, labels: int, unit: str, watch: Watch) -> None:
        self._plan, self._labels, self._unit, self._watch = plan, labels, unit, watch
        self._pending: list[tuple[int | None, jax.Array, jax.Array]] = []

    def add(
        self, step: int, level: int | None, loss: jax.Array, right: jax.Array, sparsity: jax.Array
    ) -> None:
        """Take a step's measures, and report those that are ready."""
        self._pending.append((level, loss, right))
        last = step + 1 == self._plan.steps
        if len(self._pending) < CHECK_EVERY + QUEUED and not last:
            return
        cut = len(self._pending) if last else -QUEUED
        ready, self._pending = self._pending[:cut], self._pending[cut:]
        losses = [float(loss) for _, loss, _ in ready]
        if not np.all(np.isfinite(losses)):
            raise NonFiniteLoss(f"{self._plan.name}: the loss is {losses[-1]} at step {step + 1}")
        labels = len(ready) * self._labels
        by_level: dict[str, list[float]] = {}
        for (level, _, _), found in zip(ready, losses, strict=True):
            if level is not None:
                by_level.setdefault(self._plan.level_name(level), []).append(found)
        self._watch(
            Report(
                phase=self._plan.name,
                step=step + 1,
                steps=self._plan.steps,
                loss=float(np.mean(losses)),
                accuracy=sum(int(right) for _, _, right in ready) / labels,
                sparsity=float(sparsity),
                advanced=len(ready),
                labels=labels,
                unit=self._unit,
                losses={name: float(np.mean(found)) for name, found in by_level.items()},
            )
        )


def make_optimizer(recipe: Recipe) -> optax.GradientTransformation:
    """Build the optimizer with rate -1; the step scales by the rate, so one program serves all."""
    decay = optax.add_decayed_weights(recipe.weight_decay)
    if recipe.decay:
        decay = optax.masked(decay, partial(_matching, recipe.decay))
    if recipe.optimizer == "sgd":
        core = [
            decay,
            optax.trace(recipe.momentum, nesterov=recipe.nesterov),
        ]
    elif recipe.optimizer == "adam":
        core = [decay, optax.scale_by_adam()]
    else:
        core = [optax.scale_by_adam(), decay]
    return optax.chain(*core, optax.scale(-1.0))


def _matching(pattern: str, params: PyTree) -> PyTree:
    """Return for each tensor whether a regular expression finds something in its name."""
    return jax.tree.map(lambda name: bool(re.search(pattern, name)), names(params))


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
        self.teacher: Network | None = None
        """In joint training, whose answers are learned instead of labels."""
        self.mesh = Mesh(np.array(jax.devices()), ("data",))
        self.shared = NamedSharding(self.mesh, PartitionSpec())  # type: ignore[no-untyped-call]
        self.batches = Batches(recipe, self.task, data, seed, self.mesh)

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

    @cached_property
    def draw(self) -> Callable[[jax.Array], Network]:
        """Compile what draws initial weights."""

        def draw(key: jax.Array) -> Network:
            variables = self.model.init(key, self.task.example(), train=False)
            return Network(variables["params"], variables.get("batch_stats", {}))

        return jax.jit(draw, out_shardings=self.shared)

    def init(self) -> Network:
        """Draw the initial weights."""
        return self.draw(jax.random.key(self.seed))

    def loss(
        self,
        params: PyTree,
        state: PyTree,
        images: jax.Array,
        labels: jax.Array,
        key: jax.Array,
        teacher: Network | None = None,
    ) -> tuple[jax.Array, tuple[PyTree, jax.Array]]:
        """Return the smoothed cross-entropy, the new statistics and how many are right.

        With a teacher, the divergence from its answers takes the place of the former.
        """
        augment, dropout = jax.random.split(key)
        inputs = self.task.training_inputs(augment, images)
        logits, changed = self.model.apply(
            {"params": params, "batch_stats": state},
            inputs,
            train=True,
            mutable=["batch_stats"],
            rngs={"dropout": dropout},
        )
        if teacher is None:
            wanted = optax.smooth_labels(
                jax.nn.one_hot(labels, logits.shape[-1]), self.recipe.label_smoothing
            )
            loss = jnp.mean(optax.softmax_cross_entropy(logits, wanted))
        else:
            original = {"params": teacher.params, "batch_stats": teacher.state}
            answers: Any = self.model.apply(original, inputs, train=False)
            loss = divergence(logits, answers)
        right = jnp.sum(jnp.argmax(logits, -1) == labels)
        return loss, (changed.get("batch_stats", state), right)

    @cached_property
    def step(self) -> Callable[..., tuple[Carry, tuple[jax.Array, jax.Array]]]:
        """Compile one step: theta <- kept * (theta + M * update(kept * gradient))."""

        def step(
            carry: Carry, n: PyTree, kept: PyTree, batch: Any, key: jax.Array, rate: jax.Array
        ) -> tuple[Carry, tuple[jax.Array, jax.Array]]:
            (loss, (state, right)), grads = jax.value_and_grad(self.loss, has_aux=True)(
                carry.params, carry.state, *batch, key
            )
            # Masked: a weight let in again would leap by all the momentum that it had gathered.
            grads = apply_mask(grads, kept)
            updates, optimizer = self.optimizer.update(grads, carry.optimizer, carry.params)
            updates = jax.tree.map(lambda u: rate * u, updates)
            params = apply_mask(_method.apply_updates(carry.params, updates, n), kept)
            return Carry(params, state, optimizer), (loss, right)

        return jax.jit(step, donate_argnums=0, out_shardings=self.shared)

    @cached_property
    def joint_step(self) -> Callable[..., tuple[Carry, tuple[jax.Array, jax.Array]]]:
        """Compile one step of joint training: the loss of level t moves all weights."""

        def step(
            carry: Carry,
            t: jax.Array,
            n: PyTree,
            batch: Any,
            key: jax.Array,
            rate: jax.Array,
            teacher: Network | None,
        ) -> tuple[Carry, tuple[jax.Array, jax.Array]]:
            def loss(params: PyTree, *rest: Any) -> Any:
                return self.loss(masked(params, n, t), *rest)

            (value, (state, right)), grads = jax.value_and_grad(loss, has_aux=True)(
                carry.params, carry.state, *batch, key, teacher
            )
            updates, optimizer = self.optimizer.update(grads, carry.optimizer, carry.params)
            updates = jax.tree.map(lambda u: rate * u, updates)
            params = optax.apply_updates(carry.params, updates)
            return Carry(params, state, optimizer), (value, right)

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

    def evaluate(self, network: Network, part: Part | None = None) -> dict[str, float]:
        """Measure the network on the test images, or text, or on what is held out of training."""
        if part is None:
            part = "test" if self.recipe.judge == "test" else "validation"
        sums = []
        with self.batches.all_of(part) as batches:
            for batch in batches:
                sums.append(self._evaluate(network, *batch))
                # Batches that wait for a slow device would fill its memory.
                sums[-MEASURED:][0][0].block_until_ready()
        right, loss = sum(int(r) for r, _ in sums), sum(float(s) for _, s in sums)
        labels = self.batches.size(part) * self.task.labels
        return self.task.metrics(right / labels, loss / labels)

    def check_statistics(self) -> None:
        """Refuse a network whose statistics could not be computed anew."""
        if jax.tree.leaves(self.like.state) and not hasattr(self.model, "momentum"):
            raise BadRecipe(
                f"model {self.recipe.model!r}: has statistics but no field `momentum`, by which "
                "joint training computes those of each level"
            )

    def statistics(self, params: PyTree) -> PyTree:
        """Return the batch-norm statistics of these weights, over training images as trained on."""
        if not jax.tree.leaves(self.like.state):
            return self.like.state
        key = jax.random.fold_in(jax.random.key(self.seed), STATISTICS)
        steps = min(self.batches.per_epoch, MOST_BATCHES)
        with self.batches.phase(STATISTICS, steps) as batches:
            seen = [
                jax.tree.map(np.asarray, self._seen(params, images, jax.random.fold_in(key, step)))
                for step, (images, _) in enumerate(batches)
            ]
        found = total_statistics([flatten(state) for state in seen])
        return self.replicate(unflatten(self.like.state, found))

    @cached_property
    def _seen(self) -> Callable[..., PyTree]:
        # Momentum 0: a forward pass in training mode leaves exactly the batch's own statistics.
        model = self.model.clone(momentum=0.0)

        def seen(params: PyTree, images: jax.Array, key: jax.Array) -> PyTree:
            augment, dropout = jax.random.split(key)
            inputs = self.task.training_inputs(augment, images)
            state = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), self.like.state)
            return model.apply(
                {"params": params, "batch_stats": state},
                inputs,
                train=True,
                mutable=["batch_stats"],
                rngs={"dropout": dropout},
            )[1]["batch_stats"]

        return jax.jit(seen, out_shardings=self.shared)

    def start(self, network: Network) -> Phase:
        """Begin a phase with a fresh optimizer."""
        # The step donates its input, and the network is the caller's.
        params, state = jax.tree.map(jnp.copy, (network.params, network.state))
        optimizer = jax.jit(self.optimizer.init, out_shardings=self.shared)(params)
        return Phase(0, Carry(params, state, optimizer), self.replicate(keep_all(params)))

    def start_jointly(self, plan: Plan, network: Network) -> Phase:
        """Begin joint training: every level has every weight."""
        assert isinstance(plan.rule, Joint)
        return self.start(network)._replace(kept=self.replicate(plan.rule.start(network.params)))

    def replicate(self, tree: PyTree) -> PyTree:
        """Put a tree on every device."""
        return jax.jit(lambda x: x, out_shardings=self.shared)(tree)

    def run(self, plan: Plan, phase: Phase, n: PyTree, watch: Watch, on_step: OnStep) -> Phase:
        """Train through a phase; frozen weights keep their bits, masked ones are zero."""
        key = jax.random.fold_in(jax.random.key(self.seed), plan.number)
        batches = self.batches.phase(plan.number, plan.steps, phase.step)
        carry, kept = phase.carry, phase.kept
        rule, revives_at = plan.rule, plan.revives_at
        window = Window(plan, self.recipe.batch_size * self.task.labels, self.task.unit, watch)
        sparsity = _sparsity(kept)
        try:
            for step, batch in enumerate(batches, phase.step):
                here = jax.random.fold_in(key, step)
                if step == revives_at:
                    fresh = self.draw(jax.random.fold_in(key, REVIVED)).params
                    carry = carry._replace(params=_revive(carry.params, fresh, n))
                if rule and rule.updates_at(step):
                    if isinstance(rule, Joint):
                        kept = rule.rank(carry.params, step)
                    else:
                        grads = None
                        if rule.needs_gradients:
                            grads = self.gradients(carry.params, carry.state, batch, here)
                        kept = rule.mask(carry.params, grads, n, step)
                        carry = carry._replace(params=_apply_mask(carry.params, kept))
                    sparsity = _sparsity(kept)
                rate = jnp.float32(plan.rate(step))
                level = None
                if isinstance(rule, Joint):
                    level = rule.draw(step, (self.seed, plan.number))
                    t = jnp.uint8(level)
                    teacher = self.teacher if plan.number == JOINT else None
                    carry, measured = self.joint_step(carry, t, kept, batch, here, rate, teacher)
                else:
                    carry, measured = self.step(carry, n, kept, batch, here, rate)
                window.add(step, level, *measured, sparsity)
                on_step(plan, Phase(step + 1, carry, kept))
        finally:
            batches.close()
        if not _method.all_finite((carry.params, carry.state)):
            raise NonFiniteLoss(f"{plan.name}: weights or statistics are not finite at its end")
        return Phase(plan.steps, carry, kept)


_apply_mask = jax.jit(apply_mask)
_revive = jax.jit(_method.revive)


@jax.jit
def _sparsity(kept: PyTree) -> jax.Array:
    leaves = jax.tree.leaves(kept)
    total = sum(leaf.size for leaf in leaves)
    # Of masks, and of counters: the sparsest level has what is 1.
    zeros = reduce(wide.add, [wide.count(leaf != 1) for leaf in leaves])
    return jnp.asarray((zeros.high * jnp.float32(wide.WORD) + zeros.low) / float(total))
