"""The dtypes of safetensors, and what nesting needs to know about four of them (spec §3.3)."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import ml_dtypes
import numpy as np


@dataclass(frozen=True)
class Dtype:
    """One safetensors dtype."""

    name: str
    size: int
    """Bits per element."""
    numpy: "np.dtype[Any] | None" = None
    """None for the packed sub-byte dtypes, which numpy cannot hold."""
    mantissa: int = 0
    """Stored mantissa bits of a dtype that can carry counters, else 0."""

    @property
    def nestable(self) -> bool:
        """Whether tensors of this dtype may carry counters."""
        return self.mantissa > 0

    @cached_property
    def words(self) -> "np.dtype[Any]":
        """The little-endian unsigned dtype of the same width."""
        return np.dtype(f"<u{self.size // 8}")

    @property
    def infinity(self) -> int:
        """The bit pattern of +Inf: all exponent bits, no mantissa."""
        return (1 << (self.size - 1)) - (1 << self.mantissa)


def _dtype(name: str, size: int, numpy: Any = None, mantissa: int = 0) -> Dtype:
    return Dtype(name, size, None if numpy is None else np.dtype(numpy), mantissa)


DTYPES = {
    dtype.name: dtype
    for dtype in (
        _dtype("F4", 4),
        _dtype("F6_E2M3", 6),
        _dtype("F6_E3M2", 6),
        _dtype("BOOL", 8, np.bool_),
        _dtype("U8", 8, np.uint8),
        _dtype("I8", 8, np.int8),
        _dtype("F8_E5M2", 8, ml_dtypes.float8_e5m2),
        _dtype("F8_E4M3", 8, ml_dtypes.float8_e4m3fn),
        _dtype("F8_E8M0", 8, ml_dtypes.float8_e8m0fnu),
        _dtype("F8_E4M3FNUZ", 8, ml_dtypes.float8_e4m3fnuz),
        _dtype("F8_E5M2FNUZ", 8, ml_dtypes.float8_e5m2fnuz),
        _dtype("I16", 16, "<i2"),
        _dtype("U16", 16, "<u2"),
        _dtype("F16", 16, "<f2", mantissa=10),
        _dtype("BF16", 16, ml_dtypes.bfloat16, mantissa=7),
        _dtype("I32", 32, "<i4"),
        _dtype("U32", 32, "<u4"),
        _dtype("F32", 32, "<f4", mantissa=23),
        _dtype("C64", 64, "<c8"),
        _dtype("F64", 64, "<f8", mantissa=52),
        _dtype("I64", 64, "<i8"),
        _dtype("U64", 64, "<u8"),
    )
}

_BY_NUMPY = {dtype.numpy: dtype for dtype in DTYPES.values() if dtype.numpy is not None}


def of_array(dtype: "np.dtype[Any]") -> Dtype:
    """The safetensors dtype of a numpy dtype.

    >>> of_array(np.dtype("float32")).name
    'F32'
    """
    found = _BY_NUMPY.get(dtype.newbyteorder("<") if dtype.kind in "iufc" else dtype)
    if found is None:
        raise TypeError(f"dtype {dtype} cannot be stored in safetensors")
    return found
