"""What is kept of a layer's inputs: their means and covariances, and those with wanted outputs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from elsa_converters.calibrate._model import Array, Layer, Walk, Weights
from elsa_converters.calibrate._work import Work


@dataclass
class Moments:
    """Of the inputs x of a layer in one network, and of the outputs y that it should have there.

    Centred, if the layer's bias can take up the means; else about zero.
    """

    count: int
    mean_x: Array
    """(groups, columns), float64."""
    mean_y: Array
    """(groups, rows), float64."""
    xx: Array
    """cov(x, x): (groups, columns, columns), float32."""
    yx: Array
    """cov(y, x): (groups, rows, columns), float32."""
    yy: Array
    """var(y): (groups, rows), float64."""


class Collector:
    """Adds up the moments of one layer in one network, batch after batch."""

    def __init__(self, layer: Layer) -> None:
        groups, rows, columns = layer.shape
        self._centred = layer.bias
        self._count = 0
        # Near the mean, so that products in float32 lose nothing to it.
        self._origin_x = np.zeros((groups, 1, columns), np.float32)
        self._origin_y = np.zeros((groups, 1, rows), np.float32)
        self._x, self._y = np.zeros((groups, columns)), np.zeros((groups, rows))
        self._xx = np.zeros((groups, columns, columns), np.float32)
        self._yx = np.zeros((groups, rows, columns), np.float32)
        self._yy = np.zeros((groups, rows))

    def add(self, x: Array, y: Array) -> None:
        """Take in inputs (groups, places, columns) and outputs (groups, places, rows)."""
        if not x.shape[1]:
            return
        if self._centred:
            if not self._count:
                self._origin_x = x.mean(1, keepdims=True, dtype=np.float64).astype(np.float32)
                self._origin_y = y.mean(1, keepdims=True, dtype=np.float64).astype(np.float32)
            x, y = x - self._origin_x, y - self._origin_y
        self._count += x.shape[1]
        self._x += x.sum(1, dtype=np.float64)
        self._y += y.sum(1, dtype=np.float64)
        self._yy += np.square(y).sum(1, dtype=np.float64)
        for group, (one, other) in enumerate(zip(x, y, strict=True)):
            self._xx[group] += one.T @ one
            self._yx[group] += other.T @ one

    def moments(self) -> Moments:
        """What was collected."""
        count = max(self._count, 1)
        xx, yx, yy = self._xx / np.float32(count), self._yx / np.float32(count), self._yy / count
        x, y = self._x / count, self._y / count
        if self._centred:  # about the means, which are not exactly the origins
            xx -= (x[:, :, None] * x[:, None]).astype(np.float32)
            yx -= (y[:, :, None] * x[:, None]).astype(np.float32)
            yy = yy - np.square(y)
            x, y = x + self._origin_x[:, 0], y + self._origin_y[:, 0]
        else:
            x, y = np.zeros_like(x), np.zeros_like(y)
        return Moments(self._count, x, y, xx, yx, yy)


def apply(x: Array, weights: Weights, groups: int) -> Array:
    """The layer's outputs (groups, places, rows) for inputs (groups, places, columns)."""
    y = x @ weights.weight.astype(np.float32).transpose(0, 2, 1)
    if weights.scale is not None:
        y *= weights.scale.reshape(groups, 1, -1)
    if weights.bias is not None:
        y += weights.bias.reshape(groups, 1, -1)
    return np.asarray(y)


def collect(
    layer: Layer, own: Weights, original: Walk, walks: Sequence[Walk], work: Work
) -> list[Moments]:
    """The moments of a layer in every walk; wanted is what the original layer makes of its inputs.

    Walks may be the original one: then the original weights are the best.
    """
    collectors = [Collector(layer) for _ in walks]
    others = [walk for walk in walks if walk is not original]
    for first, *rest in zip(*(_by_group(walk, layer) for walk in (original, *others)), strict=True):
        wanted = apply(first, own if layer.bias else replace(own, bias=None), layer.groups)
        of = dict(zip(map(id, others), rest, strict=True)) | {id(original): first}
        tasks = [(c, of[id(walk)]) for c, walk in zip(collectors, walks, strict=True)]
        work.map(lambda task, y=wanted: task[0].add(task[1], y), tasks)  # type: ignore[misc]
    return [collector.moments() for collector in collectors]


def _by_group(walk: Walk, layer: Layer) -> Iterator[Array]:
    for batch in walk.inputs(layer):
        yield np.ascontiguousarray(batch.transpose(1, 0, 2))
