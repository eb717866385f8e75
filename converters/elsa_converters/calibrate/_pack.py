"""A model and the checkpoint that it is stored as, joined to what `pack` nests by calibration."""

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from fractions import Fraction
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elsa_converters.calibrate._layer import Settings
from elsa_converters.calibrate._model import Model
from elsa_converters.calibrate._sweep import Sweep
from elsa_format import MetricInfo, __version__
from elsa_format.levels import Pattern, level_name
from elsa_format.plugins import (
    Calibration,
    CalibrationOptions,
    Checkpoint,
    Progress,
    SolvedTensor,
)

DENSE = {"sparse": 0.5, None: 2.0, "dense": 8.0}
"""The weight of the dense network among the levels, by whom the trade serves."""


MOVED = 0.1
"""The relative error of the dense network's outputs above which a warning names the options."""
FEW = 8
"""Classes or layers that a message names."""


class Nested(Calibration):
    """The network of a checkpoint, whose layers are solved by a sweep over a model.

    Closing it closes the checkpoint; what a walk holds is given back when `solve` ends.

    Args:
        checkpoint: All tensors to be stored, added biases and scales included.
        model: The same network, run with samples.
        options: What is asked.
        left: Layers that are not nested, and why.
        notes: What else the user should know.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        model: Model,
        options: CalibrationOptions,
        *,
        left: Mapping[str, str] = {},
        notes: Sequence[str] = (),
    ) -> None:
        self.checkpoint, self.model, self.left, self.notes = checkpoint, model, left, notes
        self.path, self.tensors = checkpoint.path, checkpoint.tensors
        self.metadata, self.extra_metadata = checkpoint.metadata, checkpoint.extra_metadata
        self.levels: Sequence[Fraction | Pattern] = tuple(options.levels)
        self._sweep = Sweep(
            model,
            self.levels,
            scope=options.scope or "auto",
            settings=replace(
                Settings(),
                exact=options.keep_dense == "exact",
                dense=DENSE[options.favour],
            ),
            all_classes=options.all_classes,
            threads=options.threads,
        )
        layers = [layer for stage in model.stages for layer in stage]
        self.nested = [layer.name for layer in layers if layer.nested]
        self.per_level = [layer.name for layer in layers if not layer.nested]
        for layer in layers:
            self.per_level += model.varying(layer, model.original(layer))
        held = sum(model.batches[at] for at in self._sweep.held)
        recorded = f"calibration, elsa-format {__version__}"
        self.metrics = {"relative_error": MetricInfo("lower", held, recorded)}
        if model.classes is not None:
            self.metrics["agreement"] = MetricInfo("higher", held, recorded)

    def serve(self, *, dense: float, bound: float) -> None:
        """Weigh and bound the dense network otherwise than the options say."""
        self._sweep.settings = replace(self._sweep.settings, dense=dense, bound=bound)

    def solve(self, progress: Progress) -> Generator[SolvedTensor]:
        """Run the sweep; every layer's tensors come when it is solved."""
        dense = len(self.levels)
        with closing(self._sweep.run(progress)) as run:
            for layer, solution in ((solved.layer, solved.solution) for solved in run):
                if layer.nested:
                    stored = self.model.weight_as_stored(layer, solution.weight)
                    yield SolvedTensor(layer.name, 0, stored)
                for network, weights in enumerate(solution.networks):
                    level = 0 if network == dense else network + 1
                    if not layer.nested:
                        stored = self.model.weight_as_stored(layer, weights.weight)
                        yield SolvedTensor(layer.name, level, stored)
                    for name, array in self.model.varying(layer, weights).items():
                        yield SolvedTensor(name, level, array)
        found = self._sweep.measured
        self.measured = [{name: getattr(one, name) for name in self.metrics} for one in found]
        self.notes = [*self.notes, *_notes(self._sweep)]
        self.defaults = list(_spared(self._sweep))

    # --- The checkpoint's part -------------------------------------------------------------------

    @property
    def groups(self) -> Sequence[Sequence[str]]:
        """The checkpoint's."""
        return self.checkpoint.groups

    def blocks(self, name: str, size: int) -> Iterator[NDArray[np.uint8]]:
        """The checkpoint's."""
        return self.checkpoint.blocks(name, size)

    def nestable(self, name: str) -> bool:
        """Whether it is the weight of a layer that is nested."""
        return name in self.nested

    def check_unchanged(self) -> None:
        """Ask the checkpoint."""
        self.checkpoint.check_unchanged()

    def check_template(self, template: Any, packed: Any) -> None:
        """Ask the checkpoint."""
        self.checkpoint.check_template(template, packed)

    def write_template(self, template: Any, packed: Any, *, force: bool = False) -> None:
        """Write the checkpoint's."""
        self.checkpoint.write_template(template, packed, force=force)

    def close(self) -> None:
        """Close the checkpoint."""
        self.checkpoint.close()


def _notes(sweep: Sweep) -> Iterator[str]:
    """A dense network that moved, classes that the samples lack, layers that saw few of them."""
    if (moved := sweep.measured[-1].relative_error) > MOVED:
        yield (
            f"outputs of the dense network differ by {moved:.0%} from the original's; "
            "--favour dense or --keep-dense exact keeps them nearer"
        )
    nested = sweep.model.head is not None  # else the rows of classes are left alone
    if nested and sweep.answers is not None and (unseen := sweep.answers.unseen).size:
        yield (
            f"the network's answer is never one of {unseen.size:,} of "
            f"{sweep.answers.chosen.size:,} classes ({_few(map(str, unseen))}) for these samples, "
            "and levels lose most there; add samples of them"
            + ("" if sweep.all_classes else ", or --all-classes weighs classes alike")
        )
    if sweep.few:
        seen = (f"{name!r} {count}" for name, count in sweep.few.items())
        yield (
            f"{len(sweep.few)} of {len(sweep.errors)} layers saw few inputs, and stay near the "
            f"original: {_few(seen)}"
        )


def _spared(sweep: Sweep) -> Iterator[str]:
    """Layers that automatic shares have spared."""
    if sweep.spared:
        kept = (f"{name!r} keeps {share:.0%}" for name, share in sweep.spared.items())
        yield (
            f"--scope auto spares {len(sweep.spared)} of {len(sweep.layers)} layers: at "
            f"{level_name(sweep.levels[0])} {_few(kept)}"
        )


def _few(words: Iterable[str]) -> str:
    """The first of some words."""
    shown = list(islice(words, FEW + 1))
    return ", ".join(shown[:FEW]) + (", …" if len(shown) > FEW else "")
