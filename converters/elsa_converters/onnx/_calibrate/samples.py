"""Samples of a graph's inputs: read, compared with what it takes, cut into batches."""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elsa_converters._errors import InvalidData
from elsa_converters._numpy import read_numpy
from elsa_converters.onnx._run.samples import (
    Arrays,
    Interface,
    Samples,
    fit_samples,
    interface,
    read_arrays,
    takes,
)

Array = NDArray[Any]
SamplesLike = str | os.PathLike[str] | Mapping[str, Any] | Iterable[Mapping[str, Any]]
BATCHES, LARGEST = 16, 32
"""Into how many batches samples are cut, and how many a batch holds at most."""


def read_batches(samples: SamplesLike, model: Path, limit: int | None = None) -> list[Arrays]:
    """The inputs of each run, in order; what does not fit the graph is refused.

    A graph with a fixed number of samples at a time does without those that are left at the end.
    What is one of several parts, and has samples along no first axis, is a run as it is.
    """
    graph, found, count = interface(model), list[Samples | Arrays](), 0
    for where, arrays, alone in _parts(samples):
        if limit is not None and count >= limit:
            break
        if not alone and (run := _run(arrays, graph)) is not None:
            _refuse_nan(run, where)
            count += 1
            found.append(run)
            continue
        rest = None if limit is None else limit - count
        fitted = fit_samples(arrays, graph, where=where, limit=rest)
        _refuse_nan({name: fitted.arrays[name] for name in fitted.inputs}, where)
        count += fitted.count
        found.append(fitted)
    size = max(1, min(LARGEST, count // BATCHES))
    return [run for part in found for run in _runs(part, size)]


def _runs(part: Samples | Arrays, size: int) -> Iterator[Arrays]:
    """What a part gives: a run, or its samples, as many at a time as the graph takes."""
    if not isinstance(part, Samples):
        yield part
        return
    for some in (part if part.fixed else replace(part, batch=size)).parts():
        if not part.fixed or some.count == part.batch:
            yield some.feeds


def size_of(run: Mapping[str, Array]) -> int:
    """How many samples a run holds: it is one itself if its inputs do not say the same."""
    sizes = {len(array) if array.ndim else 1 for array in run.values()}
    return sizes.pop() if len(sizes) == 1 else 1


def _run(given: Mapping[str, Any], graph: Interface) -> Arrays | None:
    """Arrays that are what the graph takes, but whose first axes are not that of samples."""
    if given.keys() != graph.inputs.keys():
        return None
    arrays = {name: np.asarray(array) for name, array in given.items()}
    if len({array.shape[:1] for array in arrays.values()}) == 1 and all(
        array.ndim for array in arrays.values()
    ):
        return None
    fits = (takes(graph.inputs[name], array) for name, array in arrays.items())
    return arrays if all(fits) else None


def _parts(samples: SamplesLike) -> Iterator[tuple[str, Mapping[str, Any], bool]]:
    """What there is of samples, each part with a name for messages, and whether it is all."""
    if isinstance(samples, Mapping):
        yield "samples", samples, True
    elif not isinstance(samples, str | os.PathLike):
        for number, part in enumerate(samples):
            if not isinstance(part, Mapping):
                kind = type(part).__name__
                raise InvalidData(f"samples {number}: {kind}, expected arrays by names of inputs")
            yield f"samples {number}", part, False
    elif not os.path.isdir(samples):
        yield os.fspath(samples), read_arrays(samples), True
    else:
        yield from _files(Path(samples))


def _files(folder: Path) -> Iterator[tuple[str, Mapping[str, Any], bool]]:
    """Archives one after the other, or an array for each input."""
    archives, arrays = sorted(folder.glob("*.npz")), sorted(folder.glob("*.npy"))
    if bool(archives) == bool(arrays):
        raise InvalidData(
            f"{folder}: expected .npz files, each with an array for every input, or an .npy file "
            "for every input"
        )
    for path in archives:
        yield os.fspath(path), read_arrays(path), False
    if arrays:
        yield os.fspath(folder), {path.stem: _array(path) for path in arrays}, True


def _array(path: Path) -> Array:
    array = read_numpy(path)
    if not isinstance(array, np.ndarray):
        raise InvalidData(f"{path}: is an archive (.npz), expected one array (.npy)")
    return array


def _refuse_nan(arrays: Arrays, where: str) -> None:
    for name, array in arrays.items():
        if np.issubdtype(array.dtype, np.inexact) and np.isnan(array).any():
            rows = np.atleast_1d(array)
            at = int(np.isnan(rows).reshape(len(rows), -1).any(1).argmax())
            raise InvalidData(f"{where}: array {name!r} holds NaN in sample {at}")
