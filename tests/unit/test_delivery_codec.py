"""Payloads in C and in numpy: the bytes of the plain implementation, and the same refusals."""

import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from internals import _delivery_pure as pure
from kernel_modules import NATIVE

sys.path.insert(0, str(Path(__file__).parents[2]))

from spec import plain_delivery, plain_elsa

DTYPES = {"F32": (4, 23), "BF16": (2, 7), "F16": (2, 10), "F64": (8, 52)}
PLAIN = {"U8": 1, "I16": 2, "I32": 4, "I64": 8}
SIZES = [1, 2, 3, 5, 8, 9, 63, 64, 65, 257, 1000, 2049, 4100]

each_codec = pytest.mark.parametrize(
    "codec",
    [
        pytest.param(pure, id="pure"),
        pytest.param(
            NATIVE,
            id="native",
            marks=pytest.mark.skipif(NATIVE is None, reason="the C module is not built"),
        ),
    ],
)


def memory(codec: ModuleType, words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scratch memory and room for the output, with something in them."""
    scratch, room = codec.delivery_memory(words.size, words.itemsize)
    return np.full(scratch, 0xA5, np.uint8), np.full(room, 0x5A, np.uint8)


def encode(codec: ModuleType, words: np.ndarray, mantissa: int, bits: int, levels: int) -> Any:
    """The payloads of a nested block."""
    scratch, out = memory(codec, words)
    sizes = np.zeros(levels + 1, np.int64)
    total = codec.encode_nested(words, mantissa, bits, levels, out, sizes, scratch)
    assert total == sizes.sum()
    ends = np.cumsum(sizes)
    return [out[end - size : end].tobytes() for end, size in zip(ends, sizes, strict=True)]


def decode(
    codec: ModuleType,
    payloads: list[bytes],
    words: np.ndarray,
    mantissa: int,
    bits: int,
    levels: int,
    first: int = 1,
) -> bool:
    """Put payloads into words."""
    scratch, _ = memory(codec, words)
    data = np.frombuffer(b"".join(payloads), np.uint8)
    sizes = np.array([len(payload) for payload in payloads], np.int64)
    return bool(codec.decode_nested(data, sizes, first, words, mantissa, bits, levels, scratch))


def weights(rng: np.random.Generator, dtype: str, n: int, bits: int, levels: int) -> np.ndarray:
    """Words of all kinds, with counters that depend on their size, or on nothing."""
    size, _ = DTYPES[dtype]
    word = np.dtype(f"u{size}")
    kind = rng.integers(6)
    normal = rng.standard_normal(n) * 10.0 ** rng.integers(-6, 2)
    if dtype == "BF16":
        words = (normal.astype(np.float32).view(np.uint32) >> 16).astype(word)
    else:
        words = normal.astype(f"f{size}").view(word)
    if kind == 0:  # anything, most of it far from the largest
        words = rng.integers(0, 2**64 - 1, n, dtype=np.uint64, endpoint=True).astype(word)
    elif kind == 1:
        words[:] = words[0]
    elif kind == 2:  # zeros of both signs, and denormals
        words[rng.random(n) < 0.5] = 0
        words[rng.random(n) < 0.2] = word.type(1 << (8 * size - 1))
        words[rng.random(n) < 0.1] = 3
    if kind in (3, 4):  # by magnitude
        magnitudes = words & word.type((1 << (8 * size - 1)) - 1)
        ranks = np.argsort(np.argsort(magnitudes)[::-1])
        counters = np.minimum(ranks * 2 * (levels + 1) // max(n, 1) + 1, levels + 1)
        counters[counters == levels + 1] = 0
    else:
        shares = rng.random(levels + 1) ** 3 + 1e-9
        counters = rng.choice(levels + 1, n, p=shares / shares.sum())
    return words >> word.type(bits) << word.type(bits) | counters.astype(word)


def cases(count: int) -> list[Any]:
    found = []
    for seed in range(count):
        choose = random.Random(seed)
        dtype = choose.choice(list(DTYPES))
        bits = choose.randint(1, min(8, DTYPES[dtype][1]))
        levels = choose.randint(max(1, 1 << (bits - 1)), (1 << bits) - 1)
        found.append((seed, dtype, choose.choice(SIZES), bits, levels))
    return found


@each_codec
def test_nested_blocks_as_the_plain_implementation(codec: ModuleType) -> None:
    """The same bytes, and every level back, at once or as an upgrade (ELSA-D-019 to -039)."""
    for seed, dtype, n, bits, levels in cases(60):
        rng = np.random.default_rng(seed)
        mantissa = DTYPES[dtype][1]
        words = weights(rng, dtype, n, bits, levels)
        payloads = encode(codec, words, mantissa, bits, levels)
        assert payloads == plain_delivery.write_block(words.tolist(), dtype, bits, levels), seed
        counters = words & words.dtype.type((1 << bits) - 1)
        found = np.full_like(words, 0x77)
        lower, upper = sorted(rng.integers(1, levels + 2, 2).tolist())
        stored = decode(codec, payloads[:lower], found, mantissa, bits, levels)
        for last in (lower, upper):
            kept = (
                words if last > levels else np.where((counters > 0) & (counters <= last), words, 0)
            )
            if last > lower and not stored:
                decode(codec, payloads[lower:last], found, mantissa, bits, levels, lower + 1)
            elif last > lower:
                decode(codec, payloads[:last], found, mantissa, bits, levels)
            assert (found == kept).all(), (seed, last)


@each_codec
def test_plain_blocks_as_the_plain_implementation(codec: ModuleType) -> None:
    rng = np.random.default_rng(0)
    for seed in range(60):
        dtype = random.Random(seed).choice([*DTYPES, *PLAIN])
        n = int(rng.choice(SIZES))
        if dtype in DTYPES:
            words, mantissa = weights(rng, dtype, n, 1, 1), DTYPES[dtype][1]
        else:
            words, mantissa = rng.integers(0, 2**63, n).astype(f"u{PLAIN[dtype]}"), 0
            words &= words.dtype.type(rng.choice([0, 3, 255]))
        scratch, out = memory(codec, words)
        size = codec.encode_plain(words, mantissa, out, scratch)
        assert out[:size].tobytes() == plain_delivery.write_values(words.tolist(), dtype, 0)
        found = np.full_like(words, 0x77)
        codec.decode_plain(out[:size].copy(), found, mantissa, scratch)
        assert (found == words).all()


def plain_verdict(
    payloads: list[bytes], n: int, dtype: str, bits: int, levels: int
) -> list[int] | None:
    """What the plain implementation makes of payloads; None for InvalidDelivery."""
    block: list[int | None] = [None] * n
    try:
        for c, payload in zip([*range(1, levels + 1), 0], payloads, strict=False):
            plain_delivery.read_block(payload, block, dtype, bits, levels, c)
    except plain_elsa.Bad:
        return None
    level = len(payloads)
    if level > levels:
        return [word or 0 for word in block]
    kept = (word if word and 0 < word % (1 << bits) <= level else 0 for word in block)
    return list(kept)


@each_codec
def test_damaged_payloads(codec: ModuleType) -> None:
    """Refused or decoded, as the plain implementation does (ELSA-D-018, ELSA-D-044)."""
    verdicts = {True: 0, False: 0}
    for seed, dtype, n, bits, levels in cases(60):
        if n > 300 or levels > 20:
            continue
        rng, choose = np.random.default_rng(seed), random.Random(seed)
        mantissa = DTYPES[dtype][1]
        payloads = encode(codec, weights(rng, dtype, n, bits, levels), mantissa, bits, levels)
        for _ in range(25):
            damaged = list(payloads[: choose.randint(1, levels + 1)])
            which = choose.randrange(len(damaged))
            data = bytearray(damaged[which])
            action = choose.randrange(4)
            if action == 0 and data:
                data[choose.randrange(len(data))] ^= 1 << choose.randrange(8)
            elif action == 1 and data:
                del data[choose.randrange(len(data)) :]
            elif action == 2:
                data += bytes([choose.randrange(256)])
            elif data:
                data[choose.randrange(min(len(data), 8))] = choose.randrange(256)
            damaged[which] = bytes(data)
            found: list[int] | None
            words = np.full(n, 0x77, f"u{DTYPES[dtype][0]}")
            try:
                decode(codec, damaged, words, mantissa, bits, levels)
                found = words.tolist()
            except ValueError:
                found = None
            assert found == plain_verdict(damaged, n, dtype, bits, levels), (seed, damaged)
            verdicts[found is None] += 1
    assert min(verdicts.values()) > 50


@each_codec
def test_a_real_block(codec: ModuleType) -> None:
    """As many words as a block has, and as many escapes as there can be."""
    rng = np.random.default_rng(5)
    n = 1 << 18 if codec is NATIVE else 1 << 15
    small = (rng.standard_normal(n) * 0.03).astype(np.float32).view(np.uint32)
    spread = rng.integers(0, 2**32, n, dtype=np.uint32)
    spread[::2] = spread[0]  # half of them in one place
    for words in (small, spread, small & np.uint32(0xFFFF0000), np.zeros(n, np.uint32)):
        counters = rng.choice(4, n, p=[0.8, 0.05, 0.05, 0.1]).astype(np.uint32)
        block = words & ~np.uint32(3) | counters
        payloads = encode(codec, block, 23, 2, 3)
        assert sum(map(len, payloads)) <= block.nbytes * 257 // 256 + 300
        found = np.empty_like(block)
        decode(codec, payloads, found, 23, 2, 3)
        assert (found == block).all()


@each_codec
def test_a_bomb_is_bounded(codec: ModuleType) -> None:
    """The largest block from a few bytes; and none larger."""
    n = 1 << 20
    payload = bytes([255, 1, 0, 1, 0, 1, 0, 1, 0])
    words = np.full(n, 7, np.uint32)
    scratch, _ = memory(codec, words)
    codec.decode_plain(np.frombuffer(payload, np.uint8), words, 23, scratch)
    assert not words.any()


@pytest.mark.skipif(NATIVE is None, reason="the C module is not built")
def test_the_c_module_refuses_what_is_not_safe() -> None:
    assert NATIVE is not None
    words = np.zeros(100, np.uint32)
    scratch, out = memory(NATIVE, words)
    data, sizes = np.zeros(10, np.uint8), np.array([10], np.int64)
    good = (data, sizes, 1, words, 23, 2, 3, scratch)

    def refused(at: int, value: object, error: type[Exception] = ValueError) -> None:
        arguments = [*good[:at], value, *good[at + 1 :]]
        with pytest.raises(error):
            NATIVE.decode_nested(*arguments)

    refused(1, np.array([11], np.int64))
    refused(1, np.array([-1], np.int64))
    refused(1, np.array([9], np.int64))
    refused(1, np.array([2, 2, 2, 2, 2], np.int64))
    refused(2, 0)
    refused(2, 5)
    refused(3, words[:0])
    refused(3, np.zeros((1 << 20) + 1, np.uint32))
    refused(3, words.view(np.float32), TypeError)
    refused(4, 24)
    refused(4, 0)
    refused(5, 0)
    refused(5, 9)
    refused(6, 0)
    refused(6, 4)
    refused(7, scratch[:-1])
    refused(7, words.view(np.uint8))
    with pytest.raises(ValueError, match="out"):
        NATIVE.encode_plain(words, 23, out[:-1], scratch)
    with pytest.raises(ValueError, match="overlaps"):
        NATIVE.encode_plain(out[:400].view(np.uint32), 23, out, scratch)
