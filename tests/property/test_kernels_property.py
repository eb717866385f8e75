"""Both implementations of every kernel against the definition on Python integers."""

from types import ModuleType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernel_modules import each_implementation

INFINITIES = {2: (0x7C00, 0x7F80), 4: (0x7F800000,), 8: (0x7FF << 52,)}
CANARY = 0xA5


class Guarded:
    """An output between bytes that nothing may write to, at any address."""

    def __init__(self, size: int, dtype: np.typing.DTypeLike, offset: int = 0) -> None:
        self.begin = 64 + offset
        self.end = self.begin + size * np.dtype(dtype).itemsize
        self.memory = np.full(self.end + 64, CANARY, np.uint8)
        self.array = self.memory[self.begin : self.end].view(dtype)

    def check(self) -> None:
        assert (self.memory[: self.begin] == CANARY).all()
        assert (self.memory[self.end :] == CANARY).all()


def special(width: int) -> list[int]:
    """Words at which rules change: zeros, denormals, infinities, NaNs, the largest finite."""
    sign = 1 << (8 * width - 1)
    magnitudes = {0, 1, 2, 3, 255, 256, 257, sign - 1}
    magnitudes |= {inf + d for inf in INFINITIES[width] for d in (-257, -256, -2, -1, 0, 1)}
    return sorted(m | s for m in magnitudes for s in (0, sign))


