"""Small ONNX models, one for each way in which models differ, and what the tests do with them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from elsa_converters.onnx import OnnxCheckpoint
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper

import elsa_format

onnxruntime.set_default_logger_severity(3)

Arrays = dict[str, NDArray[Any]]
SPARSITIES = [95, 80, 50]


def value(name: str, shape: Sequence[int | str], code: int = TensorProto.FLOAT) -> Any:
    """An input or output of a graph."""
    return helper.make_tensor_value_info(name, code, shape)


def tensor(name: str, array: NDArray[Any], code: int | None = None) -> TensorProto:
    """A tensor with raw data."""
    code = helper.np_dtype_to_tensor_dtype(array.dtype) if code is None else code
    return TensorProto(name=name, data_type=code, dims=array.shape, raw_data=array.tobytes())


def constant(name: str, array: NDArray[Any]) -> NodeProto:
    """A Constant node."""
    return helper.make_node("Constant", [], [name], value=tensor("", array))


def graph(
    nodes: Sequence[NodeProto],
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    initializers: Sequence[TensorProto] = (),
    name: str = "g",
) -> GraphProto:
    """A graph."""
    return helper.make_graph(nodes, name, inputs, outputs, initializers)


def model(main: GraphProto, opset: int = 21, ir_version: int = 10) -> ModelProto:
    """A model that onnxruntime accepts."""
    imports = [helper.make_opsetid("", opset)]
    return helper.make_model(main, opset_imports=imports, ir_version=ir_version)


def save(proto: ModelProto, path: Path) -> Path:
    """Write a model as one file, checked."""
    onnx.checker.check_model(proto)
    path.write_bytes(proto.SerializeToString())
    return path


def weights(*shape: int, seed: int = 0, dtype: Any = np.float32) -> NDArray[Any]:
    """Random weights, none of them zero."""
    array = np.random.default_rng(seed).standard_normal(shape).astype(dtype)
    return np.where(array == 0, np.ones((), dtype), array)


def mlp(opset: int = 21, dtype: Any = np.float32, ir_version: int = 10) -> ModelProto:
    """x @ w1 + b1, ReLU, @ w2."""
    code = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    nodes = [
        helper.make_node("MatMul", ["x", "w1"], ["h"]),
        helper.make_node("Add", ["h", "b1"], ["a"]),
        helper.make_node("Relu", ["a"], ["r"]),
        helper.make_node("MatMul", ["r", "w2"], ["y"]),
    ]
    initializers = [
        tensor("w1", weights(16, 40, seed=1, dtype=dtype)),
        tensor("b1", weights(40, seed=2, dtype=dtype)),
        tensor("w2", weights(40, 8, seed=3, dtype=dtype)),
    ]
    main = graph(nodes, [value("x", ["n", 16], code)], [value("y", ["n", 8], code)], initializers)
    return model(main, opset, ir_version)


def conv_bn(seed: int = 0, opset: int = 21) -> ModelProto:
    """Conv, BatchNormalization, ReLU, ConvTranspose in groups, BatchNormalization, global pool."""
    nodes = [
        helper.make_node("Conv", ["x", "c1.w", "c1.b"], ["c1"], pads=[1, 1, 1, 1]),
        helper.make_node("BatchNormalization", ["c1", *_bn("n1")], ["n1"], epsilon=1e-3),
        helper.make_node("Relu", ["n1"], ["r1"]),
        helper.make_node("ConvTranspose", ["r1", "c2.w"], ["c2"], group=2),
        helper.make_node("BatchNormalization", ["c2", *_bn("n2")], ["n2"]),
        helper.make_node("GlobalAveragePool", ["n2"], ["y"]),
    ]
    arrays = {
        "c1.w": weights(8, 3, 3, 3, seed=seed + 1),
        "c1.b": weights(8, seed=seed + 2),
        "c2.w": weights(8, 6, 2, 2, seed=seed + 3),
        **statistics("n1", 8, seed + 4),
        **statistics("n2", 12, seed + 5),
    }
    main = graph(
        nodes,
        [value("x", ["n", 3, 8, 8])],
        [value("y", ["n", 12, 1, 1])],
        [tensor(name, array) for name, array in arrays.items()],
    )
    return model(main, opset)


def _bn(name: str) -> list[str]:
    return [f"{name}.{part}" for part in ("scale", "bias", "mean", "var")]


def statistics(name: str, channels: int, seed: int) -> Arrays:
    """Parameters of a batch norm."""
    scale, bias, mean, var = weights(4, channels, seed=seed)
    return {
        f"{name}.scale": scale,
        f"{name}.bias": bias,
        f"{name}.mean": mean,
        f"{name}.var": np.abs(var) + 0.1,
    }


def write_with_statistics(path: Path, proto: ModelProto) -> Path:
    """An ELSA file of a model whose batch-norm statistics differ from level to level."""
    arrays = {t.name: onnx.numpy_helper.to_array(t) for t in proto.graph.initializer}
    nested = [name for name, array in arrays.items() if array.ndim >= 2]
    per_level = {
        name: [array + t for t in (1, 2, 3)]
        for name, array in arrays.items()
        if name.endswith((".mean", ".var"))
    }
    rng = np.random.default_rng(9)
    for name in nested:
        counters = rng.integers(0, 4, arrays[name].shape).astype(np.uint8)
        arrays[name] = elsa_format.embed_counters(arrays[name], counters, 2)
    levels = [elsa_format.LevelSpec(name) for name in ("sparsest", "middle", "densest")]
    elsa_format.write(path, arrays, bits=2, levels=levels, nested=nested, per_level=per_level)
    return path


def packed(source: Path, folder: Path) -> tuple[Path, Path]:
    """Pack a model and write its template: (ELSA file, template)."""
    elsa, template = folder / "net.safetensors", folder / "net.onnx"
    checkpoint = OnnxCheckpoint(source)
    elsa_format.pack(checkpoint, elsa, sparsities=SPARSITIES)
    checkpoint.write_template(template, elsa)
    onnx.checker.check_model(template)
    return elsa, template


def run(source: Any, feeds: Mapping[str, Any], *, plain: bool = False) -> list[Any]:
    """Outputs of a model; `plain` without the optimizations that differ for constant weights."""
    if isinstance(source, onnxruntime.InferenceSession):
        return list(source.run(None, dict(feeds)))
    if isinstance(source, ModelProto):
        source = source.SerializeToString()
    if isinstance(source, Path):
        source = str(source)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    if plain:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.add_session_config_entry("session.disable_prepacking", "1")
    session = onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    return list(session.run(None, dict(feeds)))


def assert_same(found: Sequence[Any], expected: Sequence[Any]) -> None:
    """Equal bit for bit."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def assert_near(found: Sequence[Any], expected: Sequence[Any], tolerance: float = 1e-4) -> None:
    """Equal but for the rounding that counters or another order of sums cause."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


def initializers(path: Path) -> Arrays:
    """The initializers of a model, sparse ones expanded."""
    proto = onnx.load(path)
    arrays = {t.name: onnx.numpy_helper.to_array(t) for t in proto.graph.initializer}
    for sparse in proto.graph.sparse_initializer:
        values = onnx.numpy_helper.to_array(sparse.values)
        dense = np.zeros(np.prod(sparse.dims), values.dtype)
        dense[onnx.numpy_helper.to_array(sparse.indices)] = values
        arrays[sparse.values.name] = dense.reshape(sparse.dims)
    return arrays
