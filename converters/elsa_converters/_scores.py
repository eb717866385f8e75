"""Metrics of outputs, one value for each sample; their means, with standard errors."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from elsa_converters._errors import InvalidData
from elsa_format import Metric
from elsa_format.plugins import direction

Array = NDArray[Any]
TOP = 5
CLASSES = "classes"
"""The axis of classes, in an expected shape."""


class Values(NamedTuple):
    """The values of a metric for some samples.

    >>> Values([0.5, 0.25], "lower").better
    'lower'
    """

    values: Any
    better: str | None = None
    """"higher" or "lower"; None where the metric's name tells."""
    weights: Any = None
    """How much each sample counts in the mean: of a text, its tokens."""


class Scores:
    """What was found out about one level, sample by sample.

    >>> scores = Scores("level 1")
    >>> scores.add({"accuracy": [1, 0]}, 2)
    >>> scores.add({"accuracy": [1, 0]}, 2)
    >>> metric = scores.metrics()["accuracy"]
    >>> metric.value, metric.better, metric.samples, round(metric.error, 3)
    (0.5, 'higher', 4, 0.289)
    """

    def __init__(self, where: str) -> None:
        self.where = where
        self._better: dict[str, str] = {}
        self._values: dict[str, list[Array]] = {}
        self._weights: dict[str, list[Array]] = {}
        self.samples = 0

    def add(self, found: Any, count: int) -> None:
        """Add the values of so many samples."""
        if not isinstance(found, Mapping) or not found:
            raise InvalidData(f"{self.where}: no metrics were returned, expected values by name")
        if self._better and found.keys() != self._better.keys():
            raise InvalidData(f"{self.where}: metrics {_names(self._better)} and {_names(found)}")
        for name, given in found.items():
            values = Values(*given) if isinstance(given, tuple) else Values(given)
            self._better[name] = direction(name, values.better, self.where)
            ones = np.ones(count) if values.weights is None else values.weights
            self._values.setdefault(name, []).append(self._checked(name, values.values, count))
            self._weights.setdefault(name, []).append(self._checked(name, ones, count))
        self.samples += count

    def _checked(self, name: str, given: Any, count: int) -> Array:
        try:
            values = np.asarray(given, np.float64)
        except (TypeError, ValueError):
            values = np.empty(())
        if values.shape != (count,):
            raise InvalidData(
                f"{self.where}: metric {name!r} has shape {list(values.shape)}, "
                f"expected one number for each of {count} samples"
            )
        if not np.isfinite(values).all():
            wrong = int(np.flatnonzero(~np.isfinite(values))[0])
            raise InvalidData(
                f"{self.where}: metric {name!r} is {values[wrong]} for sample "
                f"{self.samples + wrong}"
            )
        return values

    def metrics(self) -> dict[str, Metric]:
        """The mean of each metric, and its standard error if there are two samples or more."""
        return {name: self._mean(name) for name in self._values}

    def _mean(self, name: str) -> Metric:
        values, weights = (np.concatenate(x[name]) for x in (self._values, self._weights))
        count, total = values.size, float(weights.sum())
        mean = float((values * weights).sum() / total)
        error = None
        if count > 1:
            spread = float(np.square(weights * (values - mean)).sum())
            error = math.sqrt(spread * count / (count - 1)) / total
        return Metric(mean, self._better[name], count, error)


def classify(outputs: Array, labels: Array) -> dict[str, Array]:
    """Whether the class with the highest output is the label's; of more positions, how often.

    Classes are on the last axis. Of equal outputs the first counts as the highest, as in argmax.

    >>> classify(np.array([[0.1, 0.9], [0.8, 0.2]]), np.array([1, 1]))
    {'accuracy': array([1., 0.])}
    """
    labels = labels.astype(np.int64)[..., None]
    own = np.take_along_axis(outputs, labels, -1)
    earlier = np.arange(outputs.shape[-1]) < labels
    before = ((outputs > own) | ((outputs == own) & earlier)).sum(-1).reshape(len(labels), -1)
    found = {"accuracy": (before == 0).mean(1)}
    if outputs.shape[-1] > TOP:
        found[f"top{TOP}"] = (before < TOP).mean(1)
    return found


def compare(outputs: Array, targets: Array) -> dict[str, Array]:
    """How far outputs are from targets, and whether they point the same way.

    >>> compare(np.array([[3.0, 4.0]]), np.array([[6.0, 8.0]]))
    {'mse': array([12.5]), 'cosine': array([1.])}
    """
    one, other = (array.reshape(len(array), -1).astype(np.float64) for array in (outputs, targets))
    lengths = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
    product = (one * other).sum(1)
    cosine = np.divide(product, lengths, out=np.zeros(len(one)), where=lengths > 0)
    return {"mse": np.square(one - other).mean(1), "cosine": cosine}


def agree(outputs: Array, dense: Array) -> dict[str, Array]:
    """How often the highest output is the dense network's; how near outputs are to its own.

    >>> agree(np.array([[1.0, 2.0]]), np.array([[1.0, 3.0]]))["agreement"]
    array([1.])
    """
    if outputs.ndim < 2:  # numbers alone
        return compare(outputs, dense)
    same = outputs.argmax(-1) == dense.argmax(-1)
    return {"agreement": same.reshape(len(same), -1).mean(1), **compare(outputs, dense)}


def check_labels(labels: Array, where: str, classes: int | None = None) -> None:
    """Refuse what are no numbers of classes."""
    if labels.dtype.kind not in "iu":
        raise InvalidData(f"{where}: labels are {labels.dtype}, expected integers, from 0 on")
    most = np.iinfo(np.int64).max if classes is None else classes
    wrong = np.argwhere((labels < 0) | (labels >= most))
    if wrong.size:
        expected = "0 or more" if classes is None else f"0..{classes - 1}"
        label = labels[tuple(wrong[0])]
        raise InvalidData(f"{where}: label {label} of sample {wrong[0][0]}, expected {expected}")


def check_outputs(outputs: Array, shape: Sequence[int | str], where: str, first: int) -> None:
    """Refuse outputs with NaN, or not of the shape that is measured; a named axis has any size."""
    if outputs.ndim != len(shape) or any(
        size != found for size, found in zip(shape, outputs.shape, strict=True) if size != CLASSES
    ):
        expected = ", ".join(map(str, shape))
        raise InvalidData(
            f"{where}: the output has shape {list(outputs.shape)}, expected [{expected}]"
        )
    bad = np.isnan(outputs).reshape(len(outputs), -1).any(1)
    if bad.any():
        raise InvalidData(f"{where}: the output of sample {first + int(bad.argmax())} holds NaN")


def _names(found: Iterable[str]) -> str:
    return ", ".join(map(str, found))
