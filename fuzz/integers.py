"""Sparse operators that compute with integers, on weights and inputs of any bits.

What they give is what floats give, bit for bit, or within the bound that `native/integer.c` states.
"""

import os
from functools import cache
from typing import Any

import numpy as np
from elsa_converters.sparse import find_library
from internals import to_csr

from fuzz.kernels import Choices

LIBRARY = os.environ.get("ELSA_TEST_SPARSE") or find_library()


@cache
def _onnx() -> Any:
    """ONNX and its runtime, which take long to import, without a word from either."""
    import onnx
    import onnxruntime

    onnxruntime.set_default_logger_severity(4)
    return onnx, onnxruntime


def _run(weight: Any, x: Any, bits: int) -> Any:
    """The product of x and a matrix with a row for each output."""
    onnx, runtime = _onnx()
    csr = to_csr(weight)
    arrays = {"values": csr.values, "indices": csr.indices, "indptr": csr.indptr}
    arrays["bias"] = np.zeros(len(weight), np.float32)
    attributes = {"shape": weight.shape} | ({"bits": bits} if bits else {})
    node = onnx.helper.make_node("SparseMatMul", ["x", *arrays], ["y"], domain="elsa", **attributes)
    graph = onnx.helper.make_graph(
        [node],
        "graph",
        [onnx.helper.make_tensor_value_info("x", 1, x.shape)],
        [onnx.helper.make_tensor_value_info("y", 1, None)],
        [onnx.numpy_helper.from_array(array, name) for name, array in arrays.items()],
    )
    imports = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid("elsa", 1)]
    made = onnx.helper.make_model(graph, opset_imports=imports, ir_version=10)
    options = runtime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    options.register_custom_ops_library(str(LIBRARY))
    return runtime.InferenceSession(made.SerializeToString(), options).run(None, {"x": x})[0]


def _bound(weight: Any, x: Any, bits: int) -> Any:
    sizes, count = np.abs(weight), (weight != 0).sum(1)
    if bits == 16:
        of_x = np.abs(x).max(1) / 16383 / 2
        of_weight = np.maximum(sizes.max(1) / 32766, sizes.sum(1) / (131070 - count / 2)) / 2
    else:
        of_x = (np.maximum(x.max(1), 0) - np.minimum(x.min(1), 0)) / 255 / 2
        of_weight = sizes.max(1) / 127 / 2
    error = of_x[:, None] * sizes.sum(1) + (np.abs(x) @ (weight != 0).T) * of_weight
    error += of_x[:, None] * of_weight * count
    return 1.0001 * error + 4e-6 * (np.abs(x) @ sizes.T) + 1e-37


def integers(data: bytes) -> None:
    """Run a product in integers and in floats, and compare both with the definition."""
    if LIBRARY is None:
        return
    choices = Choices(data)
    bits = (16, 8)[choices.byte() % 2]
    rows, outputs, width = (1 + choices.byte() % most for most in (70, 40, 200))
    kinds = choices.byte()
    weight = choices.array(np.float32, outputs * width).reshape(outputs, width)
    x = choices.array(np.float32, rows * width).reshape(rows, width)
    with np.errstate(all="ignore"):
        if kinds & 1:  # of sizes that integers are for
            weight = np.ldexp(np.frexp(weight)[0], kinds % 7)
        if kinds & 2:
            x = np.ldexp(np.frexp(x)[0], kinds % 5)
    if kinds & 12:  # as sparse as levels are
        weight[np.arange(weight.size).reshape(weight.shape) % (kinds >> 2) != 0] = 0
    with np.errstate(all="ignore"):
        found, floats = _run(weight, x, bits), _run(weight, x, 0)
        if np.array_equal(found, floats, equal_nan=True):
            return
        wide, wider = weight.astype(np.float64), x.astype(np.float64)
        near = np.abs(found - wider @ wide.T) <= _bound(wide, wider, bits)
    if not near.all():
        raise AssertionError(f"{bits} bits, {rows} × {width} × {outputs}: outside the bound")
