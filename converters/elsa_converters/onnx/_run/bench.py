"""What each level costs on this machine: bytes, memory, time, and what it is worth."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import onnxruntime

from elsa_converters.onnx._fast.timing import (
    check_threads,
    example_inputs,
    measured_axes,
    shortest_times,
)
from elsa_converters.onnx._write.export import export
from elsa_converters.sparse import find_library
from elsa_format import Incomplete, InvalidOption, Metric
from elsa_format.plugins import BETTER, LevelNumber, counted, open_network

MOST_LOSS = 0.01
"""Of a metric's value: integers whose metric is worse by more are marked."""


@dataclass(frozen=True)
class Integers:
    """A level whose sparse operators compute with integers.

    >>> Integers(seconds=0.002).worse
    False
    """

    seconds: float
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    """What was measured on samples, with at least each layer computed so that is timed so."""
    worse: bool = False
    """Its metric is worse than in floats by more than 1 % of it."""


@dataclass(frozen=True)
class Measured:
    """A level on this machine.

    >>> row = measure_levels("net.safetensors", "net.onnx", seconds=0.01)[-1]
    >>> row.level, row.sparsity, row.seconds > 0
    ('dense', 0.0, True)
    """

    level: LevelNumber
    name: str
    sparsity: float | None
    """None where nobody knows: in a level file that does not say which tensors are nested."""
    size: int
    """Bytes of its ONNX model with sparse operators, where they are faster; else densely."""
    download: int | None
    """Bytes to get it from a delivery file."""
    memory: int | None
    """Bytes that a session of it takes after a run."""
    dense_memory: int | None
    dense_seconds: float
    fast_seconds: float | None
    """None where the sparse operators were not built."""
    quality: float | None
    """Its metric: as measured, or else as recorded."""
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    """What was measured on samples."""
    best: bool = False
    """No other level is at least as good in quality and time, and better in one; False for a level
    whose quality is not recorded."""
    integers: Mapping[int, Integers] = field(default_factory=dict)
    """With integers of so many bits; nothing for a level that stays dense."""
    axes: Mapping[str, int] = field(default_factory=dict)
    """Sizes of the axes that the graph leaves open."""

    @property
    def seconds(self) -> float:
        """Its time as it would be run."""
        return self.dense_seconds if self.fast_seconds is None else self.fast_seconds

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def measure_levels(
    source: str | os.PathLike[str],
    template: str | os.PathLike[str],
    *,
    metric: str = "accuracy",
    threads: int | None = None,
    sizes: Mapping[str, int] | None = None,
    seconds: float = 2.0,
    metrics: Mapping[LevelNumber, Mapping[str, Metric]] | None = None,
    integers: Mapping[int, Mapping[LevelNumber, Mapping[str, Metric]]] | None = None,
    progress: Callable[[str], None] = lambda what: None,
) -> list[Measured]:
    """Measure size, time and memory of every available level, then of the dense network.

    Args:
        source: A path, a URL or a model directory.
        template: The ONNX model or template.
        metric: The metric by which levels are compared.
        threads: Threads of ONNX Runtime.
        sizes: Sizes of axes that the graph leaves open, by their names.
        seconds: How long each level is timed.
        metrics: Metrics by level, as `evaluate` returns them, which go before recorded ones.
        integers: Bits of integers to measure levels with, too, 16 and 8; and metrics by level, as
            `evaluate` returns them for this `precision`, or none.
        progress: Called with the name of each level before it is measured.

    Returns:
        A row for each level, sparsest first, and for "dense".

    >>> [row.level for row in measure_levels("net.safetensors", "net.onnx", seconds=0.01)]
    [1, 2, 3, 'dense']
    """
    check_threads(threads)
    metrics, integers = metrics or {}, integers or {}
    for bits in integers:
        if bits not in (16, 8):
            raise InvalidOption(f"integers={bits!r}: expected 16 and 8")
    if not 0 <= seconds < float("inf"):
        raise InvalidOption(f"seconds={seconds!r}: expected a time of 0 or more")
    axes = measured_axes(template, sizes)
    rows: list[tuple[LevelNumber, str, float | None, float | None]] = []
    with open_network(source) as network:
        recorded = network.profile.metrics.get(metric)
        for number in network.available:
            if number == "dense":
                rows.append(("dense", "", 0.0, network.profile.dense_metrics.get(metric)))
                continue
            about, sparsity = network.profile.level(number), counted(network).sparsity(number)
            rows.append((number, about.name, sparsity, about.metrics.get(metric)))
    if not rows:
        raise Incomplete(f"{os.fspath(source)}: no level is there yet; fetch one")
    found, downloads = [], download_sizes(source)
    for level, name, sparsity, quality in rows:
        progress("dense" if level == "dense" else f"level {level}")
        with tempfile.TemporaryDirectory(prefix="elsa-bench-") as folder:
            costs = _costs(
                Path(folder), source, template, level, threads, sizes, seconds, list(integers)
            )
        measured = dict(metrics.get(level, {}))
        if metric in measured:
            quality = measured[metric].value
        costs["integers"] = {
            bits: _of_integers(took, measured.get(metric), integers[bits].get(level, {}), metric)
            for bits, took in costs["integers"].items()
        }
        costs |= {"download": downloads.get(level), "quality": quality, "axes": axes}
        found.append(Measured(level, name, sparsity, **costs, metrics=measured))
    # More is better of an unknown metric whose direction the file does not record.
    better = recorded.better if recorded is not None else BETTER.get(metric, "higher")
    directions = {found[metric].better for found in metrics.values() if metric in found}
    return mark_best(found, next(iter(directions), better))


