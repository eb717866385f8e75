"""Counters in the low bits of arrays (spec §4). All arithmetic is on bit patterns."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from elsa_format import _kernels
from elsa_format._container import check_out
from elsa_format._container.dtypes import Dtype, of_array
from elsa_format._errors import BitsTooWide, CounterOutOfRange, FormatError, NonFinite, ZeroFrozen
from elsa_format._options import check_int, one_of

MAX_BITS = 8
MAX_LEVELS = 2**MAX_BITS - 1

Words = NDArray[Any]

Rounding = Literal["nearest", "overwrite"]
ROUNDINGS: tuple[Rounding, ...] = get_args(Rounding)


def bits_for(levels: int) -> int:
    """τ = ⌈log₂(T+1)⌉, the counter bits that T levels need.

    >>> [bits_for(t) for t in (1, 3, 4, 50, 255)]
    [1, 2, 3, 6, 8]
    """
    return levels.bit_length()


def words_of(array: NDArray[Any], dtype: Dtype) -> NDArray[Any]:
    """The elements' bit patterns, flat; shares memory with a contiguous array."""
    return np.ascontiguousarray(array).reshape(-1).view(dtype.words)


def nestable_dtype(array: NDArray[Any], bits: int) -> Dtype:
    """The dtype of an array that can carry counters of this many bits."""
    dtype = of_array(array.dtype)
    check_bits(dtype, bits)
    return dtype


def check_bits(dtype: Dtype, bits: int, where: str = "") -> None:
    """Refuse counters that the dtype cannot carry."""
    bits = check_int("bits", bits, low=0)
    prefix = f"{where}: " if where else ""
    if not 1 <= bits <= MAX_BITS:
        raise BitsTooWide(f"{prefix}{bits}-bit counters, expected 1..{MAX_BITS} bits")
    if bits > dtype.mantissa:
        raise BitsTooWide(
            f"{prefix}{bits}-bit counters do not fit {dtype.name}, "
            f"which has {dtype.mantissa} mantissa bits"
        )


def read_counters(weights: NDArray[Any], bits: int) -> NDArray[np.uint8]:
    """The counter of each weight: its freeze step, or 0 for dense-only weights.

    >>> read_counters(np.array([1.0, 1.0000001], np.float32), bits=2).tolist()
    [0, 1]
    """
    weights = np.asarray(weights)
    dtype = nestable_dtype(weights, bits)
    low = words_of(weights, dtype) & dtype.words.type((1 << bits) - 1)
    counters: NDArray[np.uint8] = low.astype(np.uint8).reshape(weights.shape)
    return counters


def mask_level(
    weights: NDArray[Any], bits: int, level: int, *, out: NDArray[Any] | None = None
) -> NDArray[Any]:
    """The weights of one level: 0 < counter ≤ level, bits untouched, the rest +0.

    They are written to `out`, if that is given; it may be the weights themselves.

    >>> weights = embed_counters(np.array([1.0, 2.0, 3.0], np.float32), np.array([1, 0, 2]), bits=2)
    >>> mask_level(weights, bits=2, level=1).nonzero()[0].tolist()
    [0]
    """
    weights = np.asarray(weights)
    result = np.empty(weights.shape, weights.dtype) if out is None else out
    mask_into(weights, result, bits, level)
    return result


def mask_into(weights: NDArray[Any], out: NDArray[Any], bits: int, level: int) -> int:
    """Write the weights of one level to `out`, as `mask_level` does; return their number."""
    dtype = nestable_dtype(weights, bits)
    level = check_int("level", level, low=1, high=(1 << bits) - 1)
    check_out(out, weights.dtype, weights.shape)
    return int(_kernels.mask(words_of(weights, dtype), words_of(out, dtype), bits, level))


