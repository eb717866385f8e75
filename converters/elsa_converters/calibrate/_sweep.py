"""All layers in their order: what each level keeps of them, and what its outputs are worth."""

import math
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import numpy as np

from elsa_converters._errors import InvalidData
from elsa_converters.calibrate._layer import Settings, Solution, curve, solve_layer
from elsa_converters.calibrate._masks import Budget
from elsa_converters.calibrate._model import Array, Layer, Model, Walk
from elsa_converters.calibrate._outputs import Answers, Compared, distance, joined, side_by_side
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
from elsa_format.plugins import Meter, Progress, no_progress

Scope = Literal["auto", "uniform", "global"]
HELD = 8
"""One in so many batches is held back: levels are measured on them."""


@dataclass(frozen=True)
class Solved:
    """A layer that is finished in all networks."""

    layer: Layer
    solution: Solution


class Sweep:
    """Calibrates a model: `run` gives its layers one after the other.

    The samples' last batches are held back; `measured` is known when `run` has ended.
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
        self.settings = settings or Settings()
        self.all_classes, self.threads = all_classes, threads
        count = len(model.batches)
        if count < 2 or sum(model.batches) < 4:
            raise InvalidData(
                f"{sum(model.batches)} samples in {count} batches: expected at least 4 in 2; "
                "calibration needs samples to choose by and others to measure on"
            )
        held = max(1, round(count / HELD))
        self.fitted, self.held = range(count - held), range(count - held, count)
        self.layers = [layer for stage in model.stages for layer in stage if layer.nested]
        if not self.layers:
            raise InvalidData("no layer can be nested")
        self.budgets: Budgets = []
        self.measured: list[Compared] = []
        self.answers: Answers | None = None
        self.errors: dict[str, list[float]] = {}
        self._meter = Meter(no_progress, self._work_in_all())

    # --- Shares ----------------------------------------------------------------------------------

    def _budget(self, layer: Layer, level: int) -> Budget:
        wanted = self.levels[level]
        return wanted if isinstance(wanted, Pattern) else self.budgets[level][layer.name]

    def _choose_budgets(self, work: Work) -> None:
        fractions = [level for level in self.levels if isinstance(level, Fraction)]
        if not fractions:
            return
        if self.scope == "uniform":
            sizes = {layer.name: math.prod(layer.shape) for layer in self.layers}
            self.budgets = uniform(sizes, fractions)
        elif self.scope == "global":
            weights = {layer.name: self._weight(layer) for layer in self.layers}
            self.budgets = by_magnitude(weights, fractions)
        else:
            self.budgets = by_cost(self._curves(work), fractions)

    def _weight(self, layer: Layer) -> Array:
        return self.model.original(layer).weight.astype(np.float32)

    def _curves(self, work: Work) -> dict[str, Curve]:
        """What each layer's sparsity costs; fitted on some batches, asked of others."""
        count = len(self.fitted)
        asked = max(1, round(count * 3 / 8)) if count > 1 else 0
        probe = range(count - asked, count) if asked else self.fitted
        known = range(count - asked) if asked else self.fitted
        found = {}
        with walks(self.model, [known, probe]) as (walk, other):
            reference = joined(other.outputs())
            for stage in self.model.stages:
                for layer in stage:
                    if not layer.nested:
                        continue
                    own = self.model.original(layer)
                    (moments,) = collect(layer, own, walk, [walk], work)
                    matters = self._matters(layer)
                    errors, cut = curve(
                        layer, own, moments, GRID, self.settings, work, matters=matters
                    )
                    at = GRID.index(PROBE)
                    lost = joined(other.outputs({layer.name: cut[at]}))
                    cost = distance(reference, lost, self.model.classes)
                    size = math.prod(layer.shape)
                    found[layer.name] = Curve(size, errors, cost / max(errors[at], 1e-3))
                    self._meter.tick(_share(layer))
                walk.advance({})
                other.advance({})
        return found

    # --- Values ----------------------------------------------------------------------------------

    def run(self, progress: Progress = no_progress) -> Generator[Solved]:
        """Solve every layer, each with the inputs that it has in the levels' own networks."""
        self._meter = Meter(progress, self._work_in_all())
        with working(self.threads) as work:
            if self.model.classes is not None:
                self.answers = Answers(self.model.classes)
                with walks(self.model, [self.fitted]) as (walk,):
                    for outputs in walk.outputs():
                        self.answers.add(outputs[0])
            self._choose_budgets(work)
            networks = len(self.levels) + 1
            every = [self.fitted, self.held] * (networks + 1)
            with walks(self.model, every) as found:
                (original, measured), *rest = [found[i : i + 2] for i in range(0, len(found), 2)]
                for stage in self.model.stages:
                    solved = []
                    for layer in stage:
                        own = self.model.original(layer)
                        moments = collect(layer, own, original, [walk for walk, _ in rest], work)
                        solution = solve_layer(
                            layer,
                            own,
                            moments,
                            [self._budget(layer, t) for t in range(networks - 1)]
                            if layer.nested
                            else [],
                            self.settings,
                            work,
                            matters=self._matters(layer),
                        )
                        del moments
                        self.errors[layer.name] = solution.errors
                        solved.append(Solved(layer, solution))
                        self._meter.tick(_share(layer) * networks)
                    original.advance({})
                    measured.advance({})
                    for network, pair in enumerate(rest):
                        weights = {s.layer.name: s.solution.networks[network] for s in solved}
                        for walk in pair:
                            walk.advance(weights)
                    yield from solved
                self._measure(measured, [pair[1] for pair in rest])

    def _measure(self, original: Walk, others: Sequence[Walk]) -> None:
        self.measured = [Compared(self.model.classes) for _ in others]
        for first, *rest in side_by_side([walk.outputs() for walk in (original, *others)]):
            for compared, outputs in zip(self.measured, rest, strict=True):
                compared.add(first, outputs)

    def _matters(self, layer: Layer) -> Array | None:
        if layer.name != self.model.head or self.answers is None or self.all_classes:
            return None
        return self.answers.matters()

    # --- Progress --------------------------------------------------------------------------------

    def _work_in_all(self) -> int:
        curves = self.scope == "auto" and any(isinstance(s, Fraction) for s in self.levels)
        times = len(self.levels) + 1
        every = [layer for stage in self.model.stages for layer in stage]
        return sum(_share(layer) * (times + (curves and layer.nested)) for layer in every)


def _share(layer: Layer) -> int:
    """About how much work a layer is."""
    groups, rows, columns = layer.shape
    return groups * columns * (rows + columns) + 1


@contextmanager
def walks(model: Model, batches: Sequence[range]) -> Iterator[list[Walk]]:
    """Walks through batches, closed in any case."""
    with ExitStack() as stack:
        found = []
        for some in batches:
            walk = model.walk(some)
            stack.callback(walk.close)
            found.append(walk)
        yield found
