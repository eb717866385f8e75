"""Metrics of every level in ONNX Runtime: one pass over the data, if memory has all sessions."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from elsa_converters._scores import Scores
from elsa_converters.onnx._fast.pick import THRESHOLDS, Precision, check_precision
from elsa_converters.onnx._fast.timing import check_threads
from elsa_converters.onnx._run.samples import Function, Samples, fit_samples
from elsa_converters.onnx._run.session import session
from elsa_format import Incomplete, Metric
from elsa_format.plugins import LevelNumber, Progress, no_progress, open_network, show_level

_COPIES = 3
"""How often a session may have the weights in memory, with its copies in other layouts."""


def evaluate(
    source: str | os.PathLike[str],
    template: str | os.PathLike[str],
    data: str | os.PathLike[str] | Mapping[str, Any],
    *,
    function: Function | None = None,
    limit: int | None = None,
    batch: int = 32,
    threads: int | None = None,
    precision: Precision = 32,
    together: bool | None = None,
    progress: Progress = no_progress,
) -> dict[LevelNumber, dict[str, Metric]]:
    """Measure every available level and the dense network on samples, in ONNX Runtime.

    With `labels` these are accuracy and, of more than five classes, top-5 accuracy; with `targets`
    the mean squared error and the cosine similarity. Without either, outputs are compared with the
    dense network's: how often the highest one is the same, and both of these. They are those of the
    graph's first output, whose last axis is that of classes.

    Args:
        source: A path, a URL or a model directory.
        template: The ONNX model or template.
        data: Arrays by name, or a file that `numpy.savez` wrote: the graph's inputs, and `labels`
            or `targets`. The first axis is that of samples.
        function: Takes outputs by name and the arrays of their samples, and returns a number for
            each sample by names of metrics; of a metric with a name of one's own with a direction,
            such as `(numbers, "lower")`.
        limit: Use the first samples only.
        batch: Samples in one run, unless the graph has a fixed number.
        threads: Threads of ONNX Runtime.
        precision: Let sparse operators compute with integers of 16 or 8 bits, in every layer of
            levels that any speed could choose.
        together: Keep the sessions of all levels in memory, and go through the data once; by
            default if they fit into half of the memory that is available.
        progress: Called with the numbers of runs that are done, and of all.

    Returns:
        The metrics of each level, sparsest first, and of "dense".

    Raises:
        InvalidData: The arrays do not fit the graph, or a level gives no numbers for them.
        Incomplete: No level is downloaded; or without labels, the dense network is not.

    >>> import numpy as np
    >>> data = {"x": np.ones((4, 100), np.float32), "labels": np.array([0, 1, 2, 3])}
    >>> sorted(evaluate("net.safetensors", "net.onnx", data)[2])
    ['accuracy', 'top5']
    """
    check_threads(threads)
    fast = precision != 32 and THRESHOLDS[0]
    check_precision(precision, fast)
    samples = fit_samples(data, template, function=function, limit=limit, batch=batch)
    with open_network(source) as network:
        levels, size = network.available, network.header.data_size
    if not levels:
        raise Incomplete(f"{os.fspath(source)}: no level is downloaded yet; run: elsa-fetch")
    reference = samples.against_dense
    if reference and "dense" not in levels:
        raise Incomplete(
            f"{samples.where}: has no labels, and the dense network to compare with is not "
            "downloaded; add an array 'labels' or 'targets'"
        )
    if together is None:
        together = _COPIES * size * len(levels) <= available_memory() / 2
    groups = _groups(levels, together=together, reference=reference)
    scores: dict[LevelNumber, Scores] = {level: Scores(show_level(level)) for level in levels}
    done, total = 0, samples.count * sum(map(len, groups))
    for number, group in enumerate(groups):
        sessions = {
            level: session(
                source,
                template,
                level=level,
                fast=fast,
                precision=precision,
                intra_op_num_threads=threads or 0,
                providers=["CPUExecutionProvider"],
            )
            for level in group
        }
        for part in samples.parts():
            dense = None
            for level, runner in sessions.items():
                outputs = _run(runner, part.feeds, part.count, samples)
                if reference and level == "dense":
                    dense = next(iter(outputs.values()))
                if level != "dense" or number == 0 or not reference:
                    found = samples.score(outputs, part, dense, scores[level].where)
                    scores[level].add(found, part.count)
                done += part.count
                progress(done, total)
        del runner
        sessions.clear()  # before the next ones are made
    return {level: scores[level].metrics() for level in levels}


def _run(runner: Any, feeds: dict[str, Any], count: int, samples: Samples) -> dict[str, Any]:
    names = [output.name for output in runner.get_outputs()]
    found = dict(zip(names, runner.run(None, feeds), strict=True))
    if not samples.fixed:
        return found
    return {name: array[:count] if np.ndim(array) else array for name, array in found.items()}


def _groups(
    levels: Sequence[LevelNumber], *, together: bool, reference: bool
) -> list[list[LevelNumber]]:
    """Levels whose sessions are in memory at the same time, the dense one first if it is needed."""
    if together:
        return [sorted(levels, key=lambda level: level != "dense")]
    if reference:
        return [["dense", level] for level in levels if level != "dense"]
    return [[level] for level in levels]


def available_memory() -> float:
    """Bytes that can be taken without swapping; none where the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return 1024 * int(found[0]) if found else 0