def _of_integers(
    seconds: float, floats: Metric | None, metrics: Mapping[str, Metric], metric: str
) -> Integers:
    found = metrics.get(metric)
    if found is None or floats is None:
        return Integers(seconds, dict(metrics))
    sign = 1 if found.better == "higher" else -1
    worse = sign * (floats.value - found.value) > MOST_LOSS * abs(floats.value)
    return Integers(seconds, dict(metrics), worse)


def download_sizes(source: str | os.PathLike[str]) -> Mapping[LevelNumber, int]:
    """Bytes to get each level, where the source is a delivery file."""
    with open_network(source) as network:
        return dict(network.downloads)


def mark_best(rows: Sequence[Measured], better: str = "higher") -> list[Measured]:
    """Mark the rows that no other beats, of those whose quality is known."""
    sign = 1 if better == "higher" else -1
    known = [(sign * row.quality, -row.seconds) for row in rows if row.quality is not None]

    def best(row: Measured) -> bool:
        if row.quality is None:
            return False
        mine = (sign * row.quality, -row.seconds)
        return not any(
            theirs != mine and theirs[0] >= mine[0] and theirs[1] >= mine[1] for theirs in known
        )

    return [replace(row, best=best(row)) for row in rows]


def _costs(
    folder: Path,
    source: str | os.PathLike[str],
    template: str | os.PathLike[str],
    level: LevelNumber,
    threads: int | None,
    sizes: Mapping[str, int] | None,
    seconds: float,
    integers: Sequence[int],
) -> dict[str, Any]:
    models = [folder / "dense.onnx"]
    export(source, template, models[0], level=level)
    for bits in (32, *integers) if find_library() is not None else ():
        layers = [0, 0]
        target = folder / f"fast{bits}.onnx"
        export(
            source,
            template,
            target,
            level=level,
            fast=True,
            precision=bits,
            threads=threads,
            sizes=sizes,
            chosen=lambda *counts, to=layers: to.__setitem__(slice(2), counts),
        )
        # Without sparse layers it is the dense model.
        models.append(target if layers[0] else models[0])
    different = list(dict.fromkeys(models))
    sessions = [_session(model, threads) for model in different]
    feeds = example_inputs(sessions[0], sizes, os.fspath(template))
    times = dict(zip(different, shortest_times(sessions, feeds, seconds), strict=True))
    dense, fast, *others = models if len(models) > 1 else [models[0], models[0]]
    memory = {model: session_memory(model, threads, sizes) for model in {dense, fast}}
    return {
        "size": _size(fast),
        "memory": memory[fast],
        "dense_memory": memory[dense],
        "dense_seconds": times[dense],
        "fast_seconds": None if find_library() is None else times[fast],
        "integers": {
            bits: times[model]
            for bits, model in zip(integers, others, strict=False)
            if model != dense
        },
    }


def _size(model: Path) -> int:
    data = model.with_name(f"{model.name}.data")
    return model.stat().st_size + (data.stat().st_size if data.exists() else 0)


def _session(model: Path, threads: int | None) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads or 0
    if (library := find_library()) is not None:
        options.register_custom_ops_library(str(library))
    return onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])


def session_memory(
    model: Path, threads: int | None, sizes: Mapping[str, int] | None = None
) -> int | None:
    """Bytes that a session and a run of it add to a process of its own; None if that is unknown."""
    if not Path("/proc/self/statm").exists():
        return None
    arguments = json.dumps([str(model), threads, dict(sizes or {})])
    program = f"import json, sys; from {__name__} import probe; probe(*json.loads(sys.argv[1]))"
    command = [sys.executable, "-c", program, arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    return int(done.stdout.split()[-1])


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def probe(model: str, threads: int | None, sizes: dict[str, int]) -> None:
    """Print the bytes that a session and a run of it add to this process."""
    before = _resident()
    session = _session(Path(model), threads)
    session.run(None, example_inputs(session, sizes))
    print(_resident() - before)
