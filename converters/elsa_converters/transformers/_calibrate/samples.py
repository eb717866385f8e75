"""Samples for the model of a directory: text, or the arguments themselves, in batches."""

import os
from collections.abc import Iterable, Mapping
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from elsa_converters._errors import InvalidData
from elsa_converters._numpy import read_numpy
from elsa_converters.transformers._calibrate.text import Text, find_texts, read_texts
from elsa_converters.transformers._calibrate.tokens import tokenize
from elsa_format import InvalidOption
from elsa_format.plugins import CalibrationOptions

SamplesLike = str | os.PathLike[str] | Iterable[Any]
Array = NDArray[Any]
SAMPLES, LENGTH = 128, 128
"""Of text, unless told otherwise: together they are as many tokens as are looked at of a layer."""
BATCHES, LARGEST = 16, 32
"""Into how many batches samples are cut, and how many a batch holds at most."""


def read_batches(
    samples: SamplesLike, folder: Path, model: nn.Module, options: CalibrationOptions
) -> list[Any]:
    """The arguments of each run of a model."""
    if isinstance(samples, str | os.PathLike):
        if (arrays := _arrays(samples)) is not None:
            _refuse_length(options)
            return _cut(arrays, model, options.samples)
        texts = read_texts(
            find_texts(samples, options.length or LENGTH), options.samples or SAMPLES
        )
    else:
        given = list(samples)
        if not given or not all(isinstance(sample, str) for sample in given):
            _refuse_length(options)
            return given
        texts = [Text(text) for text in given[: options.samples or SAMPLES]]
    return tokenize(texts, folder, model, options.length or LENGTH, batch_size(len(texts)))


def _refuse_length(options: CalibrationOptions) -> None:
    if options.length is not None:
        raise InvalidOption("the samples are no text", "{length} needs text")


def batch_size(count: int) -> int:
    """How many of so many samples a batch holds."""
    return max(1, min(LARGEST, count // BATCHES))


# --- Arrays ---------------------------------------------------------------------------------------


def _arrays(given: str | os.PathLike[str]) -> Mapping[str, Array] | None:
    """The arrays of a file, or of .npy files in a directory, if they are that; "" is the first."""
    path = Path(given)
    if path.is_dir():
        named: dict[str, Array] = {}
        for file in sorted(path.glob("*.npy")):
            named |= _named(file, file.stem)
        return named or None
    return _named(path, "") if path.suffix in (".npy", ".npz") else None


def _named(path: Path, name: str) -> Mapping[str, Array]:
    """The arrays of an archive, or an array under this name."""
    found = read_numpy(path)
    return {name: found} if isinstance(found, np.ndarray) else found


def _cut(arrays: Mapping[str, Array], model: nn.Module, limit: int | None) -> list[Any]:
    """The arrays as batches of arguments."""
    accepted = list(signature(model.forward).parameters)
    main = getattr(model, "main_input_name", accepted[0])
    found = {name or main: array for name, array in arrays.items()}
    if unknown := found.keys() - set(accepted):
        raise InvalidData(
            f"samples: array {min(unknown)!r} is no argument of the model; "
            f"it takes {', '.join(accepted[:8])}"
        )
    counts = {len(array) if array.ndim else 0 for array in found.values()}
    if len(counts) != 1:
        raise InvalidData(f"samples: arrays hold {min(counts)} and {max(counts)} samples")
    count = min(counts.pop(), limit or 1 << 62)
    size, dtype = batch_size(count), next(model.parameters()).dtype
    tensors = {name: _tensor(name, array[:count], dtype) for name, array in found.items()}
    return [
        {name: tensor[at : at + size] for name, tensor in tensors.items()}
        for at in range(0, count, size)
    ]


def _tensor(name: str, array: Array, dtype: torch.dtype) -> Tensor:
    """An array as the model takes it: floats in its dtype."""
    if np.issubdtype(array.dtype, np.floating):
        if np.isnan(array).any():
            raise InvalidData(f"samples: array {name!r} holds NaN")
        return torch.from_numpy(array.astype(np.float32)).to(dtype)
    if array.dtype.kind not in "iub":
        raise InvalidData(f"samples: array {name!r} is {array.dtype}, expected real numbers")
    return torch.from_numpy(array)
