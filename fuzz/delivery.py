"""Delivery files and their payloads: our verdict is that of the second implementation.

The first byte chooses: a file, whose checksums are made right so that what is behind them is
reached; or payloads of a block, in C and in numpy.
"""

import contextlib
import importlib
import io
from typing import Any

import numpy as np
import xxhash
from internals import _delivery_pure as pure
from internals import read_header

import elsa_format as elsa
from elsa_format import verify
from spec import plain_delivery, plain_elsa

try:
    NATIVE: Any = importlib.import_module("elsa_format._native")
except ImportError:
    NATIVE = None

KINDS = (("F32", 4, 23), ("BF16", 2, 7), ("F16", 2, 10), ("F64", 8, 52))
LARGEST = 1 << 16
"""Bytes of a source that the second implementation, which is slow, is asked about."""


def delivery(data: bytes) -> None:
    """A file, or the payloads of a block."""
    if data[:1] < b"\x80":
        _file(data[1:])
    else:
        _payloads(data[1:])


def _file(data: bytes) -> None:
    data = _with_checksums(data)
    with contextlib.suppress(elsa.ElsaError):
        if read_header(io.BytesIO(data), "x").kind != "delivery":
            return  # for other targets
    expected = ""
    try:
        opened = plain_delivery.Delivery(data)
        if sum(tensor.end - tensor.begin for tensor in _tensors(opened)) > LARGEST:
            return
        plain_delivery.validate(data)
    except plain_elsa.Bad as bad:
        expected = bad.error
    found = ""
    try:
        verify(io.BytesIO(data))
    except elsa.ElsaError as error:
        if not str(error).isprintable():
            raise AssertionError(f"message {error!r}") from error
        found = type(error).__name__
    if {found, expected} == {"InvalidJson", "DuplicateKey"}:
        return
    if found and expected in ("Truncated", "TrailingData"):  # a stream shows its end last
        return
    # Errors of payloads in different blocks have no order, nor have those of tensors.
    behind = {"InvalidDelivery", "ChecksumMismatch", "NonFinite", "CountMismatch", "DigestMismatch"}
    if found != expected and not {found, expected} <= behind:
        raise AssertionError(f"{found or 'accepted'}, the spec says {expected or 'valid'}")


def _tensors(opened: plain_delivery.Delivery) -> list[plain_elsa.Tensor]:
    return list(opened.source.container.tensors.values())


def _with_checksums(data: bytes) -> bytes:
    """The file with the checksums of its payloads made right, as far as it can be parsed."""
    try:
        opened = plain_delivery.Delivery(data)
        start, parts = len(data) - len(opened.data), opened.parts_there
        changed = bytearray(data)
        for part in range(1, parts + 1):
            runs = [*opened.plan.plain[part - 1], *opened.plan.nested]
            begin = start + opened.ends[part - 1]
            count = sum(-(-run.length // (1 << opened.document["block"])) for run in runs)
            position = begin + 3 * count
            for i in range(min(count, 1000)):
                size = int.from_bytes(changed[begin + 3 * i :][:3], "little")
                if size:
                    payload = bytes(changed[position + 8 : position + 8 + size])
                    checksum = plain_delivery.payload_checksum(payload, opened.head)
                    changed[position : position + 8] = checksum
                    position += 8 + size
        return bytes(changed[: len(data)])
    except plain_elsa.Bad:
        return data


def _payloads(data: bytes) -> None:
    """One block: words from the bytes, coded; or the bytes as payloads."""
    if NATIVE is None or len(data) < 8:
        return
    dtype, size, mantissa = KINDS[data[0] % 4]
    bits = data[1] % min(8, mantissa) + 1
    levels = max(data[2] % (1 << bits), 1)
    n = (data[3], 64 * data[3], 2048 + data[3], 5000)[data[4] % 4] or 1
    seed, rest = xxhash.xxh3_64_intdigest(data), data[6:]
    found = []
    for codec in (NATIVE, pure):
        scratch_size, room = codec.delivery_memory(n, size)
        scratch, out = np.full(scratch_size, 0x55, np.uint8), np.zeros(room, np.uint8)
        word = np.dtype(f"u{size}")
        if data[5] % 2:
            words = np.frombuffer((rest * (n * size // len(rest) + 1))[: n * size], word).copy()
            words &= ~word.type((1 << bits) - 1)
            words |= (np.arange(n) * (seed % 97 + 1) % (levels + 1)).astype(word)
            sizes = np.zeros(levels + 1, np.int64)
            total = codec.encode_nested(words, mantissa, bits, levels, out, sizes, scratch)
            found.append((out[:total].tobytes(), sizes.tobytes()))
            continue
        cut = np.sort(np.frombuffer(rest[:levels] + b"\0", np.uint8))[
            : min(levels, data[3] % 4 + 1)
        ]
        payload = np.frombuffer(rest, np.uint8)
        ends = [*np.minimum(cut.astype(np.int64), payload.size).tolist(), payload.size]
        sizes = np.diff(ends, prepend=0)[: levels + 1].astype(np.int64)
        words = np.full(n, 0x1234 if data[5] % 4 else 0, word)
        first = data[5] // 4 % (levels + 2 - sizes.size) + 1
        used = payload[: int(sizes.sum())]
        try:
            stored = codec.decode_nested(used, sizes, first, words, mantissa, bits, levels, scratch)
            found.append((words.tobytes(), stored))
        except ValueError:
            found.append(("refused", 0))
    if found[0] != found[1]:
        raise AssertionError(f"C and numpy differ: {dtype} {n} {bits} {levels}")
