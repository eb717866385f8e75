"""Samples of a graph's inputs: read, compared with what it takes, cut into batches."""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elsa_converters._errors import InvalidData
from elsa_converters.onnx._run.samples import (
    Arrays,
    Samples,
    fit_samples,
    interface,
    read_arrays,
)

Array = NDArray[Any]
SamplesLike = str | os.PathLike[str] | Mapping[str, Any] | Iterable[Mapping[str, Any]]
BATCHES, LARGEST = 16, 32
"""Into how many batches samples are cut, and how many a batch holds at most."""


def read_batches(samples: SamplesLike, model: Path, limit: int | None = None) -> list[Arrays]:
    """The inputs of each run, in order; what does not fit the graph is refused.

    A graph with a fixed number of samples at a time does without those that are left at the end.
    """
    graph, found, count = interface(model), list[Samples](), 0
    for where, arrays in _parts(samples):
        if limit is not None and count >= limit:
            break
        rest = None if limit is None else limit - count
        fitted = fit_samples(arrays, graph, where=where, limit=rest)
        _refuse_nan(fitted)
        count += fitted.count
        found.append(fitted)
    size = max(1, min(LARGEST, count // BATCHES))
    return [
        part.feeds
        for fitted in found
        for part in (fitted if fitted.fixed else replace(fitted, batch=size)).parts()
        if not fitted.fixed or part.count == fitted.batch
    ]


def _parts(samples: SamplesLike) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """What there is of samples, each part with a name for messages."""
    if isinstance(samples, Mapping):
        yield "samples", samples
    elif not isinstance(samples, str | os.PathLike):
        for number, part in enumerate(samples):
            if not isinstance(part, Mapping):
                kind = type(part).__name__
                raise InvalidData(f"samples {number}: {kind}, expected arrays by names of inputs")
            yield f"samples {number}", part
    elif not os.path.isdir(samples):
        yield os.fspath(samples), read_arrays(samples)
    else:
        yield from _files(Path(samples))


def _files(folder: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Archives one after the other, or an array for each input."""
    archives, arrays = sorted(folder.glob("*.npz")), sorted(folder.glob("*.npy"))
    if bool(archives) == bool(arrays):
        raise InvalidData(
            f"{folder}: expected .npz files, each with an array for every input, or an .npy file "
            "for every input"
        )
    for path in archives:
        yield os.fspath(path), read_arrays(path)
    if arrays:
        yield os.fspath(folder), {path.stem: _array(path) for path in arrays}


def _array(path: Path) -> Array:
    try:
        array: Array = np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise InvalidData(f"{path}: is no numpy array (.npy): {error}") from None
    return array


def _refuse_nan(samples: Samples) -> None:
    for name in samples.inputs:
        array = samples.arrays[name]
        if np.issubdtype(array.dtype, np.inexact) and np.isnan(array).any():
            at = int(np.isnan(array).reshape(len(array), -1).any(1).argmax())
            raise InvalidData(f"{samples.where}: array {name!r} holds NaN in sample {at}")
