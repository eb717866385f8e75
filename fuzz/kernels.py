"""The C kernels against numpy: the same result, or the same kind of refusal, for any arguments.

Built with AddressSanitizer (`make asan`), an access out of bounds ends the process.
"""

import importlib
from typing import Any

import numpy as np
from internals import _pure

NAMES = (
    *("mask", "count", "compact", "csr", "expand", "expand_csr", "embed"),
    *("find_unpackable", "nest", "histogram", "assign"),
)


try:
    NATIVE: Any = importlib.import_module("elsa_format._native")
except ImportError:
    NATIVE = None


class Choices:
    """Decisions out of bytes; zeros once they run out."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def byte(self) -> int:
        """The next byte."""
        self.at += 1
        return self.data[self.at - 1] if self.at <= len(self.data) else 0

    def integer(self, small: int) -> int:
        """Mostly 0..small, sometimes something extreme."""
        first = self.byte()
        if first >= 250:
            return (-1, 2**31 - 1, 2**31, 2**63 - 1, 2**63, 2**64)[first - 250]
        return first % (small + 1)

    def array(self, dtype: Any, size: int) -> np.ndarray:
        """An array whose content is the next bytes, repeated."""
        width = np.dtype(dtype).itemsize
        part = self.data[self.at : self.at + 64] or b"\0"
        self.at += self.byte() % 64
        raw = (part * (size * width // len(part) + 1))[: size * width]
        return np.frombuffer(raw, dtype).copy()


def kernels(data: bytes) -> None:
    """Run one call in C and in numpy and compare."""
    if NATIVE is None:
        return
    choices = Choices(data)
    name = NAMES[choices.byte() % len(NAMES)]
    arguments, outputs = _arguments(name, choices)
    results: list[Any] = []
    for module in (NATIVE, _pure):
        copies = [a.copy() if isinstance(a, np.ndarray) else a for a in arguments]
        if outputs == "in place":
            copies[1] = copies[0]
        try:
            result: Any = getattr(module, name)(*copies)
        except (ValueError, TypeError, OverflowError) as error:
            # What an output holds after a refusal is nobody's business.
            results.append("overflow" if isinstance(error, OverflowError) else type(error))
            continue
        results.append((result, *_written(name, result, copies)))
    one, other = results
    if "overflow" in results:  # numpy's word for an integer that no word holds
        one = other = None
    if one != other:
        raise AssertionError(f"{name}: C gives {_brief(one)}, numpy {_brief(other)}")


def _written(name: str, result: Any, arguments: list[Any]) -> list[bytes]:
    """The outputs, as far as they are defined."""
    if name == "mask":
        return [arguments[1].tobytes()]
    if name == "embed":
        return [arguments[2].tobytes()] if result == -1 else []
    if name == "compact":
        return [arguments[3].tobytes(), arguments[4][:result].tobytes()]
    if name == "csr":
        indptr, indices, values = arguments[6:]
        return [indptr.tobytes(), indices[:result].tobytes(), values[:result].tobytes()]
    changed = {"count": (2,), "expand": (2,), "expand_csr": (4,), "histogram": (4,)}
    if name == "nest":
        return [arguments[3].tobytes()] if result == -1 else []
    if name == "assign":
        return [arguments[2].tobytes(), arguments[3].tobytes()]
    return [arguments[at].tobytes() for at in changed.get(name, ())]


def _arguments(name: str, choices: Choices) -> tuple[list[Any], str]:
    word = (np.uint16, np.uint32, np.uint64)[choices.byte() % 3]
    index = (np.int32, np.int64)[choices.byte() % 2]
    # Sizes around the vector widths and the kernels' own blocks.
    n = (choices.byte(), choices.byte() % 20, 256 + choices.byte(), 4000 + choices.byte())[
        choices.byte() % 4
    ]
    odd = (0, 0, 0, 0, 0, 0, 1, -1)[choices.byte() % 8]  # now and then a wrong size
    bits, level = choices.integer(8), choices.integer(255)
    level = level % (1 << max(bits, 1)) if bits <= 8 and level < 256 else level
    src = choices.array(word, n)
    size = max(n + odd, 0)
    if name == "mask":
        return [src, np.zeros(size, word), bits, level], "in place" if odd == 0 and n % 2 else ""
    if name == "count":
        return [src, bits, np.zeros(max((1 << min(max(bits, 0), 8)) + odd, 0), np.int64)], ""
    if name == "compact":
        room = choices.integer(2 * n + 1) if choices.byte() % 4 == 0 else n
        room = room if 0 <= room < 1 << 16 else n
        return [src, bits, level, np.zeros(-(-size // 8), np.uint8), np.zeros(room, word)], ""
    if name == "csr":
        cols, start = choices.integer(40), choices.integer(100)
        rows = (start % (1 << 16) + n) // cols + 2 if 0 < cols < 1 << 16 else choices.byte()
        kept = choices.integer(200)
        room = n if choices.byte() % 4 else choices.byte()
        arrays = [np.zeros(max(rows + odd, 0), index), np.zeros(room, index), np.zeros(room, word)]
        return [src, bits, level, start, cols, kept, *arrays], ""
    if name == "expand":
        bitmask = choices.array(np.uint8, -(-size // 8))
        if size % 8 and bitmask.size and choices.byte() % 4:
            bitmask[-1] &= (1 << (size % 8)) - 1
        ones = int(np.unpackbits(bitmask).sum())
        return [bitmask, choices.array(word, max(ones + odd, 0)), np.full(n, 7, word)], ""
    if name == "expand_csr":
        return _csr_arguments(choices, word, index, odd), ""
    if name == "embed":
        counters = choices.array(np.uint8, n)
        if choices.byte() % 8:
            counters &= (1 << min(max(bits, 1), 8)) - 1
        inf = (choices.integer(255), 0x7C00, 0x7F80, 0x7F800000, 0x7FF0 << 48)[choices.byte() % 5]
        levels = (1 << min(max(bits, 0), 8)) - 1 if choices.byte() % 2 else choices.integer(255)
        if choices.byte() % 4:  # mostly what can be packed
            src &= word(0x3FFF)
            counters[src == 0] = 0
        nearest = bool(choices.byte() % 2)
        return [src, counters, np.zeros(size, word), bits, inf, levels, nearest], ""
    if name == "find_unpackable":
        given = choices.array(np.uint8, size) if choices.byte() % 2 else None
        inf = (choices.integer(255), 0x7C00, 0x7F80, 0x7F800000, 0x7FF0 << 48)[choices.byte() % 5]
        return [src, given, inf, choices.integer(255)], ""
    if name == "nest":
        counters = choices.array(np.uint8, size) % (choices.byte() % 3 + 1)
        sparse = choices.array(word, n)
        if choices.byte() % 4:  # mostly nested
            sparse = np.where(sparse % 2 == 1, src, word(0))
            counters[:n][sparse[:size] == 0] = 0
        return [src, sparse, choices.integer(255), counters], ""
    if name == "histogram":
        shift, width = choices.integer(63), choices.integer(12)
        prefixes = choices.array(np.uint64, choices.byte() % 9)
        if choices.byte() % 4:
            prefixes = np.unique(prefixes % np.uint64(1 << (choices.byte() % 16)))
        columns = max((1 << min(max(width, 0), 12)) + odd, 0)
        return [src, shift, width, prefixes, np.zeros((prefixes.size, columns), np.uint64)], ""
    thresholds = choices.array(np.uint64, choices.byte())
    if choices.byte() % 2:
        thresholds %= np.uint64(1 << (8 * src.itemsize - 1))
    if choices.byte() % 8:
        thresholds = np.sort(thresholds)[::-1].copy()
    if thresholds.size and src.size and choices.byte() % 2:
        thresholds[:] = src[0] & src.dtype.type((1 << (8 * src.itemsize - 1)) - 1)
    ties = choices.array(np.int64, max(thresholds.size + odd, 0)) % 5
    return [src, thresholds, ties, np.zeros(n, np.uint8)], ""


def _csr_arguments(choices: Choices, word: Any, index: Any, odd: int) -> list[Any]:
    rows, cols = choices.byte() % 12, choices.integer(300)
    width = cols if 0 <= cols < 1 << 12 else 1
    indptr, indices = [0], []
    for _ in range(rows):
        row = sorted({choices.byte() % width for _ in range(choices.byte() % 9)} if width else ())
        indices += row
        indptr.append(len(indices))
    arrays = [np.array(indptr, index), np.array(indices, index)]
    for array in arrays:
        if array.size and choices.byte() % 4 == 0:
            array[choices.byte() % array.size] = choices.integer(300) % (1 << 31)
    values = choices.array(word, len(indices))
    return [*arrays, values, cols, np.full(max(rows * width + odd, 0), 9, word)]


def _brief(value: Any) -> str:
    return repr(value)[:300]
