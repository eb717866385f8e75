"""A network on its way through samples, from layer to layer."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from elsa_converters.calibrate import Kept, Layer, Walk, Weights
from jax.extend.core import Var
from numpy.typing import NDArray

from elsa_train._calibrate.program import Stretch
from elsa_train._errors import BadData

if TYPE_CHECKING:
    from elsa_train._calibrate.model import JaxModel

Array = NDArray[Any]


class Steps(Walk):
    """Holds the values that are still needed of each batch."""

    def __init__(self, model: "JaxModel", batches: Sequence[int]) -> None:
        self.model, self.at, self.tensors = model, 0, dict(model.tensors)
        self.runs = {batch: model.run_of(batch) for batch in batches}
        self.live: dict[int, dict[Var, Kept]] = {}
        for batch, run in self.runs.items():
            leaves = jax.tree.leaves(model.samples.batches[batch])
            given = zip(run.program.batch, leaves, strict=True)
            self.live[batch] = {v: Kept(partial(_same, array), _nothing) for v, array in given}
            self._step(batch, run.stretches[0])

    def inputs(self, layer: Layer) -> Iterator[Array]:
        for batch, run in self.runs.items():
            product = run.found[layer.name].product
            places = self.model.samples.places(batch, product.where, self.model.places)
            found = product.columns(self.live[batch][product.inputs].get(), places)
            yield _finite(found, batch, f"the inputs of {layer.name!r}")

    def advance(self, weights: Mapping[str, Weights]) -> None:
        self.tensors = self._changed(weights)
        self.at += 1
        for batch, run in self.runs.items():
            self._step(batch, run.stretches[self.at])

    def outputs(self, weights: Mapping[str, Weights] = {}) -> Iterator[list[Array]]:
        tensors = self._changed(weights)
        for batch, run in self.runs.items():
            made: dict[Any, Array] = {}
            for stretch in run.stretches[self.at + 1 :]:
                made |= _run(stretch, tensors, made, self.live[batch])
                made = {value: array for value, array in made.items() if value in stretch.live}
            outputs = filter(run.program.of_samples, run.program.outputs)
            yield [self._items(batch, _value(v, made, self.live[batch])) for v in outputs]

    def close(self) -> None:
        for live in self.live.values():
            for kept in live.values():
                kept.drop()
        self.live.clear()

    def _step(self, batch: int, stretch: Stretch) -> None:
        """Go on with a batch to the end of a stretch."""
        live = self.live[batch]
        made = _run(stretch, self.tensors, {}, live)
        for value in live.keys() - stretch.live:
            live.pop(value).drop()
        for value in made.keys() - live.keys():
            live[value] = self.model.store.put(made[value])

    def _items(self, batch: int, array: Array) -> Array:
        """An output as (items, features)."""
        if array.ndim > 1:
            real = self.model.samples.real(batch, array.shape[:-1])
            array = array if real is None else array[real]
        array = _finite(array, batch, "the outputs")
        return array.reshape(-1, array.shape[-1]) if array.ndim > 1 else array.reshape(-1, 1)

    def _changed(self, weights: Mapping[str, Weights]) -> dict[str, Array]:
        """The tensors with those of other weights."""
        tensors = dict(self.tensors)
        for layer in (layer for stage in self.model.stages for layer in stage):
            if layer.name in weights:
                mine = weights[layer.name]
                tensors[layer.name] = self.model.weight_as_stored(layer, mine.weight)
                tensors |= self.model.varying(layer, mine)
        return tensors


def _run(
    stretch: Stretch,
    tensors: Mapping[str, Array],
    made: Mapping[Var, Array],
    live: Mapping[Var, Kept],
) -> dict[Var, Array]:
    """The values that a stretch gives, of those just made or kept."""
    takes = [_value(value, made, live) for value in stretch.takes]
    gives = stretch.run([tensors[name] for name in stretch.tensors], stretch.constants, takes)
    return dict(zip(stretch.gives, map(np.asarray, gives), strict=True))


def _value(value: Var, made: Mapping[Var, Array], live: Mapping[Var, Kept]) -> Array:
    return made[value] if value in made else live[value].get()


def _finite(array: Array, batch: int, what: str) -> Array:
    array = array.astype(np.float32, copy=False)
    if not np.isfinite(array).all():
        raise BadData(f"batch {batch}: {what} hold NaN or infinity")
    return array


def _same(array: Array) -> Array:
    return array


def _nothing() -> None:
    pass
