"""What is kept of a layer's inputs: their means and covariances, and those with wanted outputs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from elsa_converters._errors import InvalidData
from elsa_converters.calibrate._model import Array, Layer, Walk, Weights
from elsa_converters.calibrate._work import Work


@dataclass(frozen=True)
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
        self._layer = layer
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
        if self._layer.bias:
            if not self._count:
                self._origin_x = x.mean(1, keepdims=True, dtype=np.float64).astype(np.float32)
                self._origin_y = y.mean(1, keepdims=True, dtype=np.float64).astype(np.float32)
            x, y = x - self._origin_x, y - self._origin_y
        self._count += x.shape[1]
        self._x += x.sum(1, dtype=np.float64)
        self._y += y.sum(1, dtype=np.float64)
        self._yy += np.square(y).sum(1, dtype=np.float64)
        for group, (inputs, outputs) in enumerate(zip(x, y, strict=True)):
            self._xx[group] += inputs.T @ inputs
            self._yx[group] += outputs.T @ inputs

    def moments(self) -> Moments:
        """What was collected, which leaves nothing here."""
        count = max(self._count, 1)
        xx, yx, yy = self._xx, self._yx, self._yy / count
        xx /= np.float32(count)
        yx /= np.float32(count)
        x, y = self._x / count, self._y / count
        if not all(np.isfinite(found).all() for found in (xx, yx, yy)):
            raise InvalidData(
                f"layer {self._layer.name!r}: its inputs or outputs are NaN or infinite with "
                "these samples; take samples that the network can process"
            )
        if self._layer.bias:  # about the means, which are not exactly the origins
            xx -= (x[:, :, None] * x[:, None]).astype(np.float32)
            yx -= (y[:, :, None] * x[:, None]).astype(np.float32)
            yy = np.maximum(yy - np.square(y), 0)
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
    centred = own if layer.bias else replace(own, bias=None)
    collectors = [Collector(layer) for _ in walks]
    others = [walk for walk in walks if walk is not original]
    for first, *rest in zip(*(_by_group(walk, layer) for walk in (original, *others)), strict=True):
        wanted = apply(first, centred, layer.groups)
        inputs_of = dict(zip(map(id, others), rest, strict=True)) | {id(original): first}
        tasks = [
            (found, inputs_of[id(walk)]) for found, walk in zip(collectors, walks, strict=True)
        ]
        work.map(lambda task, y=wanted: task[0].add(task[1], y), tasks)  # type: ignore[misc]
    return [collector.moments() for collector in collectors]


def mixed(moments: Moments, own: Weights, mix: float, work: Work) -> Moments:
    """Moments whose wanted outputs are mix · y + (1 - mix) · (W₀ x + b₀).

    A mix of 1 asks the layer to undo all that layers before it lost, 0 to do what it always did.
    """
    if mix == 1:
        return moments
    weight, keep = own.weight.astype(np.float32), np.float32(1 - mix)
    plain = work.products(weight, moments.xx)
    cross = (weight * moments.yx).sum(-1, dtype=np.float64)
    square = (weight * plain).sum(-1, dtype=np.float64)
    mean = np.einsum("grc,gc->gr", weight.astype(np.float64), moments.mean_x)
    if own.bias is not None:
        mean += own.bias.reshape(mean.shape)
    return replace(
        moments,
        mean_y=mix * moments.mean_y + (1 - mix) * mean,
        yx=np.float32(mix) * moments.yx + keep * plain,
        yy=mix * mix * moments.yy + 2 * mix * (1 - mix) * cross + (1 - mix) ** 2 * square,
    )


def _by_group(walk: Walk, layer: Layer) -> Iterator[Array]:
    for batch in walk.inputs(layer):
        yield np.ascontiguousarray(batch.transpose(1, 0, 2))
