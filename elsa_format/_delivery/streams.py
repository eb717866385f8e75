"""Byte streams in numpy: raw, constant, or in a canonical Huffman code (delivery-1.0 §8)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
LONGEST = 12
"""Bits of the longest codeword."""
LENGTHS = (4, 5, 6, 7, 8, 9, 10, 11, 12, 0, 3, 2, 1)
"""The list in which lengths have their places, at first (ELSA-D-038)."""
STRIDE = 64
"""Symbols from one anchor to the next: those between are found for all anchors at once."""


@dataclass
class Fields:
    """A payload, field after field."""

    data: Bytes
    at: int = 0

    def take(self, size: int) -> Bytes:
        """So many bytes."""
        if size > self.data.size - self.at:
            raise ValueError("a payload that ends within a field")
        self.at += size
        return self.data[self.at - size : self.at]

    def byte(self) -> int:
        """One byte."""
        return int(self.take(1)[0])

    def varint(self) -> int:
        """An integer below 2^63, in no more bytes than it needs."""
        number = 0
        for i in range(9):
            byte = self.byte()
            number |= (byte & 127) << 7 * i
            if byte < 128:
                if byte == 0 and i > 0:
                    raise ValueError("a varint with more bytes than it needs")
                return number
        raise ValueError("a varint of 2^63 or more")

    def end(self) -> None:
        """Nothing is left."""
        if self.at != self.data.size:
            raise ValueError("bytes behind the last field")


def varint(number: int) -> bytes:
    """Groups of 7 bits, the lowest first.

    >>> varint(300).hex()
    'ac02'
    """
    out = bytearray()
    while number >= 128:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


def quarters(n: int) -> list[int]:
    """How many of n symbols each of the four bit streams has (ELSA-D-038).

    >>> quarters(10), quarters(5)
    ([3, 3, 3, 1], [2, 2, 1, 0])
    """
    q = -(-n // 4)
    return [min(q, max(0, n - i * q)) for i in range(4)]


def code_lengths(count: NDArray[np.int64]) -> NDArray[np.int64]:
    """The length of the codeword of each symbol, two or more of which occur (ELSA-D-037)."""
    while True:
        symbols = np.flatnonzero(count)
        order = symbols[np.lexsort((symbols, count[symbols]))]
        n = order.size
        weights, parents = count[order].tolist(), [0] * (2 * n - 1)
        leaf, tree = 0, n
        for end in range(n, 2 * n - 1):
            taken = []
            for _ in range(2):
                if leaf < n and (tree == end or weights[leaf] <= weights[tree]):
                    taken.append(leaf)
                    leaf += 1
                else:
                    taken.append(tree)
                    tree += 1
            weights.append(weights[taken[0]] + weights[taken[1]])
            parents[taken[0]] = parents[taken[1]] = end
        depths = [0] * (2 * n - 1)
        for i in range(2 * n - 3, -1, -1):
            depths[i] = depths[parents[i]] + 1
        lengths = np.zeros(256, np.int64)
        lengths[order] = depths[:n]
        if lengths.max() <= LONGEST:
            return lengths
        count = (count + 1) >> 1


def _by_codeword(lengths: NDArray[np.int64]) -> tuple[NDArray[np.intp], NDArray[np.int64]]:
    """The symbols that have a codeword in the order of those, and the first window of each."""
    symbols = np.flatnonzero(lengths)
    order = symbols[np.lexsort((symbols, lengths[symbols]))]
    shares = (1 << LONGEST) >> lengths[order]
    return order, np.cumsum(shares) - shares


def places_of(lengths: Iterable[int]) -> list[int]:
    """Lengths as places in the list: one that occurs moves to the front.

    >>> places_of([5, 5, 4])
    [1, 0, 1]
    """
    known, places = list(LENGTHS), []
    for length in lengths:
        places.append(known.index(length))
        known.insert(0, known.pop(places[-1]))
    return places


def lengths_bits(lengths: NDArray[np.int64]) -> int:
    """The bits that the lengths of a code take in a stream."""
    last = int(np.flatnonzero(lengths)[-1])
    return sum(place + 1 for place in places_of(lengths[: last + 1].tolist()))


def write_stream(data: Bytes) -> bytes:
    """A byte stream as a Writer codes it (ELSA-D-034)."""
    if not data.size:
        return b""
    count = np.bincount(data, minlength=256)
    if np.count_nonzero(count) == 1:
        return bytes([1, data[0]])
    coded = _write_huffman(data, code_lengths(count))
    return b"\2" + coded if len(coded) < data.size else b"\0" + data.tobytes()


def _write_huffman(data: Bytes, lengths: NDArray[np.int64]) -> bytes:
    order, starts = _by_codeword(lengths)
    codes = np.zeros(256, np.int64)
    codes[order] = starts >> (LONGEST - lengths[order])
    last = int(order.max())
    ones = "".join("1" * place + "0" for place in places_of(lengths[: last + 1].tolist()))
    table = np.packbits([bit == "1" for bit in ones], bitorder="little").tobytes()
    streams, at = [], 0
    for size in quarters(data.size):
        part = data[at : at + size]
        at += size
        sizes = lengths[part]
        ends = np.repeat(np.cumsum(sizes), sizes)
        bits = np.repeat(codes[part], sizes) >> (ends - 1 - np.arange(ends.size)) & 1
        streams.append(np.packbits(bits.astype(np.uint8), bitorder="little").tobytes())
    return b"".join([bytes([last]), table, *(varint(len(s)) for s in streams), *streams])


def read_stream(fields: Fields, n: int) -> Bytes:
    """A byte stream of n bytes (ELSA-D-033)."""
    if n == 0:
        return np.empty(0, np.uint8)
    kind = fields.byte()
    if kind == 0:
        return fields.take(n)
    if kind == 1:
        return np.full(n, fields.byte(), np.uint8)
    if kind == 2:
        return _read_huffman(fields, n)
    raise ValueError("a byte stream of unknown type")


def _read_lengths(fields: Fields, count: int) -> list[int]:
    """The lengths of so many symbols (ELSA-D-038)."""
    known, place = list(LENGTHS), 0
    found: list[int] = []
    while True:
        byte = fields.byte()
        for i in range(8):
            if len(found) == count:
                if byte >> i:
                    raise ValueError("unused bits of the lengths are set")
                break
            if byte >> i & 1:
                place += 1
                if place == len(known):
                    raise ValueError("a length that is not in the list")
            else:
                known.insert(0, known.pop(place))
                found.append(known[0])
                place = 0
        if len(found) == count:
            return found


def _read_code(fields: Fields) -> tuple[Bytes, Bytes]:
    """The symbol, and the length of its codeword, for each window of 12 bits (ELSA-D-035)."""
    last = fields.byte()
    lengths = np.zeros(256, np.int64)
    lengths[: last + 1] = _read_lengths(fields, last + 1)
    if lengths[last] == 0:
        raise ValueError("another last symbol than the code has")
    order, _ = _by_codeword(lengths)
    shares = (1 << LONGEST) >> lengths[order]
    if order.size < 2 or shares.sum() != 1 << LONGEST:
        raise ValueError("codewords that do not fill the code")
    symbols = np.repeat(order, shares).astype(np.uint8)
    # Bits come lowest first, codewords highest first: a window is its own index mirrored.
    bits = np.arange(1 << LONGEST)
    mirrored = sum((bits >> i & 1) << (LONGEST - 1 - i) for i in range(LONGEST))
    symbols = symbols[mirrored]
    return symbols, lengths[symbols].astype(np.uint8)


def _read_huffman(fields: Fields, n: int) -> Bytes:
    symbols, lengths = _read_code(fields)
    sizes = [fields.varint() for _ in range(4)]
    parts = []
    for size, count in zip(sizes, quarters(n), strict=True):
        parts.append(_read_bits(fields.take(size), count, symbols, lengths))
    return np.concatenate(parts)


def _read_bits(data: Bytes, n: int, symbols: Bytes, lengths: Bytes) -> Bytes:
    """The n symbols of a bit stream (ELSA-D-039).

    Where a symbol ends is known only when it is read. So for every bit: where the next symbol would
    begin; from that, by doubling, where the one STRIDE further on would; these are followed one by
    one, and the symbols between them for all of them at once.
    """
    if n == 0:
        if data.size:
            raise ValueError("a bit stream that is not as long as its codewords")
        return np.empty(0, np.uint8)
    total = 8 * data.size
    padded = np.concatenate([data, np.zeros(4, np.uint8)]).astype(np.uint32)
    three = padded[:-2] | padded[1:-1] << 8 | padded[2:] << 16
    windows = (three[: data.size, None] >> np.arange(8, dtype=np.uint32) & 0xFFF).reshape(-1)
    # The bit behind the last is where streams that are too short stay.
    following = np.append(np.arange(total) + lengths[windows], total + 1).astype(np.int64)
    following[following > total] = total + 1
    following = np.append(following, total + 1)
    far, step = following, 1
    while step < STRIDE:
        far, step = far[far], 2 * step
    anchors, at = [], 0
    for _ in range(-(-n // STRIDE)):
        anchors.append(at)
        at = int(far[at])
    places = np.empty((len(anchors), STRIDE), np.int64)
    at_all = np.array(anchors)
    for i in range(STRIDE):
        places[:, i] = at_all
        at_all = following[at_all]
    starts = places.reshape(-1)[:n]
    end = int(following[starts[-1]])
    if end > total or total - end >= 8 or starts[-1] >= total:
        raise ValueError("a bit stream that is not as long as its codewords")
    if end % 8 and data[-1] >> end % 8:
        raise ValueError("unused bits of a bit stream are set")
    found: Bytes = symbols[windows[starts]]
    return found
