"""Which examples a step sees, and their way onto the devices."""

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property, partial
from typing import Literal

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from elsa_train._errors import BadRecipe
from elsa_train._recipe import Recipe
from elsa_train._task import Task
from elsa_train.data.prefetch import Prefetch
from elsa_train.data.protocol import Data, Split, take_batch

Part = Literal["train", "validation", "test"]
Batch = tuple[jax.Array, jax.Array]


class Batches:
    """The examples of a run, a batch at a time, split over all devices of a mesh."""

    def __init__(self, recipe: Recipe, task: Task, data: Data, seed: int, mesh: Mesh) -> None:
        """Refuse batches that can't be filled, or split over the devices."""
        self._recipe, self._task, self.data, self._seed = recipe, task, data, seed
        self._split = NamedSharding(mesh, PartitionSpec("data"))  # type: ignore[no-untyped-call]
        if recipe.batch_size % mesh.size:
            raise BadRecipe(
                f"batch_size: {recipe.batch_size} is not divisible by {mesh.size} devices"
            )
        if self.size("train") < recipe.batch_size:
            raise BadRecipe(
                f"batch_size: {recipe.batch_size} exceeds the {self.size('train')} there are"
            )

    def size(self, part: Part) -> int:
        """Return how many examples are used."""
        return len(self.indices[part])

    @property
    def per_epoch(self) -> int:
        """Count whole batches; the rest of an epoch is dropped."""
        return self.size("train") // self._recipe.batch_size

    @cached_property
    def indices(self) -> dict[Part, NDArray[np.int64]]:
        """Return which examples each part has: what is held out is never trained on."""
        recipe, data = self._recipe, self.data
        test = min(recipe.test_images or data.size("test"), data.size("test"))
        total = min(recipe.train_images or data.size("train"), data.size("train"))
        held = self._task.held_out(total, recipe.validation)
        train = np.setdiff1d(np.arange(total), held)
        return {"train": train, "validation": held, "test": np.arange(test)}

    def phase(self, number: int, steps: int, start: int = 0) -> Prefetch:
        """Return the batches of a phase from a step on, made ahead of their use."""
        return self._ahead(self._in_order(number, steps, start))

    def _ahead(self, calls: Iterable[Callable[[], Batch]]) -> Prefetch:
        return Prefetch(calls, 2 if getattr(self.data, "concurrent", False) else 1)

    def _in_order(self, number: int, steps: int, start: int) -> Iterator[Callable[[], Batch]]:
        """Yield what makes the batches of a phase: a function of seed, phase and step alone."""
        size, per_epoch = self._recipe.batch_size, self.per_epoch
        order, known, seed = np.empty(0, np.int64), -1, 0
        for step in range(start, steps):
            epoch, place = divmod(step, per_epoch)
            if epoch != known:
                rng = np.random.default_rng([self._seed, number, epoch])
                order, known = rng.permutation(self.indices["train"]), epoch
                seed = int(rng.integers(2**31))
            yield partial(self.take, "train", order[place * size : (place + 1) * size], seed)

    def all_of(self, part: Part) -> Prefetch:
        """Return every example of a part once, ahead; the last batch is padded with label -1."""
        size, indices = self._recipe.batch_size, self.indices[part]
        split: Split = "test" if part == "test" else "train"
        return self._ahead(
            partial(self.take, split, indices[first : first + size], 0)
            for first in range(0, len(indices), size)
        )

    def take(self, split: Split, indices: NDArray[np.int64], seed: int) -> Batch:
        """Load this process's share of a batch, padded with label -1, onto its devices."""
        share = self._recipe.batch_size // jax.process_count()
        start = share * jax.process_index()
        mine = indices[start : start + share]
        # A share without images still needs their shape and type.
        images, labels = take_batch(self.data, split, mine if len(mine) else indices[:1], seed)
        images, labels = images[: len(mine)], labels[: len(mine)]
        if missing := share - len(mine):
            images = np.concatenate([images, np.zeros((missing, *images.shape[1:]), images.dtype)])
            padding = np.full((missing, *labels.shape[1:]), -1, labels.dtype)
            labels = np.concatenate([labels, padding])
        place = partial(jax.make_array_from_process_local_data, self._split)
        return place(images), place(labels)
