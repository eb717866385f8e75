"""All layers in their order: what each level keeps of them, and what its outputs are worth."""

import math
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

import numpy as np

from elsa_converters._errors import InvalidData
from elsa_converters.calibrate._layer import Settings, Solution, curve, solve_layer
from elsa_converters.calibrate._masks import Budget
from elsa_converters.calibrate._model import Array, Layer, Model, Walk
from elsa_converters.calibrate._outputs import (
    Answers,
    Compared,
    Reference,
    check_finite,
    side_by_side,
)
from elsa_converters.calibrate._problem import seen_enough
from elsa_converters.calibrate._shares import (
    GRID,
    PROBE,
    Budgets,
    Curve,
    by_cost,
    by_magnitude,
    uniform,
)
from elsa_converters.calibrate._statistics import collect
from elsa_converters.calibrate._work import Work, working
from elsa_format.levels import Pattern
from elsa_format.plugins import Meter, Progress, no_progress, tell

Scope = Literal["auto", "uniform", "global"]
HELD = Fraction(1, 8)
"""The part of the batches that is held back: levels are measured on them."""
ASKED = Fraction(3, 8)
"""The part of the others by which the network is asked what it loses by a layer."""


@dataclass(frozen=True)
class Solved:
    """A layer that is finished in all networks."""

    layer: Layer
    solution: Solution


class Sweep:
    """Calibrates a model: `run` gives its layers one after the other.

    Some batches are held back; `measured` is known when `run` has ended.
    """

    def __init__(
        self,
        model: Model,
        levels: Sequence[Fraction | Pattern],
        *,
        scope: Scope = "auto",
        settings: Settings | None = None,
        all_classes: bool = False,
        threads: int | None = None,
    ) -> None:
        self.model, self.levels, self.scope = model, list(levels), scope
        self.settings = _for_network(settings or Settings(), model)
        self.all_classes, self.threads = all_classes, threads
        count = len(model.batches)
        if count < 2 or sum(model.batches) < 4:
            raise InvalidData(
                f"{sum(model.batches)} samples in {count} batches: expected at least 4 in 2; "
                "calibration needs samples to choose by and others to measure on"
            )
        self.held = spread(range(count), HELD)
        """Numbers of batches."""
        self.fitted = [at for at in range(count) if at not in self.held]
        self.layers = [layer for stage in model.stages for layer in stage if layer.nested]
        if not self.layers:
            raise InvalidData("no layer can be nested")
        self.budgets: Budgets = []
        """How many weights each layer keeps; empty for N:M."""
        self.measured: list[Compared] = []
        """Each level's outputs on what is held back, then the dense network's."""
        self.answers: Answers | None = None
        """What the original says of what is not held back, if it is a classifier."""
        self.errors: dict[str, list[float]] = {}
        """Of the outputs of each layer in each network."""
        self.few: dict[str, int] = {}
        """Layers that saw too little to move far from the original, and how many places."""

    @property
    def spared(self) -> dict[str, float]:
        """Layers that lose less than half of what they would alike, and what the first level keeps.

        Empty unless weights are shared by cost.
        """
        if not self.budgets or self.scope != "auto":
            return {}
        assert isinstance(self.levels[0], Fraction)
        least = 1 - float(self.levels[0]) / 2
        sizes = {layer.name: math.prod(layer.shape) for layer in self.layers}
        shares = {name: count / sizes[name] for name, count in self.budgets[0].items()}
        return {name: share for name, share in shares.items() if share > least}

    def run(self, progress: Progress = no_progress) -> Generator[Solved]:
        """Solve every layer, each with the inputs that it has in the levels' own networks."""
        meter = Meter(progress, self._work_in_all())
        with working(self.threads) as work:
            self._ask_original()
            self._choose_budgets(work, meter)
            networks, layers = len(self.levels) + 1, sum(map(len, self.model.stages))
            every = [self.fitted, self.held] * (networks + 1)
            with walks(self.model, every) as found:
                (original, measured), *rest = [found[i : i + 2] for i in range(0, len(found), 2)]
                for stage in self.model.stages:
                    solved = []
                    for layer in stage:
                        solution = self._solve(layer, original, [walk for walk, _ in rest], work)
                        solved.append(Solved(layer, solution))
                        tell(progress, f"solved {len(self.errors)} of {layers} layers")
                        meter.tick(_share(layer) * networks)
                    original.advance({})
                    measured.advance({})
                    for network, pair in enumerate(rest):
                        weights = {s.layer.name: s.solution.networks[network] for s in solved}
                        for walk in pair:
                            walk.advance(weights)
                    yield from solved
                self._measure(measured, [pair[1] for pair in rest])

    def _ask_original(self) -> None:
        """Refuse samples without an answer, before any work; learn what the answers are."""
        with walks(self.model, [self.fitted, self.held]) as (fitted, held):
            known = sum(_checked(outputs) for outputs in held.outputs())
            if self.model.classes is not None:
                self.answers = Answers(self.model.classes)
            found = 0
            for outputs in fitted.outputs():
                found += _checked(outputs)
                if self.answers is not None and not self.answers.add(outputs[0]):
                    self.answers = None  # of no classes that batches have in common
            if not known or not found:
                raise InvalidData("the samples are empty: the network's outputs hold no numbers")

    def _solve(self, layer: Layer, original: Walk, walks: Sequence[Walk], work: Work) -> Solution:
        own = self.model.original(layer)
        work.trim()
        moments = collect(layer, own, original, walks, work)
        if not seen_enough(layer, moments[-1]):
            self.few[layer.name] = moments[-1].count
        levels = range(len(self.levels)) if layer.nested else ()
        solution = solve_layer(
            layer,
            own,
            moments,
            [self._budget(layer, level) for level in levels],
            self.settings,
            work,
            matters=self._matters(layer),
        )
        self.errors[layer.name] = solution.errors
        return solution

    def _measure(self, original: Walk, others: Sequence[Walk]) -> None:
        self.measured = [Compared(self.model.classes) for _ in others]
        for first, *rest in side_by_side([walk.outputs() for walk in (original, *others)]):
            for compared, outputs in zip(self.measured, rest, strict=True):
                compared.add(first, outputs)

    def _matters(self, layer: Layer) -> Array | None:
        if layer.name != self.model.head or self.answers is None or self.all_classes:
            return None
        return self.answers.matters()

    # --- Shares ----------------------------------------------------------------------------------

    def _budget(self, layer: Layer, level: int) -> Budget:
        wanted = self.levels[level]
        return wanted if isinstance(wanted, Pattern) else self.budgets[level][layer.name]

    def _choose_budgets(self, work: Work, meter: Meter) -> None:
        fractions = [level for level in self.levels if isinstance(level, Fraction)]
        if not fractions:
            return
        if self.scope == "uniform":
            sizes = {layer.name: math.prod(layer.shape) for layer in self.layers}
            self.budgets = uniform(sizes, fractions)
        elif self.scope == "global":
            self.budgets = by_magnitude(self._weights, fractions)
        else:
            self.budgets = by_cost(self._curves(work, meter), fractions)

    def _weights(self) -> Iterable[tuple[str, Array]]:
        for layer in self.layers:
            yield layer.name, self.model.original(layer).weight.astype(np.float32)

    def _curves(self, work: Work, meter: Meter) -> dict[str, Curve]:
        """What each layer's sparsity costs; fitted on some batches, asked of others."""
        asked = spread(self.fitted, ASKED)
        known = [at for at in self.fitted if at not in asked] or self.fitted
        found = {}
        with walks(self.model, [known, asked]) as (walk, other):
            reference = Reference(other.outputs(), self.model.classes, len(asked))
            for stage in self.model.stages:
                for layer in stage:
                    if layer.nested:
                        found[layer.name] = self._curve(layer, walk, other, reference, work)
                        tell(meter.progress, f"measured {len(found)} of {len(self.layers)} layers")
                        meter.tick(_share(layer))
                walk.advance({})
                other.advance({})
        return found

    def _curve(
        self, layer: Layer, walk: Walk, asked: Walk, reference: Reference, work: Work
    ) -> Curve:
        own = self.model.original(layer)
        work.trim()
        (moments,) = collect(layer, own, walk, [walk], work)
        errors, cut = curve(
            layer, own, moments, GRID, PROBE, self.settings, work, matters=self._matters(layer)
        )
        cost = reference.distance(asked.outputs({layer.name: cut}))
        error = errors[GRID.index(PROBE)]
        return Curve(math.prod(layer.shape), errors, cost / max(error, 1e-3))

    # --- Progress --------------------------------------------------------------------------------

    def _work_in_all(self) -> int:
        curves = self.scope == "auto" and any(isinstance(s, Fraction) for s in self.levels)
        times = len(self.levels) + 1
        every = [layer for stage in self.model.stages for layer in stage]
        return sum(_share(layer) * (times + (curves and layer.nested)) for layer in every)


