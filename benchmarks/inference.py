"""What zeros gain when a network runs: a layer of 1024 × 1024 on one input, in one thread."""

import importlib
from typing import Any

import numpy as np

from benchmarks._files import Files
from benchmarks._rows import Race, Unavailable, row

SIDE = 1024


def layer(sparsity: float) -> Any:
    """A layer in which this share of the weights is zero."""
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((SIDE, SIDE)).astype(np.float32)
    weights[np.abs(weights) < np.quantile(np.abs(weights), sparsity)] = 0
    return weights


def module(name: str) -> Any:
    """A package that not everybody has."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise Unavailable(f"{name} is not installed") from None


def scipy_race(sparsity: float) -> Race:
    """A vector times a CSR matrix against the same with a dense one."""
    dense = layer(sparsity)
    sparse = module("scipy.sparse").csr_array(dense)
    x = np.ones(SIDE, np.float32)
    module("threadpoolctl").threadpool_limits(1)  # from here on; no other row uses BLAS
    return Race(lambda: sparse @ x, lambda: dense @ x, dense.nbytes)


def session(weights: Any) -> Any:
    """The layer in ONNX Runtime."""
    onnx, runtime = module("onnx"), module("onnxruntime")
    helper = onnx.helper
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "layer",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1, SIDE])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1, SIDE])],
        [onnx.numpy_helper.from_array(weights, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    options = runtime.SessionOptions()
    options.intra_op_num_threads = 1
    return runtime.InferenceSession(model.SerializeToString(), options)


@row("ONNX Runtime, layer with 95 % zeros", "the dense layer")
def onnx_runtime(files: Files) -> Race:
    """Its kernels multiply by zeros as by anything else."""
    sparse, dense = session(layer(0.95)), session(layer(0))
    x = {"x": np.ones((1, SIDE), np.float32)}
    return Race(lambda: sparse.run(None, x), lambda: dense.run(None, x), 4 * SIDE * SIDE)


@row("scipy CSR, 80 % zeros", "numpy, dense")
def scipy_80(files: Files) -> Race:
    """Index arithmetic eats the gain."""
    return scipy_race(0.8)


@row("scipy CSR, 90 % zeros", "numpy, dense")
def scipy_90(files: Files) -> Race:
    """About where it starts to pay."""
    return scipy_race(0.9)


@row("scipy CSR, 95 % zeros", "numpy, dense")
def scipy_95(files: Files) -> Race:
    """Half of the work of 90 %."""
    return scipy_race(0.95)
