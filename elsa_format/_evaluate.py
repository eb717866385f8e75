"""Measure levels with a function of their weights, one level after the other."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elsa_format._errors import Incomplete, InvalidOption
from elsa_format._file import File, open
from elsa_format._metrics import BETTER, Metric
from elsa_format._profile import LevelNumber
from elsa_format._storage import Source
from elsa_format._threads import Progress, no_progress

Metrics = dict[str, Metric]
Function = Callable[[dict[str, NDArray[Any]]], Mapping[str, Any]]


def evaluate(
    source: Source | File,
    function: Function,
    *,
    verify: bool = True,
    max_bytes: int | None = None,
    progress: Progress = no_progress,
) -> dict[LevelNumber, Metrics]:
    """Measure every available level and the dense network with a function of the weights.

    Every call gets arrays of its own: what the function does to them changes neither the file nor
    another level. One level is in memory at a time.

    Args:
        source: A path, a URL, a model directory, a seekable stream, or an open `File`.
        function: Takes the weights of a level by name, and returns values by the names of metrics.
            A value is a number, or a `Metric`, which also has samples and error. Of a metric with a
            name of one's own it is a `Metric`, or a pair such as `(0.3, "lower")`.
        verify: Compare checksums; an open `File` does as it was opened.
        max_bytes: Refuse a larger network.
        progress: Called with the numbers of levels that are measured, and of all.

    Returns:
        The metrics of each level, sparsest first, and of "dense".

    Raises:
        InvalidOption: The function returned no metrics, or one that is not a finite number.
        Incomplete: No level is downloaded yet.

    >>> def zeros(weights):
    ...     return {"zeros": (float((weights["layer"] == 0).mean()), "higher")}
    >>> evaluate("net.safetensors", zeros)[2]
    {'zeros': Metric(value=0.9, better='higher', samples=None, error=None)}
    """
    if not callable(function):
        raise InvalidOption(f"function={function!r}: expected a function of a level's weights")
    file = source if isinstance(source, File) else open(source, verify=verify, max_bytes=max_bytes)
    try:
        levels = file.available
        if not levels:
            raise Incomplete(f"{file.path}: no level is downloaded yet; run: elsa-fetch")
        found: dict[LevelNumber, Metrics] = {}
        for number in levels:
            progress(len(found), len(levels))
            found[number] = as_metrics(function(file.load(number)), show_level(number))
        progress(len(levels), len(levels))
        return found
    finally:
        if file is not source:
            file.close()


def show_level(level: LevelNumber) -> str:
    """A level in a message."""
    return "dense" if level == "dense" else f"level {level}"


def as_metrics(found: Any, where: str) -> Metrics:
    """What a function has returned, checked: numbers, pairs of number and direction, or metrics."""
    if not isinstance(found, Mapping) or not found:
        raise InvalidOption(
            f"{where}: the function returned {_shown(found)}, expected values by names of metrics"
        )
    return {name: _as_metric(name, value, where) for name, value in found.items()}


def _as_metric(name: Any, value: Any, where: str) -> Metric:
    if not isinstance(name, str) or not name:
        raise InvalidOption(f"{where}: the function returned a metric called {name!r}")
    if isinstance(value, Metric):
        direction(name, value.better, where)
        metric = value
    else:
        number, better = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
        metric = Metric(_number(number), direction(name, better, where))
    if not math.isfinite(metric.value):
        raise InvalidOption(f"{where}: metric {name!r} is {metric.value}, expected a finite number")
    return metric


def _number(value: Any) -> float:
    if np.ndim(value) == 0 and not isinstance(value, str | bytes | bool | None):
        try:
            return float(value)
        except (TypeError, ValueError, OverflowError):
            pass
    return math.nan


def _shown(value: object) -> str:
    return "{}" if value == {} else f"a {type(value).__name__}"


def direction(name: str, better: object, where: str) -> str:
    """Whether more or less of a metric is better: as given, or else as its name tells."""
    found = BETTER.get(name) if better is None else better
    if found not in ("higher", "lower"):
        given = "" if better is None else f", not {better!r}"
        raise InvalidOption(
            f"{where}: metric {name!r} needs a direction{given}; "
            'return (value, "higher") or (value, "lower")'
        )
    return str(found)
