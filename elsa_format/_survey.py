"""Nested masks, sampled to a bounded size, and magnitudes by freeze step: what the data tell."""

import base64
import math
import zlib
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elsa_format._container import TensorInfo
from elsa_format._container.dtypes import DTYPES, Dtype
from elsa_format._errors import CounterOutOfRange
from elsa_format._level_reader import LevelReader
from elsa_format._profile import Profile

SIDES = (512, 256)
"""Cells along a side of a picture: the first with which all pictures fit the budget."""
MOST_PICTURES = 64
BUDGET = 3 << 20
"""Compressed bytes that all pictures together may take."""

PER_OCTAVE = 4
SMALLEST, LARGEST = -40, 24
"""Exponents of two between which magnitudes are told apart."""
BINS = (LARGEST - SMALLEST) * PER_OCTAVE


def survey(reader: LevelReader) -> dict[str, Any]:
    """Read the data section once: pictures, magnitudes, and a check of the counters.

    `cells` has a counter in each byte, magnitudes have F64 counts of weights by counter and bin,
    both deflated (zlib), then in base64. Bin b is of magnitudes from 2**((first + b) / per_octave).
    """
    header, profile = reader.network.header, reader.network.profile
    nested = [info for name, info in header.tensors.items() if name in profile.nested]
    side, chosen = choose(nested, profile)
    levels = len(profile.levels)
    whole = np.zeros((levels + 1, BINS), np.int64)
    surveyed: dict[str, tuple[dict[str, Any], NDArray[np.int64]]] = {}
    for info in header.tensors.values():
        if info.name not in profile.nested:
            reader.skip(info)
            continue
        picture = _Picture(info, side) if info.name in chosen else None
        counted = np.zeros((1 << profile.bits, BINS), np.int64)
        position = 0
        for block in reader.blocks(info):
            words = block.view(info.dtype.words)
            counters = (words & words.dtype.type((1 << profile.bits) - 1)).astype(np.uint8)
            counted += count_magnitudes(words, counters, info.dtype, profile.bits)
            if picture:
                picture.take(counters, position)
            position += words.size
        _check(info, counted.sum(1), profile, reader.name)
        whole += counted[: levels + 1]
        if picture:
            surveyed[info.name] = picture.to_json(), counted[: levels + 1].copy()
    reader.finish()
    first, last = _used(whole)
    return {
        "side": side,
        "pictures": {name: picture for name, (picture, _) in surveyed.items()},
        "magnitudes": {
            "per_octave": PER_OCTAVE,
            "first": SMALLEST * PER_OCTAVE + first,
            "bins": last - first,
            "network": _pack(whole[:, first:last].astype("<f8")),
            "layers": {
                name: _pack(counted[:, first:last].astype("<f8"))
                for name, (_, counted) in surveyed.items()
            },
        },
    }


def choose(tensors: Iterable[TensorInfo], profile: Profile) -> tuple[int, set[str]]:
    """The pictures' side and the tensors to picture: the largest, as many as the budget allows."""
    largest = sorted((info for info in tensors if info.elements), key=lambda info: -info.elements)
    largest = largest[:MOST_PICTURES]
    for side in SIDES:
        sizes = [_expected_size(info, profile, side) for info in largest]
        if sum(sizes) <= BUDGET:
            break
    within = np.cumsum(sizes) <= BUDGET if sizes else np.empty(0, bool)
    return side, {info.name for info, fits in zip(largest, within, strict=True) if fits}


def _expected_size(info: TensorInfo, profile: Profile, side: int) -> float:
    """About the compressed bytes of a picture: its entropy, which the header's counts tell."""
    steps = np.diff([0, *profile.nested[info.name], info.elements]) / info.elements
    steps = steps[steps > 0]
    bits = float(-(steps * np.log2(steps)).sum())
    rows, cols = picture_shape(info.shape)[:2]
    return min(rows, side) * min(cols, side) * (bits * 1.3 + 0.1) / 8


