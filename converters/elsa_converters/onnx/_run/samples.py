"""Labelled inputs of a graph: compared with what it takes before any weight is read."""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ValueInfoProto, helper

from elsa_converters._errors import InvalidData
from elsa_converters._numpy import read_numpy
from elsa_converters._scores import CLASSES, agree, check_labels, check_outputs, classify, compare
from elsa_converters.onnx._model.read import parse_model
from elsa_format import InvalidOption

Arrays = dict[str, NDArray[Any]]
Function = Callable[[Arrays, Arrays], Mapping[str, Any]]
"""Takes a run's outputs by name, and the arrays of its samples; returns a value for each sample."""
LABELS, TARGETS = "labels", "targets"


@dataclass(frozen=True)
class Interface:
    """What a graph takes and gives."""

    path: str
    inputs: Mapping[str, ValueInfoProto]
    output: list[int | None]
    """The sizes of its first output, None for those that are open."""


@dataclass(frozen=True)
class Part:
    """The samples of one run."""

    first: int
    feeds: Arrays
    arrays: Arrays
    """Everything that is known of these samples: inputs, labels, and what else there is."""
    count: int
    """How many they are; a graph that takes more at a time gets the last one repeatedly."""


@dataclass(frozen=True)
class Samples:
    """Inputs of a graph with what it should make of them."""

    where: str
    inputs: tuple[str, ...]
    arrays: Arrays
    count: int
    batch: int
    fixed: bool
    """Whether the graph takes exactly that many at a time."""
    function: Function | None

    def expected(self, name: str) -> NDArray[Any] | None:
        """The labels or targets, if there are any."""
        return None if name in self.inputs else self.arrays.get(name)

    @property
    def against_dense(self) -> bool:
        """Whether outputs are compared with those of the dense network, for want of labels."""
        return self.function is None and all(self.expected(x) is None for x in (LABELS, TARGETS))

    def parts(self) -> Iterator[Part]:
        """All samples, in order, as many at a time as the graph takes."""
        for first in range(0, self.count, self.batch):
            arrays = {n: a[first : first + self.batch] for n, a in self.arrays.items()}
            count = min(self.batch, self.count - first)
            feeds = {name: arrays[name] for name in self.inputs}
            if self.fixed and count < self.batch:
                rows = np.minimum(np.arange(self.batch), count - 1)
                feeds = {name: array[rows] for name, array in feeds.items()}
            yield Part(first, feeds, arrays, count)

    def score(self, outputs: Arrays, part: Part, dense: NDArray[Any] | None, where: str) -> Any:
        """The values of all metrics for the samples of one run."""
        if self.function is not None:
            return self._call(outputs, part, where)
        found = next(iter(outputs.values()))
        if not isinstance(found, np.ndarray) or not np.issubdtype(found.dtype, np.number):
            raise InvalidData(f"{where}: the first output holds no numbers", "{function} takes any")
        if self.expected(TARGETS) is not None:
            targets = part.arrays[TARGETS]
            check_outputs(found, targets.shape, where, part.first)
            return compare(found, targets)
        if (every := self.expected(LABELS)) is not None:
            labels = part.arrays[LABELS]
            check_outputs(found, (*labels.shape, CLASSES), where, part.first)
            if part.first == 0:
                check_labels(every, self.where, found.shape[-1])
            return classify(found, labels)
        check_outputs(found, (part.count, *found.shape[1:]), where, part.first)
        return agree(found, found if dense is None else dense)

    def _call(self, outputs: Arrays, part: Part, where: str) -> Any:
        assert self.function is not None
        try:
            return self.function(outputs, part.arrays)
        except Exception as error:
            name = getattr(self.function, "__name__", "the function")
            raise InvalidData(f"{where}: {name}: {type(error).__name__}: {error}") from error


def read_arrays(path: str | os.PathLike[str]) -> Arrays:
    """The arrays of a numpy archive, as `numpy.savez` writes it."""
    found = read_numpy(path)
    if isinstance(found, np.ndarray):
        raise InvalidData(f"{os.fspath(path)}: is one array; write named ones with numpy.savez")
    return found


