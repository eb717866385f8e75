"""A JAX function and its variables as a model to calibrate, whatever library made them."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax
import numpy as np
from elsa_converters.calibrate import Layer, Model, Store, Weights
from numpy.typing import NDArray

from elsa_format.levels import Pattern
from elsa_format.plugins import CalibrationOptions
from elsa_train._calibrate.layers import Found, Part, find_head, find_layers
from elsa_train._calibrate.program import Program, Stretch, trace
from elsa_train._calibrate.samples import Samples
from elsa_train._calibrate.variables import Variables, restore
from elsa_train._calibrate.walk import Steps
from elsa_train._errors import BadData, BadRecipe, TrainError

PyTree = Any
Array = NDArray[Any]
Classes = Literal["probabilities", "logits"]
MAX_MEMORY = 1 << 29
"""Bytes of live values beyond which they go to a temporary file, unless told otherwise."""


@dataclass(frozen=True)
class Run:
    """How batches of one shape are run."""

    program: Program
    found: Mapping[str, Found]
    stages: Sequence[Sequence[Layer]]
    stretches: Sequence[Stretch]

    @classmethod
    def of(cls, program: Program, found: Mapping[str, Found]) -> "Run":
        """Cut a network before each layer that waits for others."""
        known = program.stages([one.product.equation for one in found.values()])
        stages: defaultdict[int, list[Layer]] = defaultdict(list)
        for one in found.values():
            stages[known[one.product.outputs]].append(one.layer)
        return cls(program, found, [stages[at] for at in sorted(stages)], program.stretches(known))


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
        if classes is not None and classes not in get_args(Classes):
            raise BadRecipe(f"classes {classes!r}: expected 'logits' or 'probabilities'")
        self.network, self.tensors = network, network.arrays
        self.samples = Samples(batches, limit=options.samples, padding=padding)
        self.batches, self.classes = self.samples.counts, classes
        self.store = Store(options.max_memory or MAX_MEMORY)
        self._apply = apply
        program = self._trace(0)
        network.check_use(program)
        found, self.left = self._choose(program, options)
        if not found:
            few = "; ".join(f"{name!r}: {why}" for name, why in list(self.left.items())[:3])
            raise BadRecipe(f"no layer can be nested{few and ': '}{few}")
        self._found = {one.layer.name: one for one in found}
        first = Run.of(program, self._found)
        self._runs = {self.samples.kind(0): first}
        self.stages = first.stages
        if classes is not None:
            self.head = find_head(program, found)

    def _choose(
        self, program: Program, options: CalibrationOptions
    ) -> tuple[list[Found], dict[str, str]]:
        """The layers to nest, and why others are left."""
        found, left = find_layers(program, self.network.dtypes)
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

    # --- Running ---------------------------------------------------------------------------------

    def _trace(self, batch: int) -> Program:
        def apply(tensors: Mapping[str, Any], batch: PyTree) -> PyTree:
            return jax.tree.leaves(self._apply(restore(self.network.variables, tensors), batch))

        try:
            return trace(apply, self.tensors, self.samples.batches[batch])
        except TrainError:
            raise
        except Exception as error:
            first, *_ = str(error).splitlines() or [type(error).__name__]
            raise BadRecipe(f"apply(variables, batch) fails for batch {batch}: {first}") from error

    def run_of(self, batch: int) -> Run:
        """How a batch is run."""
        kind = self.samples.kind(batch)
        if kind not in self._runs:
            program = self._trace(batch)
            found = {one.layer.name: one for one in find_layers(program, self.network.dtypes)[0]}
            if missing := self._found.keys() - found.keys():
                raise BadData(f"batch {batch}: its network lacks layer {min(missing)!r} of batch 0")
            self._runs[kind] = Run.of(program, {name: found[name] for name in self._found})
        return self._runs[kind]

    def walk(self, batches: Sequence[int]) -> Steps:
        return Steps(self, batches)

    # --- Weights ---------------------------------------------------------------------------------

    def original(self, layer: Layer) -> Weights:
        found = self._found[layer.name]
        weight = self.tensors[layer.name].reshape(-1)[found.order]
        bias = self._offset(found).astype(np.float32) if found.offsets else None
        return Weights(weight, bias)

    def weight_as_stored(self, layer: Layer, weight: Array) -> Array:
        return self._stored(layer.name, self._found[layer.name].order, weight)

    def varying(self, layer: Layer, weights: Weights) -> Mapping[str, Array]:
        found = self._found[layer.name]
        tensors = {}
        factor = np.ones(layer.groups * layer.rows)
        if (scale := found.scale) is not None:
            if weights.scale is not None:
                factor = weights.scale.astype(np.float64)
            tensors[scale.name] = self._stored(scale.name, scale.order, self._rows(scale) * factor)
        if found.offsets:
            # What is added is multiplied by the factor, too: scale (W x + offset / scale).
            part, own = found.offsets[-1], self._offset(found)
            assert weights.bias is not None
            change = weights.bias / factor - own.astype(np.float32)
            rows = self._rows(part) + part.sign * change
            tensors[part.name] = self._stored(part.name, part.order, rows)
        return tensors

    def _offset(self, found: Found) -> Array:
        return np.asarray(sum(part.sign * self._rows(part) for part in found.offsets))

    def _rows(self, part: Part) -> Array:
        return self.tensors[part.name].reshape(-1)[part.order].astype(np.float64)

    def _stored(self, name: str, order: Array, values: Array) -> Array:
        """Values in the order, shape and type of a tensor."""
        own = self.tensors[name]
        stored = np.empty(own.size, own.dtype)
        stored[order] = values
        return stored.reshape(own.shape)
