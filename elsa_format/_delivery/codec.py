"""Words of a block to payloads and back: the C module where it is built, else numpy."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elsa_format._container.dtypes import Dtype
from elsa_format._delivery import pure
from elsa_format._delivery.pure import Words
from elsa_format._kernels import NATIVE
from elsa_format._memory import aligned

_payloads: Any = pure
if NATIVE:
    from elsa_format import _native

    _payloads = _native

Bytes = NDArray[np.uint8]
_EMPTY = np.empty(0, np.uint8)


_FREE: list[Bytes] = []
"""Memory of calls that have ended: new memory costs more than decoding into it."""


@contextmanager
def _memory(size: int) -> Iterator[Bytes]:
    """Memory for the time of a call. There is as much of it as there are calls at a time."""
    memory = _FREE.pop() if _FREE else _EMPTY
    if memory.size < size:
        memory = aligned(size)
    try:
        yield memory
    finally:
        _FREE.append(memory)


def _scratch(words: Words) -> AbstractContextManager[Bytes]:
    return _memory(_payloads.delivery_memory(words.size, words.itemsize)[0])


def _room(words: Words) -> AbstractContextManager[Bytes]:
    return _memory(_payloads.delivery_memory(words.size, words.itemsize)[1])


def encode_plain(words: Words, dtype: Dtype) -> Bytes:
    """The payload of a plain block."""
    with _room(words) as out, _scratch(words) as scratch:
        size = _payloads.encode_plain(words, dtype.mantissa, out, scratch)
        return out[:size].copy()


def encode_nested(words: Words, dtype: Dtype, bits: int, levels: int) -> list[Bytes]:
    """The payloads of a nested block in parts 1…T and the dense part."""
    sizes = np.zeros(levels + 1, np.int64)
    with _room(words) as out, _scratch(words) as scratch:
        size = _payloads.encode_nested(words, dtype.mantissa, bits, levels, out, sizes, scratch)
        joined = out[:size].copy()  # at once, as there may be 256 parts
    ends = np.cumsum(sizes).tolist()
    starts = [0, *ends[:-1]]
    return [joined[a:b] for a, b in zip(starts, ends, strict=True)]


def decode_plain(payload: Bytes, words: Words, dtype: Dtype) -> None:
    """Fill a plain block; a ValueError says what is wrong with its payload."""
    with _scratch(words) as scratch:
        _payloads.decode_plain(payload, words, dtype.mantissa, scratch)


def decode_nested(
    payloads: Bytes,
    sizes: Sequence[int],
    first: int,
    words: Words,
    dtype: Dtype,
    bits: int,
    levels: int,
) -> bool:
    """Put the words of levels from `first` on into a block; whether it is a stored one.

    A ValueError says what is wrong with its payloads.
    """
    counts: NDArray[Any] = np.array(sizes, np.int64)
    with _scratch(words) as scratch:
        stored: bool = _payloads.decode_nested(
            payloads, counts, first, words, dtype.mantissa, bits, levels, scratch
        )
    return stored