def fit_samples(
    data: str | os.PathLike[str] | Mapping[str, Any],
    template: str | os.PathLike[str] | Interface,
    *,
    where: str = "data",
    function: Function | None = None,
    limit: int | None = None,
    batch: int = 32,
) -> Samples:
    """Compare arrays with the inputs and the first output of a graph.

    `where` names arrays that are in memory.
    """
    for name, number in (("limit", limit), ("batch", batch)):
        if number is not None and (type(number) is not int or number < 1):
            raise InvalidOption(f"{name}={number!r}: expected a whole number from 1 on")
    graph = template if isinstance(template, Interface) else interface(template)
    inputs = graph.inputs
    if isinstance(data, Mapping):
        arrays = {name: np.asarray(array) for name, array in data.items()}
    else:
        where, arrays = os.fspath(data), read_arrays(data)
    _check_names(arrays, inputs, function, where)
    count = _count(arrays, where)
    count = min(count, limit or count)
    arrays = {name: array[:count] for name, array in arrays.items()}
    fixed = {
        size
        for name, value in inputs.items()
        if (size := _check_input(arrays[name], value, where)) is not None
    }
    if len(fixed) > 1:
        raise InvalidData(
            f"{graph.path}: inputs take {', '.join(map(str, sorted(fixed)))} samples at a time, "
            "expected the same number"
        )
    size = max(fixed, default=batch)
    samples = Samples(where, tuple(inputs), arrays, count, size, bool(fixed), function)
    if function is None:
        _check_expected(samples, graph.output)
    return samples


def interface(template: str | os.PathLike[str]) -> Interface:
    """What a model or template takes and gives."""
    graph = parse_model(Path(template)).graph
    stored = {tensor.name for tensor in graph.initializer}
    inputs = {value.name: value for value in graph.input if value.name not in stored}
    return Interface(os.fspath(template), inputs, _sizes(graph.output[0]) if graph.output else [])


def _sizes(value: ValueInfoProto) -> list[int | None]:
    return [
        d.dim_value if d.HasField("dim_value") and d.dim_value > 0 else None
        for d in value.type.tensor_type.shape.dim
    ]


def _check_names(
    arrays: Arrays, inputs: Mapping[str, Any], function: Function | None, where: str
) -> None:
    names = ", ".join(map(repr, inputs))
    for name in inputs:
        if name not in arrays:
            raise InvalidData(f"{where}: no array {name!r}; the graph's inputs are {names}")
    if function is not None:  # which knows what else it needs
        return
    for name in arrays:
        if name not in {*inputs, LABELS, TARGETS}:
            raise InvalidData(
                f"{where}: array {name!r} is no input of the graph, whose inputs are {names}; "
                "others are called 'labels' or 'targets'"
            )
    if {LABELS, TARGETS} <= arrays.keys() - inputs.keys():
        raise InvalidData(f"{where}: has labels and targets; keep the one to measure against")


def _count(arrays: Arrays, where: str) -> int:
    counts = {name: len(array) if array.ndim else None for name, array in arrays.items()}
    (first, count), *_ = counts.items()
    for name, found in counts.items():
        if found is None or found != count:
            raise InvalidData(
                f"{where}: array {name!r} holds {'no' if found is None else found} samples, "
                f"{first!r} {'no' if count is None else count}; the first axis is that of samples"
            )
    if not count:
        raise InvalidData(f"{where}: holds no samples")
    return count


def _check_input(array: NDArray[Any], value: ValueInfoProto, where: str) -> int | None:
    """Compare an array with an input; returns how many samples the graph takes at a time."""
    if not value.type.tensor_type.elem_type:
        raise InvalidData(f"{where}: input {value.name!r} of the graph takes no tensor")
    kind = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
    if array.dtype != kind:
        raise InvalidData(
            f"{where}: array {value.name!r} is {array.dtype}, the graph takes {kind}; "
            f"convert it with .astype('{kind}')"
        )
    if not value.type.tensor_type.HasField("shape"):
        return None
    sizes = _sizes(value)
    first, rest = sizes[:1], sizes[1:]
    if not first or array.ndim != len(sizes) or not _fits(array.shape[1:], rest):
        shown = ["n", *("?" if size is None else size for size in rest)] if first else []
        raise InvalidData(
            f"{where}: array {value.name!r} has shape {list(array.shape)}, "
            f"the graph takes [{', '.join(map(str, shown))}]"
        )
    return first[0]


def takes(value: ValueInfoProto, array: NDArray[Any]) -> bool:
    """Whether an array can be what an input is given, all of it at a time."""
    kind = value.type.tensor_type.elem_type
    if not kind or array.dtype != helper.tensor_dtype_to_np_dtype(kind):
        return False
    if not value.type.tensor_type.HasField("shape"):
        return True
    sizes = _sizes(value)
    return array.ndim == len(sizes) and _fits(array.shape, sizes)


def _fits(found: tuple[int, ...], sizes: list[int | None]) -> bool:
    return all(size in (None, one) for one, size in zip(found, sizes, strict=True))


def _check_expected(samples: Samples, output: list[int | None]) -> None:
    """Compare labels or targets with what the graph says of its first output."""
    targets, labels = samples.expected(TARGETS), samples.expected(LABELS)
    if targets is not None and not (
        np.issubdtype(targets.dtype, np.number) and np.isfinite(targets).all()
    ):
        raise InvalidData(f"{samples.where}: targets hold NaN, infinity or no numbers")
    if labels is not None:
        check_labels(labels, samples.where, output[-1] if output else None)
