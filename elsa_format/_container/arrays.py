"""The bytes of a tensor as an array."""

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
