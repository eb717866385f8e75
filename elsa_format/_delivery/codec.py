"""Words of a block to payloads and back: the C module where it is built, else numpy."""

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elsa_format._container.dtypes import Dtype
from elsa_format._delivery import pure
from elsa_format._delivery.pure import Words
from elsa_format._errors import InvalidDelivery
from elsa_format._kernels import NATIVE
from elsa_format._memory import aligned

_payloads: Any = pure
if NATIVE:
    from elsa_format import _native

    _payloads = _native

Bytes = NDArray[np.uint8]
_EMPTY = np.empty(0, np.uint8)


class _Memory(threading.local):
    """Of each thread, used for block after block: new memory costs more than decoding into it."""

    scratch = room = _EMPTY


_MEMORY = _Memory()


def _scratch(words: Words) -> Bytes:
    size, _ = _payloads.delivery_memory(words.size, words.itemsize)
    if _MEMORY.scratch.size < size:
        _MEMORY.scratch = aligned(size)
    return _MEMORY.scratch


def _room(words: Words) -> Bytes:
    _, size = _payloads.delivery_memory(words.size, words.itemsize)
    if _MEMORY.room.size < size:
        _MEMORY.room = aligned(size)
    return _MEMORY.room


def encode_plain(words: Words, dtype: Dtype) -> Bytes:
    """The payload of a plain block."""
    out = _room(words)
    size = _payloads.encode_plain(words, dtype.mantissa, out, _scratch(words))
    return out[:size].copy()


def encode_nested(words: Words, dtype: Dtype, bits: int, levels: int) -> list[Bytes]:
    """The payloads of a nested block in parts 1…T and the dense part."""
    out, sizes = _room(words), np.zeros(levels + 1, np.int64)
    size = _payloads.encode_nested(words, dtype.mantissa, bits, levels, out, sizes, _scratch(words))
    joined = out[:size].copy()  # at once, as there may be 256 parts
    ends = np.cumsum(sizes).tolist()
    starts = [0, *ends[:-1]]
    return [joined[a:b] for a, b in zip(starts, ends, strict=True)]


def decode_plain(payload: Bytes, words: Words, dtype: Dtype, where: str) -> None:
    """Fill a plain block."""
    try:
        _payloads.decode_plain(payload, words, dtype.mantissa, _scratch(words))
    except ValueError as error:
        raise InvalidDelivery(f"{where}: {error}") from None


def decode_nested(
    payloads: Bytes,
    sizes: Sequence[int],
    first: int,
    words: Words,
    dtype: Dtype,
    bits: int,
    levels: int,
    where: str,
) -> bool:
    """Put the words of levels from `first` on into a block; whether it is a stored one."""
    counts: NDArray[Any] = np.array(sizes, np.int64)
    try:
        stored: bool = _payloads.decode_nested(
            payloads, counts, first, words, dtype.mantissa, bits, levels, _scratch(words)
        )
        return stored
    except ValueError as error:
        raise InvalidDelivery(f"{where}: {error}") from None
