"""Models of one sparse operator, and ways to run them."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from elsa_converters.sparse import find_library
from internals import function, to_csr, to_pattern
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper
from onnx.reference import ReferenceEvaluator

onnxruntime.set_default_logger_severity(4)

Arrays = dict[str, NDArray[Any]]
OPSET = 21


def library() -> Path | None:
    """The operators: those installed, or another build of them (with sanitizers, say)."""
    given = os.environ.get("ELSA_TEST_SPARSE")
    return Path(given) if given else find_library()


needs_library = pytest.mark.skipif(
    library() is None and not os.environ.get("CI"), reason="the sparse operators were not built"
)


def tensor(name: str, array: NDArray[Any]) -> TensorProto:
    """A tensor with raw data."""
    code = helper.np_dtype_to_tensor_dtype(array.dtype)
    return TensorProto(name=name, data_type=code, dims=array.shape, raw_data=array.tobytes())


def model(
    name: str,
    x: NDArray[Any],
    weights: Arrays,
    attributes: dict[str, Any],
    opset: int = OPSET,
    bits: int = 0,
) -> ModelProto:
    """A model of one operator; its axes are open, so that a session takes any shape."""
    adds = "Add" in name
    attributes = attributes | ({"bits": bits} if bits else {})
    ranks = {"x": x.ndim} | ({"sum": x.ndim} if adds else {})
    node = helper.make_node(name, ["x", *weights, *(["sum"] if adds else [])], ["y"], "node")
    node.domain = "elsa"
    node.attribute.extend(helper.make_attribute(key, value) for key, value in attributes.items())
    graph = helper.make_graph(
        [node],
        "graph",
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, [None] * r) for n, r in ranks.items()],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [None] * x.ndim)],
        [tensor(key, array) for key, array in weights.items()],
    )
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("elsa", 1)]
    made = helper.make_model(graph, opset_imports=imports, ir_version=10)
    made.functions.append(function(name, opset, integers=bool(bits)))
    return made


def matmul(
    x: NDArray[Any], weight: NDArray[Any], bias: NDArray[Any], ending: str = "", **options: Any
) -> ModelProto:
    """A product with a matrix that has a row for each output."""
    csr = to_csr(weight)
    weights = {"values": csr.values, "indices": csr.indices, "indptr": csr.indptr, "bias": bias}
    return model(f"SparseMatMul{ending}", x, weights, {"shape": weight.shape}, **options)


def pattern_matmul(
    x: NDArray[Any], weight: NDArray[Any], bias: NDArray[Any], ending: str = "", **options: Any
) -> ModelProto:
    """The same for a matrix that is n:m sparse."""
    pattern = to_pattern(weight)
    assert pattern is not None
    weights = {"values": pattern.values, "codes": pattern.codes, "bias": bias}
    attributes = {"pattern": [pattern.n, pattern.m], "scales": pattern.scales}
    return model(f"NMMatMul{ending}", x, weights, {"shape": weight.shape, **attributes}, **options)


def conv(
    x: NDArray[Any],
    weight: NDArray[Any],
    bias: NDArray[Any],
    strides: list[int],
    pads: list[int],
    ending: str = "",
    **options: Any,
) -> ModelProto:
    """A convolution."""
    csr = to_csr(weight.reshape(len(weight), -1))
    weights = {"values": csr.values, "indices": csr.indices, "indptr": csr.indptr, "bias": bias}
    attributes = {"shape": weight.shape, "strides": strides, "pads": pads}
    return model(f"SparseConv{ending}", x, weights, attributes, **options)


def session(made: ModelProto, *, sparse: bool, threads: int = 1) -> onnxruntime.InferenceSession:
    """A session with or without the operators."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    if sparse:
        options.register_custom_ops_library(str(library()))
    return onnxruntime.InferenceSession(made.SerializeToString(), options)


def stock_conv(
    x: NDArray[Any], weight: NDArray[Any], bias: NDArray[Any], strides: list[int], pads: list[int]
) -> NDArray[Any]:
    """ONNX Runtime's own convolution in double precision, by way of a matrix product."""
    sides = weight.ndim - 2
    padded = np.pad(
        x.astype(np.float64),
        [(0, 0), (0, 0), *((pads[i], pads[sides + i]) for i in range(sides))],
    )
    windows = np.lib.stride_tricks.sliding_window_view(
        padded, weight.shape[2:], axis=tuple(range(2, 2 + sides))
    )
    windows = windows[(slice(None), slice(None), *(slice(None, None, s) for s in strides))]
    axes = [1, *range(2 + sides, 2 + 2 * sides)]
    product = np.tensordot(windows, weight.astype(np.float64), (axes, list(range(1, 2 + sides))))
    return np.moveaxis(product, -1, 1) + bias.reshape(-1, *[1] * sides)


def close(found: NDArray[Any], expected: NDArray[Any], terms: int) -> bool:
    """Whether they agree up to the rounding of sums with so many terms of size 1."""
    if found.shape != expected.shape:
        return False
    bound = 1e-6 * (1 + np.sqrt(terms)) * 8
    return bool(np.all(np.abs(found - expected) <= bound + 1e-6 * np.abs(expected)))


def run_everywhere(made: ModelProto, feeds: Arrays, *, reference: bool) -> list[NDArray[Any]]:
    """What the model gives with the operators, without them, and by ONNX's own evaluator."""
    onnx.checker.check_model(made, full_check=True)
    found = [session(made, sparse=sparse).run(None, feeds)[0] for sparse in (True, False)]
    if reference:
        found.append(ReferenceEvaluator(made).run(None, feeds)[0])
    return found