def _checked(outputs: Sequence[Array]) -> int:
    """How many numbers there are; others are refused."""
    check_finite(outputs)
    return sum(output.size for output in outputs)


def _for_network(settings: Settings, model: Model) -> Settings:
    """The settings with those that depend on the network."""
    if settings.mix is not None:
        return settings
    convolutions = any(layer.kernel > 1 for stage in model.stages for layer in stage)
    return replace(settings, mix=1.0 if convolutions else 0.5)


def spread(batches: Sequence[int], part: Fraction) -> list[int]:
    """A part of the batches, at equal distances, as samples may be in an order.

    >>> spread(range(8), Fraction(1, 4)), spread([5], Fraction(1, 4))
    ([3, 7], [5])
    """
    count = len(batches)
    taken = max(1, round(count * part))
    return [batches[(at + 1) * count // taken - 1] for at in range(taken)]


def _share(layer: Layer) -> int:
    """About how much work a layer is."""
    groups, rows, columns = layer.shape
    return groups * columns * (rows + columns) + 1


@contextmanager
def walks(model: Model, batches: Sequence[Sequence[int]]) -> Iterator[list[Walk]]:
    """Walks through batches, closed in any case."""
    with ExitStack() as stack:
        found = []
        for some in batches:
            walk = model.walk(some)
            stack.callback(walk.close)
            found.append(walk)
        yield found