def embed_counters(
    weights: NDArray[Any], counters: NDArray[Any], bits: int, *, rounding: Rounding = "nearest"
) -> NDArray[Any]:
    """Weights that carry the counters.

    `nearest` moves each weight to the closest value with its counter; `overwrite` replaces the low
    bits, as the paper does.

    >>> weights = embed_counters(np.array([0.1, -0.2], np.float32), np.array([1, 3]), bits=2)
    >>> read_counters(weights, bits=2).tolist()
    [1, 3]
    """
    weights, counters = np.asarray(weights), np.asarray(counters)
    dtype = nestable_dtype(weights, bits)
    rounding = one_of("rounding", rounding, ROUNDINGS)
    if counters.dtype.kind not in "iu":
        raise TypeError(f"counters of dtype {counters.dtype}, expected integers")
    if counters.shape != weights.shape:
        raise ValueError(f"counters of shape {counters.shape} for weights of shape {weights.shape}")
    if counters.size and not 0 <= counters.min() <= counters.max() < 1 << bits:
        raise CounterOutOfRange(f"counters {counters.min()}..{counters.max()} in {bits} bits")
    steps = np.ascontiguousarray(counters, np.uint8).reshape(-1)
    result = np.empty(weights.shape, weights.dtype)
    embedding = Embedding(dtype, bits, (1 << bits) - 1, rounding)
    embedding.embed(words_of(weights, dtype), steps, words_of(result, dtype), "weights")
    return result


@dataclass(frozen=True)
class Embedding:
    """How counters enter the weights of a tensor."""

    dtype: Dtype
    bits: int
    levels: int
    """The largest counter."""
    rounding: Rounding

    def embed(
        self,
        words: NDArray[Any],
        counters: NDArray[np.uint8],
        result: NDArray[Any],
        where: str,
        *,
        first: int = 0,
    ) -> None:
        """Embed the counters of some words, or raise as `refuse_unpackable` does."""
        nearest, infinity = self.rounding == "nearest", self.dtype.infinity
        if _kernels.embed(words, counters, result, self.bits, infinity, self.levels, nearest) >= 0:
            refuse_unpackable(words, counters, self.dtype, self.levels, where, first=first)


def refuse_unpackable(
    words: NDArray[Any],
    counters: NDArray[np.uint8] | None,
    dtype: Dtype,
    levels: int,
    where: str,
    *,
    first: int = 0,
) -> None:
    """Raise for the first weight that cannot be stored; `first` is its offset in the tensor."""
    at = _kernels.find_unpackable(words, counters, dtype.infinity, levels)
    if at < 0:
        return
    assert dtype.numpy is not None
    value = words[at : at + 1].view(dtype.numpy)[0]
    magnitude = int(words[at]) & (2 ** (dtype.size - 1) - 1)
    kind: type[FormatError]
    if magnitude >= dtype.infinity:
        kind, problem = NonFinite, f"is {value}, which cannot carry a counter"
    elif counters is not None and counters[at] > levels:
        kind, problem = CounterOutOfRange, f"has counter {counters[at]}, expected 0..{levels}"
    else:
        counter = 0 if counters is None else counters[at]
        kind, problem = ZeroFrozen, f"is zero but has counter {counter}"
    raise kind(f"{where}: weight {first + at} {problem}")


# --- Which words a level keeps ---------------------------------------------------------------

NOT_ZERO = 0
"""In place of the counters' bits: a level file does not tell them, and what is not kept is zero."""


def count_kept(words: Words, bits: int, level: int) -> int:
    """How many words a level keeps."""
    if bits == NOT_ZERO:
        return int(np.count_nonzero(words))
    return int(_kernels.count(words, bits)[1 : level + 1].sum())


def compact(words: Words, bits: int, level: int, bitmask: NDArray[np.uint8], values: Words) -> int:
    """Write a bit for each word, and the kept words; return how many."""
    if bits != NOT_ZERO:
        return _kernels.compact(words, bits, level, bitmask, values)
    return _copy_kept(words, values, _kernels.compact(_flags(words), 1, 1, bitmask, values))


def csr(
    words: Words,
    bits: int,
    level: int,
    place: tuple[int, int, int],
    parts: tuple[NDArray[Any], NDArray[Any], Words],
) -> int:
    """Write row ends, columns and values of the kept words of a block; return how many.

    The place is the column that the block starts in, their number, and the words kept before it.
    """
    if bits != NOT_ZERO:
        return _kernels.csr(words, bits, level, *place, *parts)
    return _copy_kept(words, parts[2], _kernels.csr(_flags(words), 1, 1, *place, *parts))


def _flags(words: Words) -> Words:
    """Words with a counter of one bit: whether there is anything to keep."""
    flags: Words = (words != 0).astype(words.dtype)
    return flags


def _copy_kept(words: Words, values: Words, kept: int) -> int:
    values[:kept] = words[words != 0]
    return kept
