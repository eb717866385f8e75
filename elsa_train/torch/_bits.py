"""Counters in the low bits of tensors, on any device (spec §4). All tests are on bit patterns."""

import torch
from torch import Tensor

WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def words_of(x: Tensor) -> Tensor:
    """The bit patterns, as signed integers: the sign bit is the sign."""
    return x.view(WORDS[x.element_size()])


def _word(value: float, dtype: torch.dtype) -> int:
    return int(words_of(torch.tensor(value, dtype=dtype)).item())


def magnitudes(x: Tensor) -> Tensor:
    """The bit patterns without the sign."""
    words = words_of(x)
    return words & torch.iinfo(words.dtype).max


def is_nonzero(x: Tensor) -> Tensor:
    """Where any bit but the sign is set: denormals, which a device may flush, are not zero.

    >>> is_nonzero(torch.tensor([0.0, -0.0, 1e-42, 2.0])).tolist()
    [False, False, True, True]
    """
    return magnitudes(x) != 0


def flush(x: Tensor, bits: int) -> Tensor:
    """Turn -0, denormals and what a counter could make denormal into +0.

    >>> flush(torch.tensor([-0.0, 1e-42, 2.0]), bits=2).tolist()
    [0.0, 0.0, 2.0]
    """
    tiny = _word(torch.finfo(x.dtype).smallest_normal, x.dtype)
    return torch.where(magnitudes(x) < tiny + (1 << bits), torch.zeros_like(x), x)


def embed(x: Tensor, counter: int, bits: int) -> Tensor:
    """The nearest values with a counter in their low bits, on the same side of zero, below Inf.

    >>> stamped = embed(torch.tensor([0.5, -2.0]), 3, bits=2)
    >>> (words_of(stamped) & 3).tolist()
    [3, 3]
    """
    words, magnitude = words_of(x), magnitudes(x)
    step, half = 1 << bits, 1 << (bits - 1)
    low = magnitude & (step - 1)
    q = magnitude - low + counter
    down = (low + half <= counter) & (q >= step)
    up = (low > counter + half) & (q + step < _word(torch.inf, x.dtype))
    q = torch.where(down, q - step, torch.where(up, q + step, q))
    sign = words & torch.iinfo(words.dtype).min
    return (sign | q).view(x.dtype)
