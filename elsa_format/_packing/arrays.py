"""Arrays in memory as a checkpoint."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elsa_format._container.dtypes import of_array
from elsa_format._container.header import TensorInfo
from elsa_format._packing.checkpoint import Checkpoint


class ArrayCheckpoint(Checkpoint):
    """Arrays in memory."""

    def __init__(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        self.path = "<arrays>"
        self._arrays = {name: np.asarray(array) for name, array in arrays.items()}
        self.tensors = {
            name: TensorInfo(name, of_array(array.dtype), array.shape)
            for name, array in self._arrays.items()
        }
        self.refuse_reserved()

    def blocks(self, name: str, size: int) -> Iterator[NDArray[np.uint8]]:
        """Slices of the array."""
        return array_blocks(self._arrays[name], size)


def array_blocks(array: NDArray[Any], size: int) -> Iterator[NDArray[np.uint8]]:
    """The bytes of an array in the order of its elements, `size` at a time."""
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    for start in range(0, flat.size, size):
        yield flat[start : start + size]
