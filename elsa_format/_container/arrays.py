"""The bytes of a tensor as an array, and arrays that tensors go to."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from elsa_format._container.header import TensorInfo
from elsa_format._errors import UnknownDtype, UnsupportedFeature


def as_array(flat: NDArray[np.uint8], info: TensorInfo, where: str) -> NDArray[Any]:
    """Bytes as an array of the tensor's dtype and shape."""
    if info.dtype.numpy is None:
        raise UnknownDtype(f"{where}: tensor {info.name!r}: numpy has no dtype {info.dtype.name}")
    try:
        return flat.view(info.dtype.numpy).reshape(info.shape)
    except ValueError:
        raise UnsupportedFeature(
            f"{where}: tensor {info.name!r}: numpy has no arrays of {len(info.shape)} dimensions"
        ) from None


def check_out(out: NDArray[Any], dtype: Any, shape: tuple[int, ...], what: str = "") -> None:
    """Refuse memory that a result cannot be written to as it is."""
    if (out.shape, out.dtype) != (shape, dtype):
        raise ValueError(
            f"out of {out.dtype} {list(out.shape)}{what}, expected {dtype} {list(shape)}"
        )
    if not out.flags.c_contiguous or not out.flags.writeable:
        raise ValueError(f"out{what}: expected contiguous, writable memory")
