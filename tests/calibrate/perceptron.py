"""A network of fully connected layers in numpy: the smallest thing that can be calibrated."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from elsa_converters.calibrate import Layer, Model, Walk, Weights
from numpy.typing import NDArray

Array = NDArray[Any]


def perceptron(
    sizes: list[int], samples: Array, *, batch: int = 16, seed: int = 0, **layer: Any
) -> "Perceptron":
    """Random layers, in which nearby inputs are alike so that weights can stand in for others."""
    rng = np.random.default_rng(seed)
    weights = {}
    for at, (columns, rows) in enumerate(pairwise(sizes)):
        weight = rng.standard_normal((1, rows, columns)) / np.sqrt(columns)
        weights[f"w{at}"] = (weight.astype(np.float32), rng.standard_normal(rows))
    return Perceptron(weights, samples, batch, **layer)


class Perceptron(Model):
    def __init__(
        self, weights: Mapping[str, tuple[Array, Array]], samples: Array, batch: int, **layer: Any
    ) -> None:
        dtype = layer.pop("dtype", np.dtype(np.float32))
        self.classes = layer.pop("classes", None)
        self.weights = weights
        self.parts = [samples[at : at + batch] for at in range(0, len(samples), batch)]
        self.batches = [len(part) for part in self.parts]
        self.stages = [
            [Layer(name, dtype, *weight.shape, **layer)] for name, (weight, _) in weights.items()
        ]
        if self.classes:
            self.head = list(weights)[-1]

    def original(self, layer: Layer) -> Weights:
        weight, bias = self.weights[layer.name]
        return Weights(weight.astype(layer.dtype), bias.astype(np.float32))

    def walk(self, batches: Sequence[int]) -> "Steps":
        return Steps(self, [self.parts[at].astype(np.float32) for at in batches])

    def weight_as_stored(self, layer: Layer, weight: Array) -> Array:
        return weight[0]

    def varying(self, layer: Layer, weights: Weights) -> Mapping[str, Array]:
        assert weights.bias is not None
        found = {f"{layer.name}.bias": weights.bias}
        if layer.scale:
            ones = np.ones(layer.rows, np.float32)
            found[f"{layer.name}.scale"] = ones if weights.scale is None else weights.scale
        return found


class Steps(Walk):
    opened = closed = 0

    def __init__(self, model: Perceptron, live: list[Array]) -> None:
        self.model, self.live, self.at = model, live, 0
        Steps.opened += 1

    def inputs(self, layer: Layer) -> Iterator[Array]:
        for x in self.live:
            yield x[:, None]

    def advance(self, weights: Mapping[str, Weights]) -> None:
        self.live = [self._layer(self.at, x, weights) for x in self.live]
        self.at += 1

    def outputs(self, weights: Mapping[str, Weights] = {}) -> Iterator[list[Array]]:
        for x in self.live:
            for at in range(self.at, len(self.model.stages)):
                x = self._layer(at, x, weights)
            yield [x]

    def close(self) -> None:
        Steps.closed += 1

    def _layer(self, at: int, x: Array, weights: Mapping[str, Weights]) -> Array:
        (layer,) = self.model.stages[at]
        mine = weights.get(layer.name) or self.model.original(layer)
        y = x @ mine.weight[0].astype(np.float32).T
        if mine.scale is not None:
            y = y * mine.scale
        assert mine.bias is not None
        y = y + mine.bias
        return y if at == len(self.model.stages) - 1 else np.maximum(y, 0)