def picture_shape(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Rows and columns of the squarest matrix a tensor folds into, and the axes that are rows.

    >>> picture_shape((3, 3, 64, 128)), picture_shape((10,)), picture_shape(())
    ((576, 128, 3), (1, 10, 0), (1, 1, 0))
    """
    if len(shape) < 2:
        return 1, math.prod(shape), 0
    splits = [(math.prod(shape[:at]), math.prod(shape[at:]), at) for at in range(1, len(shape))]
    return min(splits, key=lambda split: max(split[0], split[1]))


class _Picture:
    """Counters of one tensor, a cell for each weight or for one of a block of weights.

    A cell shows a weight drawn from its block, so every colour has the share that it has among the
    weights. A fixed place in the block would alias with N:M patterns.
    """

    def __init__(self, info: TensorInfo, side: int) -> None:
        self.rows, self.cols, self.split = picture_shape(info.shape)
        self.height, self.width = min(self.rows, side), min(self.cols, side)
        random = np.random.default_rng(0)
        shape = (self.height, self.width)
        row = _draw(random, self.rows, self.height, shape, 0)
        col = _draw(random, self.cols, self.width, shape, 1)
        places = (row * self.cols + col).reshape(-1)
        self.order = places.argsort()
        self.places = places[self.order]
        self.cells = np.zeros(places.size, np.uint8)

    def take(self, counters: NDArray[np.uint8], position: int) -> None:
        """Fill the cells of the weights from a position on."""
        start, stop = np.searchsorted(self.places, [position, position + counters.size])
        self.cells[self.order[start:stop]] = counters[self.places[start:stop] - position]

    def to_json(self) -> dict[str, Any]:
        """What is needed to draw it."""
        return {
            "rows": self.rows,
            "cols": self.cols,
            "split": self.split,
            "height": self.height,
            "width": self.width,
            "cells": _pack(self.cells),
        }


def _draw(
    random: np.random.Generator, weights: int, cells: int, shape: tuple[int, int], axis: int
) -> NDArray[np.int64]:
    """For every cell a coordinate inside its block along one axis."""
    edges = np.arange(cells + 1) * weights // cells
    form = (-1, 1) if axis == 0 else (1, -1)
    low, high = edges[:-1].reshape(form), edges[1:].reshape(form)
    return random.integers(low, high, shape)


def count_magnitudes(
    words: NDArray[Any], counters: NDArray[np.uint8], dtype: Dtype, bits: int
) -> NDArray[np.int64]:
    """Weights by counter and by magnitude in quarters of an octave, from the bit patterns."""
    if dtype.name == "F16":  # F32 holds its denormals as normal numbers
        dtype, words = DTYPES["F32"], words.view(np.float16).astype(np.float32).view(np.uint32)
    unsigned = words.dtype.type
    key = words & unsigned((1 << (dtype.size - 1)) - 1)
    exponent = (key >> unsigned(dtype.mantissa)).astype(np.int32)
    fraction = key & unsigned((1 << dtype.mantissa) - 1)
    bias = dtype.infinity >> (dtype.mantissa + 1)
    bins = (exponent - (bias + SMALLEST)) * PER_OCTAVE
    for quarter in range(1, PER_OCTAVE):
        edge = round((2 ** (quarter / PER_OCTAVE) - 1) * (1 << dtype.mantissa))
        bins += fraction >= unsigned(edge)
    np.clip(bins, 0, BINS - 1, out=bins)
    bins += counters.astype(np.int32) * BINS
    return np.bincount(bins, minlength=BINS << bits).reshape(-1, BINS)


def _check(info: TensorInfo, counts: NDArray[np.int64], profile: Profile, where: str) -> None:
    """Raise if the data are not what the profile says of them."""
    levels = len(profile.levels)
    if counts[levels + 1 :].any():
        top = int(counts.nonzero()[0][-1])
        raise CounterOutOfRange(
            f"{where}: tensor {info.name!r}: counter {top}, expected 0..{levels}"
        )
    profile.check_counts(info.name, counts.tolist(), where)


def _used(counted: NDArray[np.int64]) -> tuple[int, int]:
    """The range of bins that hold anything."""
    filled = np.flatnonzero(counted.any(0))
    return (int(filled[0]), int(filled[-1]) + 1) if filled.size else (0, 1)


def _pack(array: NDArray[Any]) -> str:
    """Bytes in JSON: deflated (zlib), then base64.

    Runs are all that repeats in a mask. Looking for no more is 8 times as fast as zlib's default,
    and the result is smaller.
    """
    deflate = zlib.compressobj(6, zlib.DEFLATED, zlib.MAX_WBITS, 9, zlib.Z_RLE)
    return base64.b64encode(deflate.compress(array.tobytes()) + deflate.flush()).decode()
