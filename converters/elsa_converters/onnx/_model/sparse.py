"""Sparse initializers: coordinates and values, read into dense tensors and written from levels."""

import math
from typing import Any

import numpy as np
from onnx import GraphProto, SparseTensorProto, TensorProto

from elsa_converters._errors import InvalidOnnx, UnsupportedOnnx
from elsa_converters.onnx._model.tensors import FROM_ONNX, TO_ONNX, typed_content
from elsa_format.plugins import TensorInfo

INDEX_BYTES = 8  # ONNX has 64-bit coordinates only
_LARGEST_EXPANDED = 1 << 31


def is_smaller_sparse(info: TensorInfo, kept: int) -> bool:
    """Whether coordinates and values take fewer bytes than the dense tensor.

    For float32 that is from two thirds of zeros on.
    """
    return kept * (INDEX_BYTES + info.dtype.size // 8) < info.nbytes


def sparse_header(info: TensorInfo, kept: int) -> tuple[TensorProto, TensorProto]:
    """The tensors of a sparse initializer without their data: values, then linear indices."""
    values = TensorProto(name=info.name, data_type=TO_ONNX[info.dtype.name], dims=[kept])
    # No name of its own: the checker takes one that repeats elsewhere for a second definition.
    indices = TensorProto(data_type=TensorProto.INT64, dims=[kept])
    return values, indices


def coordinates(words: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Places of the non-zero bit patterns in the flattened tensor, ascending."""
    return np.flatnonzero(words).astype("<i8", copy=False)


def expand_sparse(graph: GraphProto, where: str) -> None:
    """Replace the sparse initializers of a graph by dense ones."""
    for sparse in graph.sparse_initializer:
        graph.initializer.append(_expanded(sparse, f"{where}: tensor {sparse.values.name!r}"))
    del graph.sparse_initializer[:]


def _expanded(sparse: SparseTensorProto, where: str) -> TensorProto:
    values, shape = sparse.values, tuple(sparse.dims)
    dtype = FROM_ONNX.get(values.data_type)
    if dtype is None:
        raise UnsupportedOnnx(f"{where}: sparse data type {values.data_type}")
    elements = math.prod(shape)
    if min(shape, default=1) < 0 or elements * dtype.size // 8 > _LARGEST_EXPANDED:
        raise UnsupportedOnnx(f"{where}: sparse shape {list(shape)}, expected at most 2 GiB")
    content = typed_content(values, dtype)
    if len(content) != math.prod(values.dims) * dtype.size // 8:
        raise InvalidOnnx(f"{where}: {len(content)} bytes for {list(values.dims)} sparse values")
    kept = np.frombuffer(content, dtype.words)
    places = _linear(sparse, shape, len(kept), where)
    dense = np.zeros(elements, dtype.words)
    if places.size and not 0 <= places.min() <= places.max() < elements:
        raise InvalidOnnx(f"{where}: a sparse index is outside the shape {list(shape)}")
    dense[places] = kept
    return TensorProto(
        name=values.name, data_type=values.data_type, dims=shape, raw_data=dense.tobytes()
    )


def _linear(
    sparse: SparseTensorProto, shape: tuple[int, ...], count: int, where: str
) -> np.ndarray[Any, Any]:
    content = typed_content(sparse.indices, FROM_ONNX[TensorProto.INT64])
    dims = tuple(sparse.indices.dims)
    complete = len(content) == INDEX_BYTES * math.prod(dims)
    if dims == (count,) and complete:
        return np.frombuffer(content, "<i8")
    if dims == (count, len(shape)) and complete:
        rows = np.frombuffer(content, "<i8").reshape(count, len(shape))
        if (rows < 0).any() or (rows >= np.array(shape)).any():
            raise InvalidOnnx(f"{where}: a sparse index is outside the shape {list(shape)}")
        strides = np.array([math.prod(shape[axis + 1 :]) for axis in range(len(shape))], np.int64)
        return np.asarray(rows @ strides)
    raise InvalidOnnx(f"{where}: sparse indices of shape {list(dims)} for {count} values")
