"""The ways to nest levels that are compared, each in a process of its own."""

import math
import time
from collections.abc import Generator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from elsa_converters.calibrate import Nested

from benchmarks.calibrate.scores import Measure, Scores
from elsa_format import PackOptions, embed_counters, pack
from elsa_format.levels import Pattern, kept_count
from elsa_format.plugins import CalibrationOptions, Progress, SolvedTensor

METHODS = {
    "magnitude": "magnitude",
    "wanda": "Wanda's scores",
    "alone": "one level alone",
    "nested": "nested",
    "exact": "nested, dense exact",
}
"""Titles of the columns."""
TRADES: dict[str, tuple[str, dict[str, Any]]] = {
    "sparse": ("`--favour sparse`", {"favour": "sparse"}),
    "nested": ("default", {}),
    "dense": ("`--favour dense`", {"favour": "dense"}),
    "exact": ("`--keep-dense exact`", {"keep_dense": "exact"}),
}
"""Ways to nest all levels: titles of the columns where they are compared, and their options."""


class Network(Protocol):
    """A network, how it is calibrated and what it is tested on."""

    name: str
    title: str
    measures: Mapping[str, Measure]
    source: Any
    """What `pack` takes."""
    template: bool
    """Whether a template is written beside the weights."""

    def calibration(self, draw: int, options: CalibrationOptions) -> Nested:
        """The network with the samples of a draw."""
        ...

    def scores(self, packed: Path | None, level: int | str) -> dict[str, Scores]:
        """What a level scores on test data; the original does without a file."""
        ...


NETWORKS = {"ocr": "Ocr", "minilm": "MiniLM", "cifar": "Cifar", "gpt": "Gpt"}
"""Modules of networks, and their classes."""


def opened(name: str, data: Path | None) -> Network:
    """The network of a name; only its own libraries are imported."""
    network: Network = getattr(import_module(f"benchmarks.calibrate.{name}"), NETWORKS[name])(data)
    return network


class Scored(Nested):
    """Masks by |weight| · |input|, values as they are: Wanda's scores. Without inputs, magnitudes.

    Each output keeps the same share. Inputs are those of the original network, so that levels nest
    by themselves.
    """

    by_inputs = True

    def solve(self, progress: Progress) -> Generator[SolvedTensor]:
        """Give each nested tensor its counters."""
        del progress
        self.metrics = {}
        walk = self.model.walk(range(len(self.model.batches)))
        for stage in self.model.stages:
            for layer in stage:
                if not layer.nested:
                    continue
                weight = self.model.original(layer).weight
                score = np.abs(weight.astype(np.float64))
                if self.by_inputs:
                    squares = sum(np.square(x, dtype=np.float64).sum(0) for x in walk.inputs(layer))
                    score *= np.sqrt(squares)[:, None]
                counters = np.zeros(weight.shape, np.uint8)
                for number, level in reversed(list(enumerate(self.levels, 1))):
                    counters[best(score, level, layer.kernel)] = number
                stored = embed_counters(weight, counters, len(self.levels).bit_length())
                yield SolvedTensor(layer.name, 0, self.model.weight_as_stored(layer, stored))
            walk.advance({})
        walk.close()


def best(score: np.ndarray, level: Any, kernel: int) -> np.ndarray:
    """The mask of the best weights of each row, or of each block of a pattern."""
    if isinstance(level, Pattern):
        *rows, columns = score.shape
        blocks = score.reshape(*rows, columns // kernel // level.m, level.m, kernel)
        keep, axis = level.n, -2
    else:
        blocks, keep, axis = score, kept_count(level, score.shape[-1]), -1
    chosen = np.argsort(-blocks, axis=axis, kind="stable").take(range(keep), axis)
    mask = np.zeros(blocks.shape, bool)
    np.put_along_axis(mask, chosen, True, axis)
    return mask.reshape(score.shape)


@dataclass(frozen=True)
class Run:
    """Levels nested once."""

    method: str
    levels: str
    draw: int

    def pack(self, network: Network, out: Path) -> None:
        """Nest the levels and write the file."""
        template = out.with_suffix(".onnx") if network.template else None
        _, fields = TRADES.get(self.method, ("", {}))
        asked = PackOptions(sparsities=self.levels, calibrate=network, **fields).calibration
        found = network.calibration(self.draw, asked)
        if self.method == "magnitude" and ":" not in self.levels:  # of the same tensors
            names = tuple(found.nested)
            found.close()
            options = PackOptions(sparsities=self.levels, include=names)
            pack(network.source, out, options, template=template)
            return
        if self.method == "alone":  # the dense network is not served, whatever becomes of it
            found.serve(dense=0, bound=math.inf)
        if self.method in ("magnitude", "wanda"):
            found = Scored(found.checkpoint, found.model, asked)
            found.by_inputs = self.method == "wanda"
        pack(found, out, template=template)

    def measured(self, name: str, data: Path | None, out: Path) -> tuple[float, int]:
        """Nest them in a process of its own: the seconds and the most bytes it took."""
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            return pool.submit(_measured, self, name, data, out).result()


def _measured(run: Run, name: str, data: Path | None, out: Path) -> tuple[float, int]:
    network = opened(name, data)
    start = time.perf_counter()
    run.pack(network, out)
    seconds = time.perf_counter() - start
    status = Path("/proc/self/status").read_text().splitlines()
    (peak,) = (int(line.split()[1]) for line in status if line.startswith("VmHWM"))
    return seconds, peak * 1024
