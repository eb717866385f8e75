"""What a network learns to do, name images or continue text: its inputs and its metrics."""

import math
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from elsa_train._recipe import ACCURACY, LOSS, Measure, Recipe, of_language
from elsa_train.data.augment import augmentation, normalize
from elsa_train.data.protocol import Data


class Task(Protocol):
    """What the training loop asks about its data; an example has one label, or several."""

    measure: Measure
    unit: str
    """What the labels of an example are counted in."""
    labels: int
    """How many labels an example has."""

    def example(self) -> jax.Array:
        """Return one input of the network, for its shape and type."""
        ...

    def inputs(self, examples: jax.Array) -> jax.Array:
        """Turn examples into inputs of the network."""
        ...

    def training_inputs(self, key: jax.Array, examples: jax.Array) -> jax.Array:
        """Turn examples into inputs to learn from, which may be changed at random."""
        ...

    def held_out(self, examples: int, part: float) -> NDArray[np.int64]:
        """Return which of the training examples to validate on, the same for every seed."""
        ...

    def metrics(self, right: float, loss: float) -> dict[str, float]:
        """Name what was measured: the part of the labels that were right, and the mean loss."""
        ...


class Images:
    """One label an image."""

    measure, unit, labels = ACCURACY, "images", 1

    def __init__(self, recipe: Recipe, data: Data) -> None:
        """Take the images' own mean and deviation."""
        self._data, self._augment = data, augmentation(recipe.augment)

    def example(self) -> jax.Array:
        """Return an image."""
        return jnp.zeros((1, *self._data.shape()))

    def inputs(self, examples: jax.Array) -> jax.Array:
        """Normalize images."""
        return normalize(examples, self._data.mean, self._data.std)

    def training_inputs(self, key: jax.Array, examples: jax.Array) -> jax.Array:
        """Normalize and augment images."""
        return self._augment(key, examples, self.inputs)

    def held_out(self, examples: int, part: float) -> NDArray[np.int64]:
        """Return some at random: data sets may be sorted."""
        return np.sort(np.random.default_rng(0).permutation(examples)[: round(part * examples)])

    def metrics(self, right: float, loss: float) -> dict[str, float]:
        """Return accuracy and loss."""
        return {"accuracy": right, "loss": loss}


class Text:
    """Windows of text; the label of each byte is the one that follows it."""

    measure, unit = LOSS, "bytes"

    def __init__(self, data: Data) -> None:
        """Take the length of the windows."""
        self._shape = data.shape()
        self.labels = math.prod(self._shape)

    def example(self) -> jax.Array:
        """Return a window."""
        return jnp.zeros((1, *self._shape), jnp.int32)

    def inputs(self, examples: jax.Array) -> jax.Array:
        """Number the bytes."""
        return examples.astype(jnp.int32)

    def training_inputs(self, key: jax.Array, examples: jax.Array) -> jax.Array:
        """Number the bytes; nothing about them is random."""
        del key
        return self.inputs(examples)

    def held_out(self, examples: int, part: float) -> NDArray[np.int64]:
        """Return the last ones: windows next to those trained on would be known half."""
        return np.arange(examples - round(part * examples), examples)

    def metrics(self, right: float, loss: float) -> dict[str, float]:
        """Return loss, bits per byte and perplexity."""
        del right
        return of_language(loss)


def task_of(recipe: Recipe, data: Data) -> Task:
    """Return what a recipe's network learns to do."""
    return Text(data) if recipe.dataset == "text" else Images(recipe, data)
