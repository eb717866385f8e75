"""Weights without their zeros, packed, checked and multiplied by the library of `sparse`."""

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from elsa_converters._errors import MissingOperators
from elsa_converters.sparse import find_library
from elsa_converters.sparse._weights import MOST_COLUMNS, parts_of

DTYPES = (torch.float32, torch.bfloat16)
"""Of inputs and weights, each by itself."""
_POINTER, _LONG, _TEXT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_char_p
_FUNCTIONS: dict[str, tuple[Any, Sequence[Any]]] = {
    "elsa_count": (_LONG, [_POINTER, ctypes.c_int, _LONG, _LONG, _POINTER, _POINTER]),
    "elsa_pack": (
        None,
        [_POINTER, ctypes.c_int, _LONG, _LONG, _POINTER, _POINTER, _POINTER, _POINTER],
    ),
    "elsa_unpack": (
        None,
        [_POINTER, _POINTER, _POINTER, ctypes.c_int, _LONG, _LONG, _POINTER, _POINTER],
    ),
    "elsa_open": (
        _POINTER,
        [
            *(_POINTER, _LONG, _POINTER, ctypes.c_int, _POINTER, _POINTER, _POINTER, _LONG),
            ctypes.POINTER(_TEXT),
        ],
    ),
    "elsa_close": (None, [_POINTER]),
    "elsa_linear": (_TEXT, [_POINTER, _POINTER, ctypes.c_int, _LONG, _POINTER, _POINTER, _LONG]),
    "elsa_conv2d": (
        _TEXT,
        [*(_POINTER, _POINTER, ctypes.c_int), *(_LONG,) * 3, _POINTER, _POINTER, _LONG],
    ),
}


@cache
def library() -> Any:
    """The functions of the C library."""
    path = find_library()
    if path is None:
        raise MissingOperators("layers stay dense", "{fast} does without them", fast=False)
    loaded = ctypes.CDLL(str(path))
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded


class Packed(NamedTuple):
    """A matrix in compressed rows, cut into parts of columns: tensors that any process can read."""

    values: Tensor
    columns: Tensor
    """16 bits without a sign, which few functions of PyTorch know, in those of int16."""
    starts: Tensor
    """Of each part, where its rows begin."""


def _bounds(columns: int, parts: int) -> Any:
    """Where the parts begin, and where the last one ends; a convolution's rows are not cut."""
    ends = [columns] if parts == 1 else [end for _, end in parts_of(columns)]
    return (_LONG * (len(ends) + 1))(0, *ends)


def pack(matrix: Tensor, *, parts: bool = True) -> Packed | None:
    """Pack a contiguous matrix on the CPU; None if it is one that the library does not take."""
    outputs, columns = matrix.shape
    count = len(parts_of(columns)) if parts else 1
    if matrix.dtype not in DTYPES or not outputs or not 0 < columns <= MOST_COLUMNS * count:
        return None
    bounds, half = _bounds(columns, count), matrix.dtype == torch.bfloat16
    with torch.inference_mode(False):  # of others it cannot be told whether they have changed
        starts = torch.empty((count, outputs + 1), dtype=torch.int32)
        shape = (outputs, count, bounds)
        found = library().elsa_count(matrix.data_ptr(), half, *shape, starts.data_ptr())
        if found < 0:
            return None
        packed = Packed(
            torch.empty(found, dtype=matrix.dtype), torch.empty(found, dtype=torch.int16), starts
        )
        pointers = (starts.data_ptr(), packed.columns.data_ptr(), packed.values.data_ptr())
        library().elsa_pack(matrix.data_ptr(), half, *shape, *pointers)
    return packed


def count_kept(weight: Tensor) -> int:
    """How many values a contiguous weight on the CPU has once it is packed; -1 if too many.

    PyTorch's own count takes seven times as long.
    """
    starts = torch.empty((1, weight.shape[0] + 1), dtype=torch.int32)
    bounds = (_LONG * 2)(0, weight[0].numel())
    half = weight.dtype == torch.bfloat16
    shape = (weight.shape[0], 1, bounds)
    return int(library().elsa_count(weight.data_ptr(), half, *shape, starts.data_ptr()))


def unpack(packed: Packed, columns: int) -> Tensor:
    """The matrix again, with its zeros."""
    parts, outputs = packed.starts.shape[0], packed.starts.shape[1] - 1
    prepared(packed, (outputs, columns, 1, 1, 1, 1, 0, 0, 0, 0))
    half = packed.values.dtype == torch.bfloat16
    with torch.inference_mode(False):
        matrix = torch.zeros((outputs, columns), dtype=packed.values.dtype)
        pointers = (packed.starts.data_ptr(), packed.columns.data_ptr(), packed.values.data_ptr())
        bounds = _bounds(columns, parts)
        library().elsa_unpack(*pointers, half, outputs, parts, bounds, matrix.data_ptr())
    return matrix


class _Layer:
    """What the library has checked and prepared, for as long as the weights are in memory."""

    def __init__(self, packed: Packed, shape: tuple[int, ...]) -> None:
        self.pointer = None
        values, columns, starts = packed
        kinds = values.dtype in DTYPES, columns.dtype == torch.int16, starts.dtype == torch.int32
        same = values.dim() == 1 and values.shape == columns.shape
        if not all(kinds) or not same or starts.dim() != 2 or starts.shape[1] != shape[0] + 1:
            raise ValueError("elsa: values, columns and starts are no packed matrix")
        if not all(t.device.type == "cpu" and t.is_contiguous() for t in packed):
            raise ValueError("elsa: packed weights must be contiguous, and on the CPU")
        width = shape[1] * shape[2] * shape[3]
        bounds, wrong = _bounds(width, starts.shape[0]), _TEXT()
        if len(bounds) != starts.shape[0] + 1:
            raise ValueError(f"elsa: {width} columns have other parts than the packed matrix")
        self.pointer = library().elsa_open(
            (_LONG * 10)(*shape),
            starts.shape[0],
            bounds,
            values.dtype == torch.bfloat16,
            starts.data_ptr(),
            columns.data_ptr(),
            values.data_ptr(),
            values.numel(),
            ctypes.byref(wrong),
        )
        if not self.pointer:
            raise ValueError(f"elsa: {(wrong.value or b'').decode()}")
        self.close = library().elsa_close
        self.storages = [StorageWeakRef(tensor.untyped_storage()) for tensor in packed]

    def __del__(self) -> None:
        if self.pointer:
            self.close(self.pointer)


_LAYERS: dict[object, _Layer] = {}
"""By the storages of the packed weights: a weak reference keeps their identity from being used
again, so that what was checked is what is there."""
_swept = 0


def prepared(packed: Packed, shape: tuple[int, ...]) -> Any:
    """The library's handle of a layer: outputs, inputs, 2 sides, 2 strides, 4 pads."""
    key = (
        *(tensor.untyped_storage()._cdata for tensor in packed),
        *(tensor.data_ptr() for tensor in packed),
        *(tensor.numel() for tensor in packed),
        shape,
    )
    layer = _LAYERS.get(key)
    if layer is None:
        _forget_freed()
        layer = _LAYERS[key] = _Layer(packed, shape)
    return layer.pointer


def _forget_freed() -> None:
    """Now and then, drop what was prepared for weights that are gone."""
    global _swept
    if len(_LAYERS) >= 2 * _swept:
        for key, layer in list(_LAYERS.items()):
            if any(storage.expired() for storage in layer.storages):
                _LAYERS.pop(key, None)
        _swept = max(len(_LAYERS), 64)