@st.composite
def words(draw: st.DrawFn, width: int | None = None) -> np.ndarray:
    """Up to 200 words, at any address, read-only."""
    width = draw(st.sampled_from([2, 4, 8])) if width is None else width
    offset = draw(st.integers(0, 7))
    data = draw(st.binary(max_size=200 * width + offset))
    data = data[: offset + (len(data) - offset) // width * width]
    found = np.frombuffer(data[offset:], f"u{width}").copy()
    if found.size:
        at = st.tuples(st.integers(0, found.size - 1), st.sampled_from(special(width)))
        for index, word in draw(st.lists(at, max_size=20)):
            found[index] = word
    memory = np.empty(offset + found.nbytes, np.uint8)  # ends with the words: no room to read past
    moved = memory[offset:].view(found.dtype)
    moved[:] = found
    moved.flags.writeable = False
    return moved


@st.composite
def levels(draw: st.DrawFn) -> tuple[int, int]:
    """Bits of the counter and a level."""
    bits = draw(st.integers(1, 8))
    return bits, draw(st.integers(1, (1 << bits) - 1))


def is_kept(word: int, bits: int, level: int) -> bool:
    return 0 < word % (1 << bits) <= level


def magnitudes_of(src: np.ndarray) -> list[int]:
    return [int(w) % (1 << (8 * src.itemsize - 1)) for w in src]


OFFSETS = st.integers(0, 7)


@each_implementation
@given(src=words(), bits_level=levels(), offset=OFFSETS)
def test_mask(
    kernels: ModuleType, src: np.ndarray, bits_level: tuple[int, int], offset: int
) -> None:
    expected = [int(w) if is_kept(int(w), *bits_level) else 0 for w in src]
    dst = Guarded(src.size, src.dtype, offset)
    kept = sum(is_kept(int(w), *bits_level) for w in src)
    assert kernels.mask(src, dst.array, *bits_level) == kept
    assert dst.array.tolist() == expected
    dst.array[:] = src
    assert kernels.mask(dst.array, dst.array, *bits_level) == kept
    assert dst.array.tolist() == expected
    dst.check()


@each_implementation
@given(src=words(), bits=st.integers(1, 8), offset=OFFSETS)
def test_count(kernels: ModuleType, src: np.ndarray, bits: int, offset: int) -> None:
    out = Guarded(1 << bits, np.int64, offset)
    out.array[:] = 10
    kernels.count(src, bits, out.array)
    counters = [int(w) % (1 << bits) for w in src]
    assert out.array.tolist() == [10 + counters.count(c) for c in range(1 << bits)]
    out.check()


@each_implementation
@given(src=words(), bits_level=levels(), spare=st.integers(-1, 9), offset=OFFSETS)
def test_compact_and_expand(
    kernels: ModuleType, src: np.ndarray, bits_level: tuple[int, int], spare: int, offset: int
) -> None:
    kept = [is_kept(int(w), *bits_level) for w in src]
    bitmask = Guarded(-(-src.size // 8), np.uint8)
    values = Guarded(max(sum(kept) + spare, 0), src.dtype, offset)
    dst = Guarded(src.size, src.dtype, offset)
    if values.array.size < sum(kept):
        with pytest.raises(ValueError, match="more are kept"):
            kernels.compact(src, *bits_level, bitmask.array, values.array)
        bitmask.array[:] = np.packbits(kept, bitorder="little")
        with pytest.raises(ValueError, match="too few"):
            kernels.expand(bitmask.array, values.array, dst.array)
    else:
        assert kernels.compact(src, *bits_level, bitmask.array, values.array) == sum(kept)
        assert bitmask.array.tolist() == [
            sum(k << j for j, k in enumerate(kept[i : i + 8])) for i in range(0, len(kept), 8)
        ]
        expected = [int(w) for w, k in zip(src, kept, strict=True) if k]
        assert values.array[: sum(kept)].tolist() == expected
        exact = values.array[: sum(kept)].copy()
        assert kernels.expand(bitmask.array, exact, dst.array) == sum(kept)
        assert dst.array.tolist() == [int(w) * k for w, k in zip(src, kept, strict=True)]
    for output in (bitmask, values, dst):
        output.check()


@each_implementation
@given(
    data=st.data(),
    src=words(),
    bits_level=levels(),
    wide=st.booleans(),
    cols=st.integers(1, 40),
    before=st.integers(0, 3),
)
def test_csr_in_blocks_and_back(
    kernels: ModuleType,
    data: st.DataObject,
    src: np.ndarray,
    bits_level: tuple[int, int],
    wide: bool,
    cols: int,
    before: int,
) -> None:
    rows = src.size // cols
    src = src[: rows * cols]
    index = np.dtype(np.int64 if wide else np.int32)
    matrix = [
        [(c, int(w)) for c, w in enumerate(row) if is_kept(int(w), *bits_level)]
        for row in src.reshape(rows, cols)
    ]
    total = sum(map(len, matrix))
    indptr = Guarded(rows + 1, index, before)
    indptr.array[0] = 0
    columns: list[int] = []
    values: list[int] = []
    cuts = sorted(data.draw(st.lists(st.integers(0, src.size), max_size=3)))
    for start, stop in zip([0, *cuts], [*cuts, src.size], strict=True):
        block = src[start:stop]
        some = Guarded(min(block.size, total - len(values)), index, before)
        kept = Guarded(some.array.size, src.dtype, before)
        used = kernels.csr(
            block, *bits_level, start, cols, len(values), indptr.array, some.array, kept.array
        )
        columns += some.array[:used].tolist()
        values += kept.array[:used].tolist()
        some.check()
        kept.check()
    indptr.check()
    assert columns == [c for row in matrix for c, _ in row]
    assert values == [w for row in matrix for _, w in row]
    assert indptr.array.tolist() == [sum(map(len, matrix[:r])) for r in range(rows + 1)]

    dst = Guarded(src.size, src.dtype, before)
    kernels.expand_csr(
        indptr.array, np.array(columns, index), np.array(values, src.dtype), cols, dst.array
    )
    assert dst.array.tolist() == [int(w) if is_kept(int(w), *bits_level) else 0 for w in src]
    dst.check()


def nearest_by_search(word: int, counter: int, bits: int, inf: int, sign: int) -> int:
    """Of the finite magnitudes with this counter the closest; the smaller if two are."""
    magnitude = word % sign
    at = magnitude - magnitude % (1 << bits) + counter
    finite = [m for m in (at - (1 << bits), at, at + (1 << bits)) if 0 <= m < inf]
    return word - magnitude + min(finite, key=lambda m: (abs(m - magnitude), m))


@each_implementation
@given(data=st.data(), src=words(), bits=st.integers(1, 8), offset=OFFSETS)
def test_embed(
    kernels: ModuleType, data: st.DataObject, src: np.ndarray, bits: int, offset: int
) -> None:
    inf = data.draw(st.sampled_from([i for i in INFINITIES[src.itemsize] if not i % (1 << bits)]))
    sign = 1 << (8 * src.itemsize - 1)
    content = data.draw(st.binary(min_size=src.size, max_size=src.size))
    counters = np.frombuffer(content, np.uint8) % np.uint8(1 << bits if bits < 8 else 255)
    levels = data.draw(st.integers(0, (1 << bits) - 1))
    if data.draw(st.booleans()):  # mostly what can be packed
        levels = (1 << bits) - 1
        src = np.where(src % sign < inf, src, src.dtype.type(1))
        counters = np.where(src % sign == 0, np.uint8(0), counters)
    bad = [
        i
        for i, (w, c) in enumerate(zip(src.tolist(), counters.tolist(), strict=True))
        if w % sign >= inf or c > levels or (w % sign == 0 and c > 0)
    ]
    dst = Guarded(src.size, src.dtype, offset)
    found = kernels.embed(src, counters, dst.array, bits, inf, levels, False)
    assert found == min(bad, default=-1)
    if not bad:
        assert dst.array.tolist() == [
            int(w) // (1 << bits) * (1 << bits) + int(c) for w, c in zip(src, counters, strict=True)
        ]
    assert kernels.embed(src, counters, dst.array, bits, inf, levels, True) == found
    if not bad:
        assert dst.array.tolist() == [
            nearest_by_search(word, counter, bits, inf, sign)
            for word, counter in zip(src.tolist(), counters.tolist(), strict=True)
        ]
    dst.check()


@each_implementation
@given(data=st.data(), src=words(), levels=st.integers(0, 255))
def test_find_unpackable(
    kernels: ModuleType, data: st.DataObject, src: np.ndarray, levels: int
) -> None:
    inf = data.draw(st.sampled_from(INFINITIES[src.itemsize]))
    largest = data.draw(st.integers(1, 256))
    content = data.draw(st.binary(min_size=src.size, max_size=src.size))
    counters = np.array([b % largest for b in content], np.uint8)
    finite = src & src.dtype.type(inf - 1) if data.draw(st.booleans()) else src.copy()
    keys = magnitudes_of(finite)
    infinite = [i for i, key in enumerate(keys) if key >= inf]
    assert kernels.find_unpackable(finite, None, inf, levels) == min(infinite, default=-1)
    bad = infinite + [
        i
        for i, (k, c) in enumerate(zip(keys, content, strict=True))
        if c % largest > levels or (k == 0 and c % largest > 0)
    ]
    assert kernels.find_unpackable(finite, counters, inf, levels) == min(bad, default=-1)


@each_implementation
@given(data=st.data(), src=words(), level=st.integers(1, 255), offset=OFFSETS)
def test_nest(
    kernels: ModuleType, data: st.DataObject, src: np.ndarray, level: int, offset: int
) -> None:
    kept = np.array(data.draw(st.lists(st.booleans(), min_size=src.size, max_size=src.size)), bool)
    negative = src.dtype.type(1 << (8 * src.itemsize - 1))  # minus zero is zero too
    sparse = np.where(kept, src, negative * data.draw(st.booleans()))
    kept &= np.array(magnitudes_of(src), object) != 0
    before = np.where(kept, data.draw(st.integers(0, 3)), 0).astype(np.uint8)
    if src.size and data.draw(st.booleans()):  # one that is not nested
        at = data.draw(st.integers(0, src.size - 1))
        if data.draw(st.booleans()):
            sparse[at] ^= sparse.dtype.type(1)
        else:
            sparse[at], before[at] = 0, 1
    kept = np.array([key != 0 for key in magnitudes_of(sparse)], bool)
    bad = np.flatnonzero(np.where(kept, sparse != src, before > 0)).tolist()
    counters = Guarded(src.size, np.uint8, offset)
    counters.array[:] = before
    assert kernels.nest(src, sparse, level, counters.array) == min(bad, default=-1)
    if not bad:
        expected = [level if k and c == 0 else c for k, c in zip(kept, before, strict=True)]
        assert counters.array.tolist() == expected
    counters.check()


@each_implementation
@given(data=st.data(), src=words(), width=st.integers(1, 9), offset=OFFSETS)
def test_histogram(
    kernels: ModuleType, data: st.DataObject, src: np.ndarray, width: int, offset: int
) -> None:
    shift = data.draw(st.integers(0, 8 * src.itemsize - width))
    keys = magnitudes_of(src)
    present = [key >> (shift + width) for key in keys] or [0]
    prefixes = data.draw(
        st.sets(
            st.sampled_from(present) | st.integers(0, 2**64 - 1) | st.integers(0, 9000), max_size=12
        )
    )
    ordered = np.array(sorted(prefixes), np.uint64)
    out = Guarded(len(prefixes) << width, np.uint64, offset)
    out.array[:] = 5
    kernels.histogram(src, shift, width, ordered, out.array.reshape(len(prefixes), 1 << width))
    expected = np.full((len(prefixes), 1 << width), 5)
    for key in keys:
        if key >> (shift + width) in prefixes:
            row = sorted(prefixes).index(key >> (shift + width))
            expected[row, (key >> shift) % (1 << width)] += 1
    assert out.array.tolist() == expected.reshape(-1).tolist()
    out.check()


@each_implementation
@given(data=st.data(), src=words(), offset=OFFSETS)
def test_assign(kernels: ModuleType, data: st.DataObject, src: np.ndarray, offset: int) -> None:
    keys = magnitudes_of(src)
    limit = (
        st.sampled_from(sorted(set(keys)) or [0])
        | st.sampled_from([0, 1, 2**63, 2**64 - 1])
        | st.integers(0, 2 ** (8 * src.itemsize - 1))
    )
    thresholds = sorted(data.draw(st.lists(limit, min_size=1, max_size=12)), reverse=True)
    if data.draw(st.booleans()):
        thresholds = [t for t in thresholds for _ in range(21)]  # many levels, equal thresholds
    budgets = [data.draw(st.integers(-1, 3)) for _ in thresholds[:12]]
    budgets = (budgets * 21)[: len(thresholds)]

    left, expected = list(budgets), []
    for key in keys:
        passed = [
            t
            for t, threshold in enumerate(thresholds)
            if key > threshold or (key == threshold and left[t] > 0)
        ]
        if key == 0 or not passed:
            expected.append(0)
            continue
        expected.append(passed[0] + 1)
        for t in range(passed[0], len(thresholds)):
            left[t] -= thresholds[t] == key

    ties = Guarded(len(thresholds), np.int64, offset)
    ties.array[:] = budgets
    counters = Guarded(src.size, np.uint8, offset)
    kernels.assign(src, np.array(thresholds, np.uint64), ties.array, counters.array)
    assert counters.array.tolist() == expected
    assert ties.array.tolist() == left
    ties.check()
    counters.check()
