"""Give a session tensors that are in memory, without a copy in the model's own bytes."""

from typing import Any

import onnxruntime
from numpy.typing import NDArray
from onnx import ModelProto

from elsa_converters.onnx._weights import TO_ONNX
from elsa_converters.onnx._wire import LARGE
from elsa_converters.onnx._writer import header_of, point_to
from elsa_format.plugins import TensorInfo, of_array


def info_of_array(name: str, array: NDArray[Any]) -> TensorInfo:
    """An array as an initializer."""
    return TensorInfo(name, of_array(array.dtype), array.shape)


def with_values(proto: ModelProto, arrays: dict[str, NDArray[Any]]) -> tuple[bytes, dict[str, Any]]:
    """The model's bytes with placeholders for its tensors, and the tensors.

    These must live until the session exists, which has copies of its own.
    """
    full, values = ModelProto(), {}
    full.CopyFrom(proto)
    for name, array in arrays.items():
        info = info_of_array(name, array)
        tensor = header_of(info)
        if info.nbytes < LARGE:
            # Small ones are copied into the graph, where shape inference can see them.
            tensor.raw_data = array.tobytes()
        else:
            point_to(tensor, "elsa", 0, info.nbytes)
            code = TO_ONNX[info.dtype.name]
            values[name] = onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array, code)
        full.graph.initializer.append(tensor)
    return full.SerializeToString(), values
