"""Batches of samples: checked, counted, and which of their places are padding."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from elsa_train._errors import BadData

PyTree = Any
Array = NDArray[Any]


class Samples:
    """The batches that calibration uses, as arrays, at most `limit` samples in all.

    `padding` says of a batch where it is padded: booleans along the first axes.
    """

    def __init__(
        self,
        batches: Iterable[PyTree],
        *,
        limit: int | None = None,
        padding: Callable[[PyTree], Any] | None = None,
    ) -> None:
        self.batches: list[PyTree] = []
        self.counts: list[int] = []
        for number, batch in enumerate(_several(batches)):
            left = None if limit is None else limit - sum(self.counts)
            if left == 0:
                break
            arrays = jax.tree.map(np.asarray, batch)
            count = _count(number, arrays)
            if left is not None and count > left:
                arrays, count = jax.tree.map(lambda array, n=left: array[:n], arrays), left
            self.batches.append(arrays)
            self.counts.append(count)
        if not self.batches:
            raise BadData("no batches: calibration needs samples")
        self._real = [
            None if padding is None else ~_padded(number, padding(batch), self.counts[number])
            for number, batch in enumerate(self.batches)
        ]

    def kind(self, batch: int) -> Any:
        """What batches that are run alike have in common."""
        leaves, tree = jax.tree.flatten(self.batches[batch])
        return tree, *((leaf.shape, leaf.dtype) for leaf in leaves)

    def real(self, batch: int, shape: Sequence[int]) -> Array | None:
        """Which elements along an array's first axis, or axes, are no padding, if that is known."""
        real = self._real[batch]
        if real is None or tuple(shape[: real.ndim]) == real.shape:
            return real
        return real.reshape(-1) if shape and shape[0] == real.size else None

    def places(self, batch: int, shape: Sequence[int], most: int) -> Array:
        """Some places along all axes, none of padding: the same ones every time.

        At most `most`, if every batch takes its part.
        """
        real, found = self.real(batch, shape), np.arange(prod(shape))
        if real is not None:
            found = found.reshape(*real.shape, -1)[real].reshape(-1)
        most = max(1, most * self.counts[batch] // sum(self.counts))
        if len(found) <= most:
            return found
        return np.sort(np.random.default_rng(batch).choice(found, most, replace=False))


def _several(batches: Iterable[PyTree]) -> Iterable[PyTree]:
    if isinstance(batches, Mapping):
        raise BadData("batches: found one batch, expected several; cut it along the first axis")
    return batches


def _count(number: int, batch: PyTree) -> int:
    """How many samples a batch has; what is not made of samples is refused."""
    leaves = jax.tree.leaves(batch)
    counts = {leaf.shape[0] if leaf.ndim else 0 for leaf in leaves}
    if len(counts) != 1 or 0 in counts:
        found = ", ".join(str(leaf.shape) for leaf in leaves) or "no array"
        raise BadData(f"batch {number}: found {found}; expected samples along the first axis")
    (count,) = counts
    for leaf in leaves:
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            wrong = np.isnan(leaf).reshape(count, -1).any(1)
            if wrong.any():
                raise BadData(f"batch {number}: sample {wrong.argmax()} holds NaN")
    return int(count)


def _padded(number: int, padding: Any, count: int) -> NDArray[np.bool_]:
    found = np.asarray(padding)
    if found.dtype != bool or found.ndim == 0 or len(found) != count:
        raise BadData(
            f"padding(batch {number}): found {found.dtype} {found.shape}; expected booleans, "
            f"({count}, …)"
        )
    return found
