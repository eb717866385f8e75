"""Payloads in numpy: the reference for the C module, and its replacement (delivery-1.0 §5 to §7).

Words are unsigned; `mantissa` is 0 for dtypes that carry no counters, and `bits` 0 in plain blocks.
A payload that is wrong is a ValueError which says what is wrong.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from elsa_format._delivery.streams import (
    Bytes,
    Fields,
    code_lengths,
    lengths_bits,
    read_stream,
    varint,
    write_stream,
)

Words = NDArray[np.unsignedinteger[Any]]
Flags = NDArray[np.bool_]
STORED = 4
"""The mode of a stored block."""
CHECKSUM = 8
"""Bytes before every payload that is not empty."""
WHOLE = 255
"""The h of words that are not split."""
MOST_BITS = 5
"""Bits of the mantissa in a distance, at most."""


# --- Positions (§6) ------------------------------------------------------------------------------


def _write_positions(taken: Flags) -> bytes:
    """Which of the words that are left are taken, as a Writer chooses the mode (ELSA-D-028)."""
    k, r = int(np.count_nonzero(taken)), taken.size
    if k == r:
        return b"\0"
    mode = 1 if 2 * k <= r else 2
    gaps = np.diff(np.flatnonzero(taken if mode == 1 else ~taken), prepend=-1) - 1
    steps = gaps // 255
    marks = np.cumsum(steps + 1) - 1
    coded = np.full(int(steps.sum()) + gaps.size, 255, np.uint8)
    coded[marks] = gaps % 255
    written = varint(coded.size) + write_stream(coded)
    if len(written) > -(-r // 8):
        return b"\3" + np.packbits(taken, bitorder="little").tobytes()
    return bytes([mode]) + written


def _read_positions(fields: Fields, k: int, r: int) -> Flags:
    """Which of the r words that are left are taken (ELSA-D-025 to ELSA-D-027)."""
    mode = fields.byte()
    if not 1 <= k <= r or (mode == 0 and k != r) or (mode in (1, 2) and k == r):
        raise ValueError("a number of words that does not fit those that are left")
    if mode == 0:
        return np.ones(r, np.bool_)
    if mode == 3:
        packed = fields.take(-(-r // 8))
        if r % 8 and packed[-1] >> r % 8:
            raise ValueError("unused bits of the positions are set")
        flags = np.unpackbits(packed, count=r, bitorder="little").view(np.bool_)
        if np.count_nonzero(flags) != k:
            raise ValueError("another number of bits than of words")
        return flags
    if mode not in (1, 2):
        raise ValueError("positions of unknown mode")
    g = fields.varint()
    if g > r:
        raise ValueError("more gaps than words that are left")
    gaps = read_stream(fields, g)
    marks = gaps != 255
    if g and not marks[-1]:
        raise ValueError("gaps that end with 255")
    ends = np.cumsum(gaps.astype(np.int64) + marks)
    if g and ends[-1] > r:
        raise ValueError("gaps that lead beyond the words that are left")
    if np.count_nonzero(marks) != (k if mode == 1 else r - k):
        raise ValueError("another number of gaps than of words")
    taken = np.full(r, mode == 2)
    taken[ends[marks] - 1] = mode == 1
    return taken


# --- Values (§7) ---------------------------------------------------------------------------------


def _width(words: Words) -> int:
    return 8 * words.dtype.itemsize


def _magnitudes(words: Words) -> Words:
    return words & words.dtype.type((1 << _width(words) - 1) - 1)


def _write_rest(rests: Words, bits: int) -> bytes:
    """The rests of some words, of so many bits each (ELSA-D-030)."""
    planes, above = divmod(bits, 8)
    columns = rests.astype(rests.dtype.newbyteorder("<")).view(np.uint8).reshape(rests.size, -1)
    out = [write_stream(np.ascontiguousarray(columns[:, i])) for i in range(planes)]
    if above:
        flags = np.unpackbits(columns[:, planes : planes + 1], axis=1, bitorder="little")
        out.append(np.packbits(flags[:, :above], bitorder="little").tobytes())
    return b"".join(out)


def _read_rest(fields: Fields, k: int, bits: int, dtype: np.dtype[Any]) -> Words:
    """The rests of k words, of so many bits each."""
    planes, above = divmod(bits, 8)
    columns = np.zeros((k, dtype.itemsize), np.uint8)
    for i in range(planes):
        columns[:, i] = read_stream(fields, k)
    if above:
        packed = fields.take(-(-k * above // 8))
        if k * above % 8 and packed[-1] >> k * above % 8:
            raise ValueError("unused bits of the rest are set")
        flags = np.unpackbits(packed, count=k * above, bitorder="little").reshape(k, above)
        columns[:, planes] = np.packbits(flags, axis=1, bitorder="little")[:, 0]
    return columns.view(dtype.newbyteorder("<")).reshape(k).astype(dtype)


def _distances(table: NDArray[np.int64], top: int) -> NDArray[np.int64]:
    """How often each distance from `top` occurs, if magnitudes up to it occur so often."""
    count = np.zeros(256, np.int64)
    near = table[max(top - 254, 0) : top + 1][::-1]
    count[: near.size] = near
    count[255] = table[: max(top - 254, 0)].sum()
    return count


def _choose_h(words: Words, mantissa: int, bits: int) -> int:
    """The h of a Writer, from one histogram (ELSA-D-032)."""
    if mantissa == 0:
        return WHOLE
    k, width = words.size, _width(words)
    best, found = k * (width - bits), WHOLE
    finest = min(MOST_BITS, mantissa - bits)
    table = np.bincount((_magnitudes(words) >> words.dtype.type(mantissa - finest)).astype(np.intp))
    for h in range(finest, -1, -1):
        count = _distances(table, table.size - 1)
        coded = 0
        if np.count_nonzero(count) > 1:
            lengths = code_lengths(count)
            coded = min(8 * k, int((count * lengths).sum()) + lengths_bits(lengths) + 64)
        cost = coded + k * (mantissa - h - bits + 1) + int(count[255]) * width
        if cost <= best:  # of equal ones the smallest, and any rather than WHOLE
            best, found = cost, h
        table = np.append(table, 0) if table.size % 2 else table
        table = table[::2] + table[1::2]
    return found


def _write_values(words: Words, mantissa: int, bits: int) -> bytes:
    """Words that have one counter."""
    h, width, word = _choose_h(words, mantissa, bits), _width(words), words.dtype.type
    if h == WHOLE:
        return bytes([WHOLE]) + _write_rest(words >> word(bits), width - bits)
    shift = mantissa - h
    magnitudes = _magnitudes(words) >> word(shift)
    top = int(magnitudes.max())
    distances = np.minimum(word(top) - magnitudes, word(255)).astype(np.uint8)
    low = (words & word((1 << shift) - 1)) >> word(bits)
    rests = words >> word(width - 1) << word(shift - bits) | low
    escapes = words[distances == 255].astype(words.dtype.newbyteorder("<")).tobytes()
    coded = [bytes([h]), varint(top), write_stream(distances), escapes]
    return b"".join([*coded, _write_rest(rests, shift - bits + 1)])


def _read_values(
    fields: Fields, k: int, dtype: np.dtype[Any], mantissa: int, bits: int, counter: int
) -> Words:
    """k words with one counter (ELSA-D-029 to ELSA-D-031)."""
    word, width = dtype.type, 8 * dtype.itemsize
    h = fields.byte()
    if h == WHOLE:
        whole: Words = _read_rest(fields, k, width - bits, dtype) << word(bits) | word(counter)
        return whole
    if h > MOST_BITS or mantissa == 0 or h + bits > mantissa:
        raise ValueError("an h that its words cannot have")
    shift = mantissa - h
    top = fields.varint()
    if top >> width - 1 - shift:
        raise ValueError("a top that is no magnitude of its words")
    distances = read_stream(fields, k)
    escaped = distances == 255
    if (distances[~escaped] > top).any():
        raise ValueError("a distance that is larger than the top")
    size = int(np.count_nonzero(escaped)) * dtype.itemsize
    escapes = fields.take(size).view(dtype.newbyteorder("<")).astype(dtype)
    if (escapes & word((1 << bits) - 1) != counter).any():
        raise ValueError("an escape with another counter")
    rests = _read_rest(fields, k, shift - bits + 1, dtype)
    low = (rests & word((1 << shift - bits) - 1)) << word(bits)
    sign = rests >> word(shift - bits) << word(width - 1)
    words: Words = sign | (word(top) - distances.astype(dtype)) << word(shift) | low | word(counter)
    words[escaped] = escapes
    return words


# --- Blocks (§5), with the arguments of the C module ---------------------------------------------


def delivery_memory(n: int, itemsize: int) -> tuple[int, int]:
    """Bytes of scratch memory, which numpy does not use, and of output for a block."""
    size = n * itemsize
    return 0, 2 * size + size // 1024 + n // 8 + 1088


def encode_plain(words: Words, mantissa: int, out: Bytes, scratch: Bytes) -> int:
    """The payload of a plain block; its size."""
    payload = np.frombuffer(_write_values(words, mantissa, 0), np.uint8)
    out[: payload.size] = payload
    return payload.size


def decode_plain(data: Bytes, words: Words, mantissa: int, scratch: Bytes) -> None:
    """The words of a plain block."""
    fields = Fields(data)
    found = _read_values(fields, words.size, words.dtype, mantissa, 0, 0)
    fields.end()
    words[:] = found


def encode_nested(
    words: Words,
    mantissa: int,
    bits: int,
    levels: int,
    out: Bytes,
    sizes: NDArray[np.int64],
    scratch: Bytes,
) -> int:
    """The payloads of a nested block in all parts, one after the other; their size in all."""
    payloads, total, left = [], 0, words
    most = words.nbytes + words.nbytes // 1024 + 64
    counters = words & words.dtype.type((1 << bits) - 1)
    of_left = counters
    for counter in [*range(1, levels + 1), 0]:
        taken = of_left == counter
        payload = b""
        if k := int(np.count_nonzero(taken)):
            values = _write_values(left[taken], mantissa, bits)
            payload = varint(k) + _write_positions(taken) + values
            left, of_left = left[~taken], of_left[~taken]
        payloads.append(payload)
        total += len(payload) + (CHECKSUM if payload else 0)
        if total > most:
            stored = words.astype(words.dtype.newbyteorder("<")).tobytes()
            head = varint(int(np.count_nonzero(counters == 1)))
            payloads = [head + bytes([STORED]) + stored, *[b""] * levels]
            break
    sizes[:] = [len(payload) for payload in payloads]
    joined = np.frombuffer(b"".join(payloads), np.uint8)
    out[: joined.size] = joined
    return joined.size


def decode_nested(
    data: Bytes,
    sizes: NDArray[np.int64],
    first: int,
    words: Words,
    mantissa: int,
    bits: int,
    levels: int,
    scratch: Bytes,
) -> bool:
    """Put in the words with counters from `first` on, `levels` + 1 being the counter 0.

    Words that are left are 0; from `first` = 1 on they need not be so before. Returns whether the
    block is a stored one, which only `first` = 1 can tell.
    """
    if first == 1:
        words[:] = 0
    left, stored, at = np.flatnonzero(words == 0), False, 0
    for level, size in enumerate(sizes.tolist(), first):
        counter = level if level <= levels else 0
        fields = Fields(data[at : at + size])
        at += size
        if not size:
            if counter == 0 and left.size:
                raise ValueError("words that are in no part")
            continue
        k = fields.varint()
        if counter == 1 and fields.data[fields.at : fields.at + 1].tolist() == [STORED]:
            _decode_stored(fields, k, words, bits, levels, first + sizes.size - 1)
            left, stored = left[:0], True
            continue
        if k > left.size or (counter == 0 and k != left.size):
            raise ValueError("another number of words than are left")
        taken = _read_positions(fields, k, left.size)
        values = _read_values(fields, k, words.dtype, mantissa, bits, counter)
        fields.end()
        words[left[taken]] = values
        left = left[~taken]
    return stored


def _decode_stored(
    fields: Fields, k: int, words: Words, bits: int, levels: int, level: int
) -> None:
    """The words of a stored block that the level has; all for the dense network (ELSA-D-022)."""
    fields.at += 1
    if fields.data.size - fields.at != words.nbytes:
        raise ValueError("a stored block of another size")
    found = fields.take(words.nbytes).view(words.dtype.newbyteorder("<")).astype(words.dtype)
    counters = found & found.dtype.type((1 << bits) - 1)
    if np.count_nonzero(counters == 1) != k or counters.max() > levels:
        raise ValueError("other counters than those of a stored block")
    kept = (counters > 0) & (counters <= level) if level <= levels else True
    words[:] = np.where(kept, found, 0)
