"""The kernels in numpy: the reference for the C module, and its replacement where it is missing.

Every function works in blocks that fit the cache: whole-array numpy costs twice as much and needs
temporaries as large as the tensor. Arguments are C-contiguous arrays; weights are viewed as
unsigned words of their width. A wrong type is a TypeError, a wrong value a ValueError.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.unsignedinteger[Any]]
Indices = NDArray[np.signedinteger[Any]]

_MAX_SIZE = (1 << 63) - 1
_BLOCK = 1 << 15  # words; a multiple of 8, so that a block starts on a whole byte of the bitmask
_WORDS = tuple(np.dtype(t) for t in (np.uint16, np.uint32, np.uint64))
_INDICES = tuple(np.dtype(t) for t in (np.int32, np.int64))
_U8, _U64, _I64 = ((np.dtype(t),) for t in (np.uint8, np.uint64, np.int64))


def mask(src: Words, dst: Words, bits: int, level: int) -> int:
    """Copy the words that `level` keeps, zero the others; return how many; `dst` may be `src`."""
    _check_array("src", src, _WORDS)
    _check_array("dst", dst, (src.dtype,), size=src.size, writable=True)
    _check_level(bits, level)
    _check_same_or_disjoint(src, dst)
    total = 0
    for part in _blocks(src.size):
        kept = _kept(src[part], bits, level)
        total += int(np.count_nonzero(kept))
        np.multiply(src[part], kept, out=dst[part])
    return total


def count(src: Words, bits: int, out: NDArray[np.int64]) -> None:
    """Add to `out[c]` the number of words whose counter is c."""
    _check_array("src", src, _WORDS)
    _check_range("bits", bits, 1, 8)
    _check_array("out", out, _I64, size=1 << bits, writable=True)
    _check_disjoint(out, src)
    low = src.dtype.type((1 << bits) - 1)
    for part in _blocks(src.size):
        out += np.bincount((src[part] & low).astype(np.intp), minlength=out.size)


def compact(src: Words, bits: int, level: int, bitmask: NDArray[np.uint8], values: Words) -> int:
    """Write the bitmask of the kept words and their values; return how many were kept.

    What `values` holds past them is undefined.
    """
    _check_array("src", src, _WORDS)
    _check_array("bitmask", bitmask, _U8, size=-(-src.size // 8), writable=True)
    _check_array("values", values, (src.dtype,), writable=True)
    _check_level(bits, level)
    _check_disjoint(bitmask, src, values)
    _check_disjoint(values, src)
    used = 0
    for part in _blocks(src.size):
        kept = _kept(src[part], bits, level)
        packed = np.packbits(kept, bitorder="little")
        bitmask[part.start // 8 :][: packed.size] = packed
        found = src[part][kept]
        if found.size > values.size - used:
            raise ValueError(f"values: room for {values.size}, more are kept")
        values[used : used + found.size] = found
        used += found.size
    return used


def csr(
    src: Words,
    bits: int,
    level: int,
    start: int,
    cols: int,
    kept: int,
    indptr: Indices,
    indices: Indices,
    values: Words,
) -> int:
    """Write columns and values of the kept words of one block of a matrix; return how many.

    `src` holds the elements from `start` on of a row-major matrix with `cols` columns, and `kept`
    words were kept before it. `indptr[r + 1]` is set for every row r that ends in this block.
    What `indices` and `values` hold past the kept words is undefined.
    """
    _check_array("src", src, _WORDS)
    _check_array("indptr", indptr, _INDICES, writable=True)
    _check_array("indices", indices, (indptr.dtype,), writable=True)
    _check_array("values", values, (src.dtype,), writable=True)
    _check_level(bits, level)
    largest = np.iinfo(indptr.dtype).max
    _check_range("cols", cols, 0, int(largest))
    _check_range("start", start, 0, _MAX_SIZE)
    _check_range("kept", kept, 0, int(largest))
    if indptr.size < 1 or start + src.size > (indptr.size - 1) * cols:
        raise ValueError(f"src: elements {start}..{start + src.size} are not all in the matrix")
    for array, others in ((indptr, (indices, values, src)), (indices, (values, src))):
        _check_disjoint(array, *others)
    _check_disjoint(values, src)
    room = min(indices.size, values.size, int(largest) - kept)
    used = 0
    for part in _blocks(src.size):
        inside = np.flatnonzero(_kept(src[part], bits, level))
        if inside.size > room - used:
            raise ValueError(f"indices, values: room for {room}, more are kept")
        first, stop = start + part.start, start + part.stop
        ended = np.arange(first // cols + 1, stop // cols + 1, dtype=np.int64)
        indptr[ended] = kept + used + np.searchsorted(inside, ended * cols - first)
        indices[used : used + inside.size] = (inside + first) % cols
        values[used : used + inside.size] = src[part][inside]
        used += inside.size
    return used


def expand(bitmask: NDArray[np.uint8], values: Words, dst: Words) -> int:
    """Put the values where the bitmask is set and zero elsewhere; return how many were used."""
    _check_array("dst", dst, _WORDS, writable=True)
    _check_array("bitmask", bitmask, _U8, size=-(-dst.size // 8))
    _check_array("values", values, (dst.dtype,))
    _check_disjoint(dst, bitmask, values)
    if dst.size % 8 and bitmask[-1] >> (dst.size % 8):
        raise ValueError("bitmask: a bit past the last element is set")
    used = 0
    for part in _blocks(dst.size):
        packed = bitmask[part.start // 8 : -(-part.stop // 8)]
        kept = np.unpackbits(packed, count=part.stop - part.start, bitorder="little")
        found = np.flatnonzero(kept)
        if found.size > values.size - used:
            raise ValueError(f"values: {values.size} are too few for the bitmask")
        dst[part] = 0
        dst[part][found] = values[used : used + found.size]
        used += found.size
    return used


def expand_csr(indptr: Indices, indices: Indices, values: Words, cols: int, dst: Words) -> None:
    """Fill the whole matrix `dst` from its CSR form, which is checked."""
    _check_array("dst", dst, _WORDS, writable=True)
    _check_array("indptr", indptr, _INDICES)
    _check_array("indices", indices, (indptr.dtype,))
    _check_array("values", values, (dst.dtype,), size=indices.size)
    _check_range("cols", cols, 0, _MAX_SIZE)
    if indptr.size < 1 or (indptr.size - 1) * cols != dst.size:
        raise ValueError(f"dst: {dst.size} words, not {indptr.size - 1} rows x {cols} columns")
    _check_disjoint(dst, indptr, indices, values)
    if indptr[0] != 0 or indptr[-1] != indices.size or np.any(indptr[1:] < indptr[:-1]):
        raise ValueError(f"indptr: does not rise from 0 to {indices.size}")
    dst[:] = 0
    last = -1
    for part in _blocks(indices.size):
        column = indices[part].astype(np.int64)
        if column.min() < 0 or column.max() >= cols:
            raise ValueError(f"indices: a column is not in 0..{cols - 1}")
        row = np.searchsorted(indptr, np.arange(part.start, part.stop), side="right") - 1
        place = row.astype(np.int64) * cols + column
        if place[0] <= last or np.any(place[1:] <= place[:-1]):
            raise ValueError("indices: columns do not rise within a row")
        last = int(place[-1])
        dst[place] = values[part]


def embed(
    src: Words,
    counters: NDArray[np.uint8],
    dst: Words,
    bits: int,
    inf: int,
    levels: int,
    nearest: bool,
) -> int:
    """Put the counters into the low bits, to the nearest such weight or by plain overwriting.

    `inf` is the bit pattern of +Inf, which rounding up must not reach. Return what
    `find_unpackable` does; unless that is -1, what `dst` holds is undefined.
    """
    _check_array("src", src, _WORDS)
    _check_array("counters", counters, _U8, size=src.size)
    _check_array("dst", dst, (src.dtype,), size=src.size, writable=True)
    _check_range("bits", bits, 1, 8)
    _check_inf(src, inf)
    _check_range("levels", levels, 0, (1 << bits) - 1)
    _check_disjoint(dst, src, counters)
    if (at := find_unpackable(src, counters, inf, levels)) >= 0:
        return at
    word = src.dtype.type
    half, low_bits = word(1 << (bits - 1)), word((1 << bits) - 1)
    sign = word(1 << (8 * src.itemsize - 1))
    for part in _blocks(src.size):
        counter = counters[part].astype(src.dtype)
        if not nearest:
            dst[part] = (src[part] & ~low_bits) | counter
            continue
        magnitude = src[part] & ~sign
        # Ties go to the smaller magnitude: up only beyond half a step. Below zero wraps round.
        nearby = ((magnitude - counter + (half - word(1))) & ~low_bits) + counter
        here = (magnitude & ~low_bits) + counter
        dst[part] = (src[part] & sign) | np.where(nearby < word(inf), nearby, here)
    return -1


def find_unpackable(src: Words, counters: NDArray[np.uint8] | None, inf: int, levels: int) -> int:
    """Return the first index that can't be packed, or -1.

    That is a word that is not finite, a zero with a counter, or a counter above `levels`.
    """
    _check_array("src", src, _WORDS)
    if counters is not None:
        _check_array("counters", counters, _U8, size=src.size)
    _check_inf(src, inf)
    _check_range("levels", levels, 0, 255)
    absolute = _absolute(src)
    for part in _blocks(src.size):
        key = src[part] & absolute
        bad = key >= src.dtype.type(inf)
        if counters is not None:
            counter = counters[part]
            bad |= (counter > levels) | ((counter > 0) & (key == 0))
        first = int(bad.argmax())
        if bad[first]:
            return int(part.start) + first
    return -1


def nest(dense: Words, sparse: Words, level: int, counters: NDArray[np.uint8]) -> int:
    """Set to `level` the counters, 0 so far, of the words that `sparse` keeps.

    Return the first index that is not nested, or -1: a kept word that differs from the dense one,
    or a zero whose counter is set. Which counters were set then is undefined.
    """
    _check_array("dense", dense, _WORDS)
    _check_array("sparse", sparse, (dense.dtype,), size=dense.size)
    _check_range("level", level, 1, 255)
    _check_array("counters", counters, _U8, size=dense.size, writable=True)
    _check_disjoint(counters, dense, sparse)
    absolute = _absolute(dense)
    for part in _blocks(dense.size):
        counter = counters[part]
        kept = (sparse[part] & absolute) != 0
        bad = np.where(kept, sparse[part] != dense[part], counter > 0)
        first = int(bad.argmax())
        if bad[first]:
            return int(part.start) + first
        counter[kept & (counter == 0)] = level
    return -1


def histogram(
    src: Words, shift: int, width: int, prefixes: NDArray[np.uint64], out: NDArray[np.uint64]
) -> None:
    """Add up, for each prefix j, the next `width` bits of the magnitudes that begin with it.

    A magnitude is the word without its sign; `out[j, digit]` counts those whose bits above
    `shift + width` are `prefixes[j]` and whose `width` bits from `shift` on are `digit`.
    """
    _check_array("src", src, _WORDS)
    _check_range("width", width, 1, 24)
    _check_range("shift", shift, 0, 8 * src.itemsize - width)
    _check_array("prefixes", prefixes, _U64)
    _check_array("out", out, _U64, size=prefixes.size << width, writable=True, ndim=2)
    if out.shape != (prefixes.size, 1 << width):
        raise ValueError(f"out: {out.shape}, expected {(prefixes.size, 1 << width)}")
    if np.any(prefixes[1:] <= prefixes[:-1]):
        raise ValueError("prefixes: not sorted and unique")
    _check_disjoint(out, src, prefixes)
    if not prefixes.size:
        return
    flat = out.reshape(-1)
    absolute = _absolute(src)
    digit_bits = np.uint64((1 << width) - 1)
    for part in _blocks(src.size):
        key = (src[part] & absolute).astype(np.uint64)
        high = key >> np.uint64(shift + width)
        row = np.minimum(np.searchsorted(prefixes, high), prefixes.size - 1)
        hit = prefixes[row] == high
        digit = (key[hit] >> np.uint64(shift)) & digit_bits
        np.add.at(flat, (row[hit] << width) + digit.astype(np.intp), np.uint64(1))


def assign(
    src: Words,
    thresholds: NDArray[np.uint64],
    ties: NDArray[np.int64],
    counters: NDArray[np.uint8],
) -> None:
    """Set each counter to the first level whose threshold the magnitude passes, or to 0.

    A magnitude passes threshold t if it is larger, or equal while `ties[t]` is positive; every
    budget from that level on whose threshold it equals is then reduced. Zero never passes.
    """
    _check_array("src", src, _WORDS)
    _check_array("thresholds", thresholds, _U64)
    _check_range("number of thresholds", thresholds.size, 1, 255)
    _check_array("ties", ties, _I64, size=thresholds.size, writable=True)
    _check_array("counters", counters, _U8, size=src.size, writable=True)
    _check_disjoint(counters, src, thresholds, ties)
    _check_disjoint(ties, src, thresholds)
    if np.any(thresholds[1:] > thresholds[:-1]):
        raise ValueError("thresholds: they rise")
    rising = thresholds[::-1]
    # Number of thresholds >= the magnitude -> counter; below all of them there is none.
    number = np.append(np.arange(1, thresholds.size + 1), 0).astype(np.uint8)
    absolute = _absolute(src)
    for part in _blocks(src.size):
        key = (src[part] & absolute).astype(np.uint64)
        above = np.searchsorted(rising, key)
        counters[part] = number[thresholds.size - above]
        equal = rising[np.minimum(above, thresholds.size - 1)] == key
        equal &= key != 0
        for value in np.unique(key[equal]):
            _share_ties(
                np.flatnonzero(key == value) + part.start, value, thresholds, ties, counters
            )


def _share_ties(
    places: NDArray[np.intp],
    value: np.uint64,
    thresholds: NDArray[np.uint64],
    ties: NDArray[np.int64],
    counters: NDArray[np.uint8],
) -> None:
    """Give the weights that equal a threshold to its levels, in order, while budgets last."""
    tied = np.flatnonzero(thresholds == value)
    for level in tied:
        given = places[: max(int(ties[level]), 0)]
        counters[given] = level + 1
        ties[level : tied[-1] + 1] -= given.size
        places = places[given.size :]


def _blocks(size: int) -> Iterator[slice]:
    for start in range(0, size, _BLOCK):
        yield slice(start, min(start + _BLOCK, size))


def _kept(words: Words, bits: int, level: int) -> NDArray[np.bool_]:
    # Counter 0 wraps round to the largest word, so that one comparison decides.
    word = words.dtype.type
    return ((words & word((1 << bits) - 1)) - word(1)) < word(level)


def _absolute(words: Words) -> np.unsignedinteger[Any]:
    return words.dtype.type((1 << (8 * words.itemsize - 1)) - 1)


def _check_array(
    name: str,
    array: NDArray[Any],
    dtypes: tuple[np.dtype[Any], ...],
    *,
    size: int | None = None,
    writable: bool = False,
    ndim: int = 1,
) -> None:
    if not isinstance(array, np.ndarray) or array.dtype not in dtypes:
        expected = "/".join(str(dtype) for dtype in dtypes)
        raise TypeError(f"{name}: expected an array of {expected}")
    if array.ndim != ndim or not array.flags.c_contiguous:
        raise ValueError(f"{name}: expected a contiguous {ndim}-dimensional array")
    if size is not None and array.size != size:
        raise ValueError(f"{name}: {array.size} elements, expected {size}")
    if writable and not array.flags.writeable:
        raise ValueError(f"{name}: is read-only")


def _check_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= operator.index(value) <= high:
        raise ValueError(f"{name}: {value} is not in {low}..{high}")


def _check_level(bits: int, level: int) -> None:
    _check_range("bits", bits, 1, 8)
    _check_range("level", level, 1, (1 << bits) - 1)


def _check_inf(words: Words, inf: int) -> None:
    _check_range("inf", inf, 1, int(_absolute(words)))


def _check_disjoint(written: NDArray[Any], *others: NDArray[Any]) -> None:
    # Exact for contiguous arrays: comparing the bounds is enough.
    if any(np.may_share_memory(written, other) for other in others):
        raise ValueError("an output overlaps another argument")


def _check_same_or_disjoint(src: Words, dst: Words) -> None:
    if src.__array_interface__["data"][0] != dst.__array_interface__["data"][0]:
        _check_disjoint(dst, src)
