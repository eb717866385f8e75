"""Weights are found wherever a model keeps them, and the right ones are nested."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_models as m
import pytest
from elsa_converters.onnx import OnnxCheckpoint
from onnx import TensorProto, helper

import elsa_format


def content(checkpoint: OnnxCheckpoint, name: str) -> bytes:
    return b"".join(block.tobytes() for block in checkpoint.blocks(name, 64))


def nested(checkpoint: OnnxCheckpoint) -> set[str]:
    return {name for name in checkpoint.tensors if checkpoint.nestable(name)}


def test_a_dense_session_of_the_template_runs_the_packed_network(tmp_path: Path) -> None:
    proto = m.mlp()
    elsa, template = m.packed(m.save(proto, tmp_path / "m.onnx"), tmp_path)
    with elsa_format.open(elsa) as file:
        dense = file.load("dense")
    for tensor in proto.graph.initializer:
        tensor.raw_data = dense[tensor.name].tobytes()
    feeds = {"x": m.weights(5, 16)}
    m.assert_same(m.run(template, feeds), m.run(proto, feeds))
    assert template.stat().st_size < 2000


def test_blocks_have_the_size_asked_for(tmp_path: Path) -> None:
    checkpoint = OnnxCheckpoint(m.save(m.mlp(), tmp_path / "m.onnx"))
    assert [b.size for b in checkpoint.blocks("w1", 1000)] == [1000, 1000, 560]


@pytest.mark.parametrize(
    ("code", "field", "array"),
    [
        (TensorProto.FLOAT, "float_data", m.weights(4, 3)),
        (TensorProto.DOUBLE, "double_data", m.weights(4, 3, dtype=np.float64)),
        (TensorProto.FLOAT16, "int32_data", m.weights(4, 3, dtype=np.float16)),
        (TensorProto.BFLOAT16, "int32_data", m.weights(4, 3, dtype=ml_dtypes.bfloat16)),
    ],
)
def test_typed_data_is_read(tmp_path: Path, code: int, field: str, array: Any) -> None:
    typed = TensorProto(name="w", data_type=code, dims=array.shape)
    numbers = array.view(np.uint16).reshape(-1) if field == "int32_data" else array.reshape(-1)
    getattr(typed, field).extend(numbers.tolist())
    nodes = [
        helper.make_node("Cast", ["w"], ["f"], to=1),
        helper.make_node("MatMul", ["x", "f"], ["y"]),
    ]
    main = m.graph(nodes, [m.value("x", ["n", 4])], [m.value("y", ["n", 3])], [typed])
    checkpoint = OnnxCheckpoint(m.save(m.model(main), tmp_path / "m.onnx"))
    assert content(checkpoint, "w") == array.tobytes()
    assert nested(checkpoint) == {"w"}


def test_external_data_is_read(tmp_path: Path) -> None:
    proto = m.mlp()
    expected = {t.name: t.raw_data for t in proto.graph.initializer}
    path = tmp_path / "m.onnx"
    onnx.save(proto, path, save_as_external_data=True, location="sub.bin", size_threshold=0)
    checkpoint = OnnxCheckpoint(path)
    assert {name: content(checkpoint, name) for name in checkpoint.tensors} == expected


def test_constants_and_branches_give_their_weights_up(tmp_path: Path) -> None:
    """Both branches call their weight `w`; one returns a weight as it is."""
    first, second, returned = (m.weights(4, 4, seed=s) for s in range(3))

    def branch(name: str, array: Any) -> onnx.GraphProto:
        nodes = [
            m.constant("w", array),
            helper.make_node("MatMul", ["x", "w"], ["h"]),
            helper.make_node("Add", ["h", "extra"], ["y"]),
        ]
        outputs = [m.value("y", [4, 4]), m.value("extra", [4, 4])]
        return m.graph(nodes, [], outputs, [m.tensor("extra", returned)], name)

    node = helper.make_node(
        "If",
        ["c"],
        ["a", "b"],
        then_branch=branch("yes", first),
        else_branch=branch("no", second),
    )
    main = m.graph(
        [node],
        [m.value("c", [], TensorProto.BOOL), m.value("x", [4, 4])],
        [m.value("a", [4, 4]), m.value("b", [4, 4])],
    )
    source = m.save(m.model(main), tmp_path / "m.onnx")
    checkpoint = OnnxCheckpoint(source)
    assert set(checkpoint.tensors) == {"yes.w", "no.w", "yes.extra", "no.extra"}
    assert content(checkpoint, "no.w") == second.tobytes()
    assert nested(checkpoint) == {"yes.w", "no.w"}
    _, template = m.packed(source, tmp_path)
    for flag in (True, False):
        feeds = {"c": np.array(flag), "x": m.weights(4, 4, seed=7)}
        found, expected = m.run(template, feeds), m.run(source, feeds)
        m.assert_near(found[:1], expected[:1])
        m.assert_same(found[1:], expected[1:])


def test_weights_leave_loops_and_scans(tmp_path: Path) -> None:
    array, scanned = m.weights(4, 4), m.weights(4, 4, seed=1)
    body = m.graph(
        [
            helper.make_node("Identity", ["c_in"], ["c_out"]),
            helper.make_node("MatMul", ["s_in", "w"], ["s_out"]),
        ],
        [m.value("i", [], 7), m.value("c_in", [], 9), m.value("s_in", [4, 4])],
        [m.value("c_out", [], 9), m.value("s_out", [4, 4])],
        [m.tensor("w", array)],
        "loop",
    )
    step = m.graph(
        [
            m.constant("w", scanned),
            helper.make_node("MatMul", ["row", "w"], ["product"]),
            helper.make_node("Add", ["sum", "product"], ["sum_out"]),
        ],
        [m.value("sum", [4]), m.value("row", [4])],
        [m.value("sum_out", [4])],
        name="scan",
    )
    nodes = [
        helper.make_node("Loop", ["trips", "", "x"], ["h"], body=body),
        helper.make_node("Scan", ["start", "h"], ["y"], body=step, num_scan_inputs=1),
    ]
    main = m.graph(
        nodes,
        [m.value("x", [4, 4]), m.value("start", [4])],
        [m.value("y", [4])],
        [m.tensor("trips", np.array(3))],
    )
    source = m.save(m.model(main), tmp_path / "m.onnx")
    checkpoint = OnnxCheckpoint(source)
    assert nested(checkpoint) == {"loop.w", "scan.w"}
    _, template = m.packed(source, tmp_path)
    feeds = {"x": m.weights(4, 4, seed=3), "start": m.weights(4)}
    m.assert_near(m.run(template, feeds), m.run(source, feeds))


@pytest.mark.parametrize("size", [4, 64])
def test_functions_are_inlined(tmp_path: Path, size: int) -> None:
    function = helper.make_function(
        "own",
        "Layer",
        ["x"],
        ["y"],
        [m.constant("w", m.weights(size, size)), helper.make_node("MatMul", ["x", "w"], ["y"])],
        [helper.make_opsetid("", 21)],
    )
    main = m.graph(
        [
            helper.make_node("Layer", ["x"], ["h"], domain="own"),
            helper.make_node("Layer", ["h"], ["y"], domain="own"),
        ],
        [m.value("x", [size, size])],
        [m.value("y", [size, size])],
    )
    proto = m.model(main)
    proto.functions.append(function)
    proto.opset_import.append(helper.make_opsetid("own", 1))
    source = m.save(proto, tmp_path / "m.onnx")
    assert len(nested(OnnxCheckpoint(source))) == 2
    _, template = m.packed(source, tmp_path)
    feeds = {"x": m.weights(size, size, seed=3)}
    m.assert_near(m.run(template, feeds), m.run(source, feeds))


def test_only_weights_of_layers_are_nested(tmp_path: Path) -> None:
    """Each weight goes its own way; `scale` and `position` meet activations elementwise."""
    arrays = {
        "gemm": m.weights(4, 4),
        "turned": m.weights(4, 4, seed=1),
        "half": m.weights(4, 4, dtype=np.float16),
        "table": m.weights(9, 4),
        "merged": m.weights(2, 4),
        "other": m.weights(2, 4, seed=5),
        "scale": m.weights(4, 4, seed=2),
        "token": m.weights(1, 4),
        "unused": m.weights(4, 4),
    }
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["e"]),
        helper.make_node("Concat", ["e", "token"], ["tokens"], axis=0),
        helper.make_node("Gemm", ["tokens", "gemm"], ["h1"], transB=1),
        helper.make_node("Transpose", ["turned"], ["t"]),
        helper.make_node("Identity", ["t"], ["t2"]),
        helper.make_node("MatMul", ["h1", "t2"], ["h2"]),
        helper.make_node("Cast", ["half"], ["wide"], to=1),
        helper.make_node("MatMul", ["h2", "wide"], ["h3"]),
        helper.make_node("Concat", ["merged", "other"], ["whole"], axis=0),
        helper.make_node("MatMul", ["h3", "whole"], ["h4"]),
        helper.make_node("Mul", ["h4", "scale"], ["y"]),
    ]
    main = m.graph(
        nodes,
        [m.value("ids", [3], TensorProto.INT64)],
        [m.value("y", [4, 4])],
        [m.tensor(name, array) for name, array in arrays.items()],
    )
    checkpoint = OnnxCheckpoint(m.save(m.model(main), tmp_path / "m.onnx"))
    assert set(checkpoint.tensors) == arrays.keys() - {"unused"}
    assert nested(checkpoint) == {"gemm", "turned", "half", "table", "merged", "other"}


def test_recurrent_weights_are_nested_through_shape_changes(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Unsqueeze", ["w", "axis"], ["w3"]),
        helper.make_node("Slice", ["r", "zero", "one"], ["r3"]),
        helper.make_node("GRU", ["x", "w3", "r3"], ["y"], hidden_size=4),
    ]
    main = m.graph(
        nodes,
        [m.value("x", [2, 1, 3])],
        [m.value("y", [2, 1, 1, 4])],
        [
            m.tensor("w", m.weights(12, 3)),
            m.tensor("r", m.weights(2, 12, 4)),
            m.tensor("axis", np.array([0])),
            m.tensor("zero", np.array([0])),
            m.tensor("one", np.array([1])),
        ],
    )
    source = m.save(m.model(main), tmp_path / "m.onnx")
    assert nested(OnnxCheckpoint(source)) == {"w", "r"}


@pytest.mark.parametrize("ir_version", [3, 8])
def test_initializers_that_are_inputs(tmp_path: Path, ir_version: int) -> None:
    """Up to IR 3 all had to be; later ones may be changed by the caller, and stay so."""
    proto = m.mlp(opset=9, ir_version=ir_version)
    for t in proto.graph.initializer:
        proto.graph.input.append(m.value(t.name, list(t.dims)))
    source = m.save(proto, tmp_path / "m.onnx")
    _, template = m.packed(source, tmp_path)
    left = [v.name for v in onnx.load(template, load_external_data=False).graph.input]
    assert left == (["x"] if ir_version == 3 else ["x", "w1", "b1", "w2"])
    feeds = {"x": m.weights(2, 16)}
    m.assert_near(m.run(template, feeds), m.run(source, feeds))


def test_values_that_decide_shapes_stay_in_the_graph(tmp_path: Path) -> None:
    nodes = [
        m.constant("scales", np.array([1, 1, 2, 2], np.float32)),
        helper.make_node("Conv", ["x", "w"], ["h"]),
        helper.make_node("Resize", ["h", "", "scales"], ["y"]),
    ]
    main = m.graph(
        nodes,
        [m.value("x", [1, 3, 4, 4])],
        [m.value("y", [1, 5, 8, 8])],
        [m.tensor("w", m.weights(5, 3, 1, 1))],
    )
    source = m.save(m.model(main), tmp_path / "m.onnx")
    assert set(OnnxCheckpoint(source).tensors) == {"w"}
    _, template = m.packed(source, tmp_path)
    assert m.run(template, {"x": m.weights(1, 3, 4, 4)})[0].shape == (1, 5, 8, 8)


def test_names_reserved_by_the_format_are_replaced(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "__metadata__"], ["h"]),
        helper.make_node("MatMul", ["h", "__elsa__.1.w"], ["y"]),
    ]
    main = m.graph(
        nodes,
        [m.value("x", [4, 4])],
        [m.value("y", [4, 4])],
        [m.tensor("__metadata__", m.weights(4, 4)), m.tensor("__elsa__.1.w", m.weights(4, 4))],
    )
    source = m.save(m.model(main), tmp_path / "m.onnx")
    elsa, template = m.packed(source, tmp_path)
    with elsa_format.open(elsa) as file:
        assert set(file.tensors) == {"onnx.__metadata__", "onnx.__elsa__.1.w"}
    feeds = {"x": m.weights(4, 4, seed=2)}
    m.assert_near(m.run(template, feeds), m.run(source, feeds))


def test_sparse_initializers_are_read(tmp_path: Path) -> None:
    dense = np.zeros((4, 4), np.float32)
    dense[1, 2], dense[3, 0] = 2.5, -1.5
    by_row = helper.make_sparse_tensor(
        m.tensor("w", np.array([2.5, -1.5], np.float32)),
        m.tensor("", np.array([[1, 2], [3, 0]])),
        [4, 4],
    )
    main = m.graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        [m.value("x", [4, 4])],
        [m.value("y", [4, 4])],
    )
    main.sparse_initializer.append(by_row)
    checkpoint = OnnxCheckpoint(m.save(m.model(main), tmp_path / "m.onnx"))
    assert content(checkpoint, "w") == dense.tobytes()


def test_large_integers_are_shared_and_packed_four_bit_ones_stay(tmp_path: Path) -> None:
    quantized = np.arange(4096, dtype=np.int8).reshape(64, 64)
    four_bits = TensorProto(
        name="q4", data_type=TensorProto.INT4, dims=[64, 64], raw_data=bytes(2048)
    )
    nodes = [
        helper.make_node("DequantizeLinear", ["q", "s"], ["w"]),
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("DequantizeLinear", ["q4", "s"], ["w4"]),
        helper.make_node("MatMul", ["h", "w4"], ["g"]),
        helper.make_node("MatMul", ["g", "v"], ["y"]),
    ]
    main = m.graph(
        nodes,
        [m.value("x", [2, 64])],
        [m.value("y", [2, 4])],
        [
            m.tensor("q", quantized),
            four_bits,
            m.tensor("s", np.array(0.1, np.float32)),
            m.tensor("v", m.weights(64, 4)),
        ],
    )
    source = m.save(m.model(main), tmp_path / "m.onnx")
    checkpoint = OnnxCheckpoint(source)
    assert set(checkpoint.tensors) == {"q", "v"}
    assert content(checkpoint, "q") == quantized.tobytes()
    _, template = m.packed(source, tmp_path)
    feeds = {"x": m.weights(2, 64)}
    m.assert_same(m.run(template, feeds), m.run(source, feeds))
