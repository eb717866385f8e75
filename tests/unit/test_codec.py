"""Counters in the low bits of single weights."""

import math

import numpy as np
import pytest
from bits import FLOATS

import elsa_format as elsa

MANTISSA = {"F32": 23, "BF16": 7, "F16": 10, "F64": 52}


def nearest_by_search(word: int, counter: int, bits: int, infinity: int) -> int:
    """All magnitudes with the counter, the closest in units of the last place, smaller on a tie."""
    top = 1 << (infinity.bit_length())
    sign, magnitude = word & top, word & (top - 1)
    start = magnitude - magnitude % (1 << bits) + counter
    candidates = [start + step * (1 << bits) for step in (-1, 0, 1)]
    allowed = [c for c in candidates if 0 <= c < infinity]
    return sign | min(allowed, key=lambda c: (abs(c - magnitude), c))


@pytest.mark.parametrize(
    ("name", "bits"), [(n, b) for n in FLOATS for b in range(1, 1 + min(8, MANTISSA[n]))]
)
def test_nearest_is_the_closest_value_with_the_counter(name: str, bits: int) -> None:
    dtype = FLOATS[name]
    word = np.dtype(f"u{dtype.itemsize}")
    infinity = int(np.array([np.inf]).astype(dtype).view(word)[0])
    rng = np.random.default_rng(bits)
    magnitudes = {1, 2, 3, infinity - 1, infinity - 2, infinity - (1 << bits)}
    magnitudes |= {(1 << k) + d for k in range(1, infinity.bit_length()) for d in (-1, 0, 1)}
    magnitudes |= {int(m) for m in rng.integers(1, infinity, 200, np.uint64)}
    magnitudes = sorted(m for m in magnitudes if 0 < m < infinity)
    words = np.array([m | s << (8 * word.itemsize - 1) for m in magnitudes for s in (0, 1)], word)
    counters = rng.integers(0, 1 << bits, words.size)
    found = elsa.embed_counters(words.view(dtype), counters, bits).view(word)
    expected = [
        nearest_by_search(int(w), int(c), bits, infinity)
        for w, c in zip(words, counters, strict=True)
    ]
    assert found.tolist() == expected
    assert elsa.read_counters(found.view(dtype), bits).tolist() == counters.tolist()


def test_overwrite_replaces_the_low_bits() -> None:
    words = np.array([0x3F800001, 0xBF80FFFF, 0x00000001], np.uint32)
    found = elsa.embed_counters(
        words.view(np.float32), np.array([2, 0, 3]), 2, rounding="overwrite"
    )
    assert [hex(w) for w in found.view(np.uint32)] == ["0x3f800002", "0xbf80fffc", "0x3"]


def test_nearest_never_reaches_infinity_or_crosses_zero() -> None:
    largest = np.array([np.finfo(np.float32).max] * 4, np.float32)
    assert np.isfinite(elsa.embed_counters(largest, np.arange(4), 2)).all()
    tiny = np.array([1, 1, 1, 1], np.uint32).view(np.float32)
    assert elsa.embed_counters(tiny, np.arange(4), 2).view(np.uint32).tolist() == [0, 1, 2, 3]


def test_negative_zero_stays_in_the_dense_network_and_leaves_every_level() -> None:
    weights = elsa.embed_counters(np.array([-0.0, 1.0], np.float32), np.array([0, 1]), 1)
    assert math.copysign(1, weights[0]) == -1
    assert elsa.mask_level(weights, 1, 1).view(np.uint32)[0] == 0


@pytest.mark.parametrize(
    ("weights", "counters", "error", "message"),
    [
        ([1.0, np.inf], [0, 0], elsa.NonFinite, "weight 1 is inf"),
        ([1.0, np.nan], [1, 1], elsa.NonFinite, "weight 1 is nan"),
        ([1.0, 0.0], [1, 2], elsa.ZeroFrozen, "weight 1 is zero but has counter 2"),
        ([1.0, -0.0], [1, 2], elsa.ZeroFrozen, "weight 1 is zero but has counter 2"),
        ([1.0, 1.0], [1, 4], elsa.CounterOutOfRange, "1..4"),
        ([1.0, 1.0], [-1, 0], elsa.CounterOutOfRange, "-1..0"),
    ],
)
def test_what_cannot_be_packed(
    weights: list[float], counters: list[int], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        elsa.embed_counters(np.array(weights, np.float32), np.array(counters), 2)


def test_counters_must_fit_the_mantissa() -> None:
    weights = np.ones(3, FLOATS["BF16"])
    assert elsa.read_counters(weights, 7).tolist() == [0, 0, 0]
    with pytest.raises(elsa.BitsTooWide, match="BF16"):
        elsa.read_counters(weights, 8)
    with pytest.raises(elsa.BitsTooWide, match="9-bit"):
        elsa.read_counters(np.ones(3, np.float32), 9)


def test_arrays_need_not_be_contiguous() -> None:
    weights = np.arange(1, 13, dtype=np.float32).reshape(3, 4).T
    counters = np.arange(12).reshape(4, 3) % 4
    packed = elsa.embed_counters(weights, counters, 2)
    assert (elsa.read_counters(packed, 2) == counters).all()


def test_a_level_is_masked_into_memory_that_is_there() -> None:
    weights = np.arange(64, dtype=np.uint32).view(np.float32).reshape(8, 8)
    expected = elsa.mask_level(weights, 2, 2)
    out = np.ones_like(weights)
    assert elsa.mask_level(weights, 2, 2, out=out) is out
    assert out.tobytes() == expected.tobytes()
    elsa.mask_level(weights, 2, 2, out=weights)
    assert weights.tobytes() == expected.tobytes()
    for wrong in (np.empty((8, 7), np.float32), np.empty((8, 8), np.int32), out.T):
        with pytest.raises(ValueError, match="out"):
            elsa.mask_level(weights, 2, 2, out=wrong)
    out.flags.writeable = False
    with pytest.raises(ValueError, match="writable"):
        elsa.mask_level(weights, 2, 2, out=out)
