"""A JAX function and its variables as a model to calibrate, whatever library made them."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import jax
import numpy as np
from elsa_converters.calibrate import Kept, Layer, Model, Store, Walk, Weights
from jax.extend.core import Var
from numpy.typing import NDArray

from elsa_format.levels import Pattern
from elsa_format.plugins import CalibrationOptions
from elsa_train._calibrate_equations import Program, Stretch, trace
from elsa_train._calibrate_layers import Found, Part, find_layers
from elsa_train._calibrate_variables import Variables, restore
from elsa_train._errors import BadData, BadRecipe, TrainError

PyTree = Any
Array = NDArray[Any]
Classes = Literal["probabilities", "logits"]
MAX_MEMORY = 1 << 29
"""Bytes of live values beyond which they go to a temporary file, unless told otherwise."""


@dataclass(frozen=True)
class _Run:
    """How batches of one shape are run."""

    program: Program
    found: Mapping[str, Found]
    stages: Sequence[Sequence[str]]
    stretches: Sequence[Stretch]

    @classmethod
    def of(cls, program: Program, found: Mapping[str, Found]) -> "_Run":
        equations = [one.product.equation for one in found.values()]
        known = program.stages(equations)
        stages: defaultdict[int, list[str]] = defaultdict(list)
        for name, one in found.items():
            stages[known[one.product.equation.outvars[0]]].append(name)
        return cls(
            program,
            found,
            [stages[at] for at in sorted(stages)],
            program.stretches(known),
        )


class JaxModel(Model):
    """A function of variables and a batch, whose equations are run from layer to layer."""

    def __init__(
        self,
        apply: Callable[[PyTree, PyTree], PyTree],
        network: Variables,
        batches: Iterable[PyTree],
        options: CalibrationOptions,
        *,
        classes: Classes | None = None,
        padding: Callable[[PyTree], Any] | None = None,
    ) -> None:
        self.network, self.tensors = network, network.arrays
        self.samples = _at_most(batches, options.samples)
        self.batches = [_count(*each) for each in enumerate(self.samples)]
        self.classes = classes
        self.seen = [None if padding is None else ~_padding(padding, b) for b in self.samples]
        self.store = Store(options.max_memory or MAX_MEMORY)
        self._apply = apply
        self._runs: dict[Any, _Run] = {}
        program = self._trace(0)
        found, self.left = self._choose(program, options)
        self._found = {one.layer.name: one for one in found}
        if not found:
            few = "; ".join(f"{name!r}: {why}" for name, why in list(self.left.items())[:3])
            raise BadRecipe(f"no layer can be nested{few and ': '}{few}")
        first = self._runs[self._kind(0)] = _Run.of(program, self._found)
        self.stages = [[self._found[name].layer for name in stage] for stage in first.stages]
        if classes is not None:
            self.head = self._head(first)

    def _choose(
        self, program: Program, options: CalibrationOptions
    ) -> tuple[list[Found], dict[str, str]]:
        """The layers to nest, and why others are left."""
        dtypes = {name: array.dtype for name, array in self.tensors.items()}
        found, left = find_layers(program, dtypes)
        names = {one.layer.name for one in found}
        refused = options.left_out(self.network.tensors)
        left |= {name: why for name, why in refused.items() if name in names}
        groups = [level.m for level in options.levels if isinstance(level, Pattern)]
        for one in found:
            inputs = one.layer.columns // one.layer.kernel
            uneven = [m for m in groups if inputs % m]
            if one.layer.nested and uneven:
                left.setdefault(one.layer.name, f"{inputs} inputs, no multiple of {uneven[0]}")
        return [one for one in found if one.layer.name not in left], left

    def _head(self, run: _Run) -> str | None:
        """The layer whose rows the first output's features are."""
        features = run.program.outputs[0].aval.shape[-1:]
        *_, layer = self.stages[-1]
        return layer.name if features == (layer.groups * layer.rows,) else None

    # --- Running ---------------------------------------------------------------------------------

    def _trace(self, batch: int) -> Program:
        def apply(tensors: Mapping[str, Any], batch: PyTree) -> PyTree:
            return jax.tree.leaves(self._apply(restore(self.network.variables, tensors), batch))

        try:
            return trace(apply, self.tensors, self.samples[batch])
        except TrainError:
            raise
        except Exception as error:
            first, *_ = str(error).splitlines() or [type(error).__name__]
            raise BadRecipe(f"apply(variables, batch) fails for batch {batch}: {first}") from error

    def run_of(self, batch: int) -> _Run:
        """How a batch is run."""
        kind = self._kind(batch)
        if kind not in self._runs:
            program = self._trace(batch)
            dtypes = {name: array.dtype for name, array in self.tensors.items()}
            found = {one.layer.name: one for one in find_layers(program, dtypes)[0]}
            if missing := self._found.keys() - found.keys():
                name = min(missing)
                raise BadData(
                    f"batch {batch}: its network has no layer {name!r}, that of others has"
                )
            self._runs[kind] = _Run.of(program, {name: found[name] for name in self._found})
        return self._runs[kind]

    def _kind(self, batch: int) -> Any:
        """What batches that are run alike have in common."""
        leaves, tree = jax.tree.flatten(self.samples[batch])
        return tree, *((leaf.shape, leaf.dtype) for leaf in leaves)

    def chosen(self, batch: int, where: Sequence[int]) -> Array:
        """The places of a batch whose columns are taken, the same every time."""
        places = np.arange(prod(where)).reshape(where)
        seen = self.seen[batch]
        if seen is not None and places.shape[: seen.ndim] == seen.shape:
            places = places[seen]
        places = places.reshape(-1)
        most = max(1, self.places * self.batches[batch] // sum(self.batches))
        if len(places) <= most:
            return places
        return np.sort(np.random.default_rng(batch).choice(places, most, replace=False))

    def walk(self, batches: Sequence[int]) -> "Steps":
        return Steps(self, batches)

    # --- Weights ---------------------------------------------------------------------------------

    def original(self, layer: Layer) -> Weights:
        found = self._found[layer.name]
        weight = self.tensors[layer.name].reshape(-1)[found.order]
        bias = self._offset(found).astype(np.float32) if found.offsets else None
        return Weights(weight, bias)

    def weight_as_stored(self, layer: Layer, weight: Array) -> Array:
        stored = np.empty(weight.size, weight.dtype)
        stored[self._found[layer.name].order] = weight
        return stored.reshape(self.tensors[layer.name].shape)

    def varying(self, layer: Layer, weights: Weights) -> Mapping[str, Array]:
        found = self._found[layer.name]
        tensors = {}
        factor = np.ones(layer.groups * layer.rows)
        if found.scale is not None:
            if weights.scale is not None:
                factor = weights.scale.astype(np.float64)
            tensors[found.scale.name] = self._with(found.scale, self._rows(found.scale) * factor)
        if found.offsets:
            # What is added is multiplied by the factor, too: scale (W x + offset / scale).
            part, own = found.offsets[-1], self._offset(found)
            assert weights.bias is not None
            change = weights.bias / factor - own.astype(np.float32)
            tensors[part.name] = self._with(part, self._rows(part) + part.sign * change)
        return tensors

    def _offset(self, found: Found) -> Array:
        return np.asarray(sum(part.sign * self._rows(part) for part in found.offsets))

    def _rows(self, part: Part) -> Array:
        return self.tensors[part.name].reshape(-1)[part.order].astype(np.float64)

    def _with(self, part: Part, rows: Array) -> Array:
        own = self.tensors[part.name]
        stored = np.empty(own.size, own.dtype)
        stored[part.order] = rows
        return stored.reshape(own.shape)


class Steps(Walk):
    """A network on its way through some batches."""

    def __init__(self, model: JaxModel, batches: Sequence[int]) -> None:
        self.model, self.at, self.tensors = model, 0, dict(model.tensors)
        self.runs = {batch: model.run_of(batch) for batch in batches}
        self.live: dict[int, dict[Var, Kept]] = {}
        for batch, run in self.runs.items():
            given = zip(run.program.batch, jax.tree.leaves(model.samples[batch]), strict=True)
            self.live[batch] = {value: _given(array) for value, array in given}
            self._step(batch, run.stretches[0])

    def inputs(self, layer: Layer) -> Iterator[Array]:
        for batch, run in self.runs.items():
            product = run.found[layer.name].product
            chosen = self.model.chosen(batch, product.where)
            found = product.columns(self.live[batch][product.inputs].get(), chosen)
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
            yield [self._items(batch, made, value) for value in outputs]

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

    def _items(self, batch: int, made: Mapping[Var, Array], value: Var) -> Array:
        """An output as (items, features)."""
        array = made[value] if value in made else self.live[batch][value].get()
        seen = self.model.seen[batch]
        if seen is not None and array.ndim > seen.ndim and array.shape[: seen.ndim] == seen.shape:
            array = array[seen]
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
    takes = [made[value] if value in made else live[value].get() for value in stretch.takes]
    gives = stretch.run([tensors[name] for name in stretch.tensors], stretch.constants, takes)
    return dict(zip(stretch.gives, map(np.asarray, gives), strict=True))


def _given(array: Array) -> Kept:
    return Kept(lambda: array, lambda: None)


def _finite(array: Array, batch: int, what: str) -> Array:
    array = array.astype(np.float32, copy=False)
    if not np.isfinite(array).all():
        raise BadData(f"batch {batch}: {what} hold NaN or infinity")
    return array


def _padding(padding: Callable[[PyTree], Any], batch: PyTree) -> NDArray[np.bool_]:
    return np.asarray(padding(batch), bool)


def _count(number: int, batch: PyTree) -> int:
    """How many samples a batch has."""
    shapes = [leaf.shape for leaf in jax.tree.leaves(batch)]
    counts = {shape[0] if shape else 0 for shape in shapes}
    if len(counts) != 1 or 0 in counts:
        found = ", ".join(map(str, shapes)) or "no array"
        raise BadData(f"batch {number}: found {found}; expected samples along the first axis")
    return int(counts.pop())


def _at_most(batches: Iterable[PyTree], samples: int | None) -> list[PyTree]:
    """The batches with so many samples in all."""
    found: list[PyTree] = []
    count = 0
    for number, batch in enumerate(batches):
        arrays = jax.tree.map(np.asarray, batch)
        left = None if samples is None else samples - count
        if left == 0:
            break
        count += _count(number, arrays)
        if samples is not None and count > samples:
            arrays, count = jax.tree.map(lambda array, n=left: array[:n], arrays), samples
        found.append(arrays)
    if not found:
        raise BadData("no batches: calibration needs samples")
    return found
