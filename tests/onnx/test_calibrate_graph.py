"""Graphs as calibration sees them: their layers, the columns of inputs, walks between layers."""

import contextlib
import errno
import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from elsa_converters._errors import InvalidData, UnsupportedOnnx
from elsa_converters.calibrate import Store, Weights
from elsa_converters.calibrate._statistics import apply
from elsa_converters.onnx import OnnxCheckpoint
from elsa_converters.onnx._calibrate.model import OnnxModel
from elsa_converters.onnx._calibrate.rewrite import Prepared, prepare
from elsa_converters.onnx._model.read import read_model
from onnx import NodeProto, TensorProto, helper
from onnx_models import conv_bn, graph, model, run, save, tensor, value, weights

from elsa_format.levels import Pattern

Array = np.ndarray[Any, Any]


def one_layer(node: NodeProto, tmp_path: Path, x: Array, **arrays: Array) -> Path:
    """A graph of one layer, whose output is open."""
    main = graph(
        [node],
        [value("x", [f"d{i}" for i in range(x.ndim)])],
        [onnx.ValueInfoProto(name="y")],
        [tensor(name, array) for name, array in arrays.items()],
    )
    main.output[0].type.tensor_type.elem_type = TensorProto.FLOAT
    path = tmp_path / "layer.onnx"
    path.write_bytes(model(main).SerializeToString())
    return path


def opened(path: Path, *feeds: dict[str, Array], **options: Any) -> OnnxModel:
    return OnnxModel(prepare(read_model(path)), feeds, **options)


CONVOLUTIONS: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "1-D": ((2, 3, 17), (4, 3, 5), {"strides": [2], "pads": [3, 1], "dilations": [2]}),
    "2-D": ((2, 3, 9, 8), (4, 3, 3, 2), {"strides": [2, 1], "pads": [1, 0, 2, 1]}),
    "3-D": ((2, 2, 5, 6, 4), (3, 2, 2, 3, 1), {"pads": [1, 0, 0, 0, 1, 2], "strides": [1, 2, 1]}),
    "dilated": ((1, 2, 11, 12), (3, 2, 3, 3), {"dilations": [2, 3], "strides": [1, 2]}),
    "same upper": ((2, 3, 10, 7), (4, 3, 4, 3), {"auto_pad": "SAME_UPPER", "strides": [3, 2]}),
    "same lower": ((2, 3, 10, 7), (4, 3, 4, 2), {"auto_pad": "SAME_LOWER", "strides": [1, 2]}),
    "valid": ((2, 3, 6, 7), (4, 3, 4, 3), {"auto_pad": "VALID"}),
    "grouped": ((2, 6, 5, 5), (8, 3, 3, 3), {"group": 2, "pads": [1, 1, 1, 1]}),
    "depthwise": ((2, 4, 5, 5), (4, 1, 3, 3), {"group": 4, "pads": [1, 1, 1, 1]}),
    "depthwise, two for each": ((2, 3, 5, 5), (6, 1, 2, 2), {"group": 3}),
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_columns_of_convolutions(name: str, bias: bool, tmp_path: Path) -> None:
    shape, kernel, attributes = CONVOLUTIONS[name]
    x, arrays = weights(*shape), {"w": weights(*kernel, seed=1)}
    if bias:
        arrays["b"] = weights(kernel[0], seed=2)
    node = helper.make_node("Conv", ["x", *arrays], ["y"], **attributes)
    check_columns(one_layer(node, tmp_path, x, **arrays), x)


GEMMS: dict[str, tuple[tuple[int, int], tuple[int, int], dict[str, Any]]] = {
    "plain": ((5, 6), (6, 4), {}),
    "right turned": ((5, 6), (4, 6), {"transB": 1}),
    "left turned": ((6, 5), (6, 4), {"transA": 1}),
    "factors": ((6, 5), (4, 6), {"transA": 1, "transB": 1, "alpha": 0.5, "beta": -3.0}),
}


@pytest.mark.parametrize("bias", [(4,), (1, 4), (1,), ()])
@pytest.mark.parametrize("name", GEMMS)
def test_columns_of_gemm(name: str, bias: tuple[int, ...], tmp_path: Path) -> None:
    shape, matrix, attributes = GEMMS[name]
    x, arrays = weights(*shape), {"w": weights(*matrix, seed=1), "b": weights(*bias, seed=2)}
    node = helper.make_node("Gemm", ["x", "w", "b"], ["y"], **attributes)
    check_columns(one_layer(node, tmp_path, x, **arrays), x, samples_first=False)


@pytest.mark.parametrize("shape", [(7, 6), (2, 3, 6), (2, 3, 4, 6)])
def test_columns_of_matmul(shape: tuple[int, ...], tmp_path: Path) -> None:
    x = weights(*shape)
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    check_columns(one_layer(node, tmp_path, x, w=weights(6, 4, seed=1)), x)


def check_columns(path: Path, x: Array, *, samples_first: bool = True) -> None:
    """The layer computed of its columns is what ONNX Runtime computes, before and after."""
    (expected,) = run(path, {"x": x})
    net = opened(path, {"x": x})
    ((layer,),) = net.stages
    walk = net.walk(range(1))
    (columns,) = walk.inputs(layer)
    assert columns.dtype == np.float32
    assert columns.shape[1:] == (layer.groups, layer.columns)
    found = apply(columns.transpose(1, 0, 2), net.original(layer), layer.groups)
    found = found.transpose(1, 0, 2).reshape(len(columns), -1)
    channels_last = np.moveaxis(expected, 1, -1) if layer.kernel > 1 else expected
    np.testing.assert_allclose(found, channels_last.reshape(found.shape), rtol=1e-5, atol=1e-5)
    ((outputs,),) = walk.outputs()
    np.testing.assert_allclose(outputs, expected.reshape(outputs.shape), rtol=1e-5, atol=1e-5)
    walk.close()


def test_places_are_the_same_in_every_walk_and_bounded(tmp_path: Path) -> None:
    x = weights(4, 3, 20, 20)
    node = helper.make_node("Conv", ["x", "w"], ["y"], pads=[1, 1, 1, 1])
    path = one_layer(node, tmp_path, x, w=weights(4, 3, 3, 3, seed=1))
    net = opened(path, {"x": x[:2]}, {"x": x[2:]})
    net.places = 100
    ((layer,),) = net.stages
    walks = [net.walk(range(2)) for _ in range(2)]
    one, other = ([*walk.inputs(layer)] for walk in walks)
    assert [len(part) for part in one] == [50, 50]
    np.testing.assert_array_equal(np.concatenate(one), np.concatenate(other))
    assert not np.array_equal(one[0], one[1])


# --- Walks ---------------------------------------------------------------------------------------


def branches() -> onnx.ModelProto:
    """A residual block, shared weights, a branch of control flow, an integer input, constants."""
    then = graph(
        [helper.make_node("MatMul", ["r", "inner"], ["t"])], [], [value("t", None)], name="then"
    )
    other = graph([helper.make_node("Identity", ["r"], ["e"])], [], [value("e", None)], name="else")
    nodes = [
        helper.make_node("Gather", ["embedding", "ids"], ["x"]),
        helper.make_node("MatMul", ["x", "w1"], ["a1"]),
        helper.make_node("Add", ["b1", "a1"], ["h1"]),
        helper.make_node("Relu", ["h1"], ["r"]),
        helper.make_node("ReduceMean", ["gate"], ["mean"], keepdims=0),
        helper.make_node("Greater", ["mean", "zero"], ["yes"]),
        helper.make_node("If", ["yes"], ["i"], then_branch=then, else_branch=other),
        helper.make_node("Exp", ["table"], ["constant"]),
        helper.make_node("Mul", ["i", "constant"], ["m"]),
        helper.make_node("MatMul", ["m", "shared"], ["s1"]),
        helper.make_node("MatMul", ["s1", "shared"], ["s2"]),
        helper.make_node("Add", ["s2", "r"], ["sum"]),
        helper.make_node("Transpose", ["turned"], ["w2"], perm=[1, 0]),
        helper.make_node("MatMul", ["sum", "w2"], ["a2"]),
        helper.make_node("Add", ["a2", "x"], ["h2"]),
        helper.make_node("Mul", ["h2", "constant"], ["y"]),
        helper.make_node("Gemm", ["g0", "w3", "b1"], ["z"]),
    ]
    nodes.insert(0, helper.make_node("Cast", ["gate"], ["g0"], to=TensorProto.FLOAT))
    arrays = {
        "embedding": weights(11, 6),
        "w1": weights(6, 6, seed=1),
        "b1": weights(6, seed=2),
        "inner": weights(6, 6, seed=3),
        "shared": weights(6, 6, seed=4) / 3,
        "turned": weights(6, 6, seed=5),
        "w3": weights(2, 6, seed=6),
        "table": weights(6, seed=7) / 9,
        "zero": np.zeros((), np.float32),
    }
    main = graph(
        nodes,
        [value("ids", ["n", 4], TensorProto.INT64), value("gate", ["n", 2])],
        [value("y", ["n", 4, 6]), value("z", ["n", 6])],
        [tensor(name, array) for name, array in arrays.items()],
    )
    return model(main)


def branch_feeds(count: int) -> list[dict[str, Array]]:
    rng = np.random.default_rng(0)
    return [
        {
            "ids": rng.integers(0, 11, (3, 4)),
            "gate": weights(3, 2, seed=batch) + (batch % 2 * 9 - 5),
        }
        for batch in range(count)
    ]


def test_what_is_no_layer_says_why(tmp_path: Path) -> None:
    path = save(branches(), tmp_path / "net.onnx")
    prepared = prepare(read_model(path), {"w3": "excluded"})
    assert [site.layer.name for site in prepared.sites] == ["w1", "turned"]
    assert prepared.left == {
        "embedding": "used by Gather",
        "inner": "used in a subgraph",
        "shared": "used 2 times",
        "w3": "excluded",
    }
    prepared = prepare(read_model(path), levels=[Pattern(2, 4)])
    assert prepared.left["w1"] == "6 inputs, no multiple of 4"


def test_outputs_are_those_of_a_plain_session_before_every_stage(tmp_path: Path) -> None:
    path = save(branches(), tmp_path / "net.onnx")
    feeds = branch_feeds(3)
    net = opened(path, *feeds, threads=2)
    walk = net.walk(range(1, 3))
    for stage in range(len(net.stages) + 1):
        for found, batch in zip(walk.outputs(), feeds[1:], strict=True):
            expected = run(path, batch)
            for one, other in zip(found, expected, strict=True):
                np.testing.assert_allclose(one, other.reshape(one.shape), rtol=1e-5, atol=1e-6)
        if stage < len(net.stages):
            walk.advance({})
    walk.close()


def changed(net: OnnxModel, seed: int) -> dict[str, Weights]:
    """Other weights for every layer."""
    rng, found = np.random.default_rng(seed), {}
    for (layer,) in net.stages:
        own = net.original(layer)
        keep = rng.random(layer.shape) < 0.6
        rows = layer.groups * layer.rows
        found[layer.name] = Weights(
            np.where(keep, own.weight, layer.dtype.type(0)),
            rng.standard_normal(rows).astype(np.float32),
            rng.uniform(0.5, 2, rows).astype(np.float32) if layer.scale else None,
        )
    return found


def stored(net: OnnxModel, weights: dict[str, Weights]) -> onnx.ModelProto:
    """The rewritten graph with the tensors that weights become."""
    prepared = net.prepared
    arrays = {name: weight.array() for name, weight in prepared.model.weights.items()}
    for (layer,) in net.stages:
        own = weights[layer.name]
        arrays[layer.name] = net.weight_as_stored(layer, own.weight)
        arrays.update(net.varying(layer, own))
    return filled(prepared, arrays)


def filled(prepared: Prepared, arrays: dict[str, Array]) -> onnx.ModelProto:
    proto = onnx.ModelProto()
    proto.CopyFrom(prepared.model.proto)
    for initializer in proto.graph.initializer:
        if initializer.name in arrays:
            info = prepared.model.weights[initializer.name].info
            assert arrays[initializer.name].shape == info.shape
            assert arrays[initializer.name].dtype == info.dtype.numpy
            initializer.raw_data = arrays[initializer.name].tobytes()
    onnx.checker.check_model(proto)
    return proto


@pytest.mark.parametrize("kind", ["branches", "convolutions"])
def test_levels_compute_what_their_stored_tensors_compute(kind: str, tmp_path: Path) -> None:
    proto, feeds = branches(), branch_feeds(2)
    if kind == "convolutions":
        proto, feeds = conv_bn(), [{"x": weights(2, 3, 8, 8, seed=i)} for i in range(2)]
    net = opened(save(proto, tmp_path / "net.onnx"), *feeds)
    given = changed(net, 5)
    walk = net.walk(range(2))
    for (layer,) in net.stages:
        walk.advance({layer.name: given[layer.name]})
    session = stored(net, given)
    for found, batch in zip(walk.outputs(), feeds, strict=True):
        for one, other in zip(found, run(session, batch), strict=True):
            np.testing.assert_allclose(one, other.reshape(one.shape), rtol=1e-5, atol=1e-5)
    walk.close()


def test_the_rewritten_graph_computes_the_same(tmp_path: Path) -> None:
    path = save(conv_bn(), tmp_path / "net.onnx")
    feeds = {"x": weights(2, 3, 8, 8)}
    prepared = prepare(read_model(path))
    assert not any(node.op_type == "BatchNormalization" for node in prepared.nodes)
    assert prepared.left == {"c2.w": "used by ConvTranspose"}
    arrays = {name: weight.array() for name, weight in prepared.model.weights.items()}
    (found,), (expected,) = run(filled(prepared, arrays), feeds), run(path, feeds)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    checkpoint = OnnxCheckpoint(prepared.model)
    assert {"c1.w", "c1.w.scale", "c1.w.bias"} <= checkpoint.tensors.keys()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_halves_that_are_widened_have_biases_of_floats(dtype: Any, tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Cast", ["half"], ["w"], to=TensorProto.FLOAT),
        helper.make_node("MatMul", ["x", "w"], ["y"]),
    ]
    main = graph(
        nodes,
        [value("x", ["n", 6])],
        [value("y", ["n", 4])],
        [tensor("half", weights(6, 4, dtype=dtype))],
    )
    path, x = save(model(main), tmp_path / "net.onnx"), weights(5, 6)
    net = opened(path, {"x": x})
    ((layer,),) = net.stages
    assert layer.dtype == dtype
    given = changed(net, 1)
    assert {array.dtype for array in net.varying(layer, given["half"]).values()} == {np.dtype("f4")}
    walk = net.walk(range(1))
    walk.advance(given)
    ((found,),) = walk.outputs()
    np.testing.assert_allclose(found, run(stored(net, given), {"x": x})[0], rtol=1e-5, atol=1e-5)


def test_padding_is_no_place(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Gather", ["embedding", "ids"], ["x"]),
        helper.make_node("MatMul", ["x", "w"], ["y"]),
        helper.make_node("Cast", ["attention_mask"], ["z"], to=TensorProto.FLOAT),
    ]
    main = graph(
        nodes,
        [value(name, ["n", "l"], TensorProto.INT64) for name in ("ids", "attention_mask")],
        [value("y", ["n", "l", 4]), value("z", ["n", "l"])],
        [tensor("embedding", weights(9, 6)), tensor("w", weights(6, 4, seed=1))],
    )
    mask = np.array([[1, 1, 0], [1, 0, 0]])
    feeds = {"ids": np.arange(6).reshape(2, 3), "attention_mask": mask}
    net = opened(save(model(main), tmp_path / "net.onnx"), feeds)
    ((layer,),) = net.stages
    walk = net.walk(range(1))
    (columns,) = walk.inputs(layer)
    np.testing.assert_array_equal(columns[:, 0], weights(9, 6)[[0, 1, 3]])
    ((y, z),) = walk.outputs()
    assert y.shape == (3, 4)
    assert z.shape == (2, 3)


def test_nan_names_the_layer(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Log", ["x"], ["l"]),
        helper.make_node("MatMul", ["l", "w"], ["y"]),
    ]
    main = graph(
        nodes, [value("x", ["n", 4])], [value("y", ["n", 2])], [tensor("w", weights(4, 2))]
    )
    net = opened(save(model(main), tmp_path / "net.onnx"), {"x": weights(3, 4)})
    walk = net.walk(range(1))
    with pytest.raises(InvalidData, match="layer 'w': its inputs hold NaN or infinity"):
        list(walk.inputs(net.stages[0][0]))


def test_a_scalar_goes_from_stretch_to_stretch(tmp_path: Path) -> None:
    """As sizes do, with which exporters compute shapes."""
    nodes = [
        helper.make_node("ReduceSum", ["x"], ["s"], keepdims=0),
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("Unsqueeze", ["s", "zero"], ["one"]),
        helper.make_node("Concat", ["one", "two"], ["y"], axis=0),
        helper.make_node("Identity", ["h"], ["z"]),
    ]
    arrays = {
        "w": weights(4, 2),
        "zero": np.zeros(1, np.int64),
        "two": weights(1),
    }
    main = graph(
        nodes,
        [value("x", ["n", 4])],
        [value("y", [2]), value("z", ["n", 2])],
        [tensor(name, array) for name, array in arrays.items()],
    )
    path, x = save(model(main), tmp_path / "net.onnx"), weights(3, 4)
    for limit in (0, 1 << 20):
        walk = opened(path, {"x": x}, max_memory=limit).walk(range(1))
        ((found, _),) = walk.outputs()
        np.testing.assert_allclose(found[:, 0], run(path, {"x": x})[0], rtol=1e-5)
        walk.close()


def test_inputs_that_have_a_value_are_constants(tmp_path: Path) -> None:
    """Samples do not give them; whoever runs a level can."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("Mul", ["h", "factor"], ["r"]),
        helper.make_node("MatMul", ["r", "given"], ["y"]),
    ]
    arrays = {"w": weights(4, 6), "factor": weights(1), "given": weights(6, 2)}
    main = graph(
        nodes,
        [value("x", ["n", 4]), value("factor", [1]), value("given", [6, 2])],
        [value("y", ["n", 2])],
        [tensor(name, array) for name, array in arrays.items()],
    )
    path, x = save(model(main), tmp_path / "net.onnx"), weights(3, 4)
    net = opened(path, {"x": x})
    assert [site.layer.name for site in net.prepared.sites] == ["w"]
    assert net.prepared.left == {"given": "an input or output of the graph"}
    walk = net.walk(range(1))
    ((found,),) = walk.outputs()
    np.testing.assert_allclose(found, run(path, {"x": x})[0], rtol=1e-5)
    walk.close()


def test_which_outputs_are_compared(tmp_path: Path) -> None:
    """Floating ones; positions of the largest and names say nothing of distances."""
    names = tensor("names", weights(2))
    names.CopyFrom(helper.make_tensor("names", TensorProto.STRING, [2], [b"a", b"b"]))
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("ArgMax", ["h"], ["i"], axis=1, keepdims=0),
        helper.make_node("Gather", ["names", "i"], ["s"]),
        helper.make_node("MatMul", ["x", "nothing"], ["e"]),
        helper.make_node("Softmax", ["h"], ["p"]),
    ]
    arrays = [tensor("w", weights(4, 2)), tensor("nothing", weights(4, 0)), names]
    outputs = [
        value("s", ["n"], TensorProto.STRING),
        value("i", ["n"], TensorProto.INT64),
        value("p", ["n", 2]),
        value("e", ["n", 0]),
    ]
    x = weights(3, 4)
    for some, floats in ((outputs, ["p", "e"]), (outputs[:2], ["i"])):
        main = graph(nodes, [value("x", ["n", 4])], some, arrays)
        path = save(model(main), tmp_path / "net.onnx")
        net = opened(path, {"x": x})
        assert net.prepared.outputs == floats
        assert net.classes == ("probabilities" if "p" in floats else None)
        walk = net.walk(range(1))
        (found,) = walk.outputs()
        assert [array.shape for array in found] == [(3, 2), (3, 0)] if "e" in floats else [(3, 1)]
        walk.close()
    main = graph(nodes, [value("x", ["n", 4])], outputs[:1], arrays)
    path = save(model(main), tmp_path / "net.onnx")
    with pytest.raises(UnsupportedOnnx, match=r"net\.onnx: no output is a tensor of numbers"):
        prepare(read_model(path))


# --- Memory --------------------------------------------------------------------------------------


def test_what_is_beyond_the_limit_goes_to_a_file_without_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(branches(), tmp_path / "net.onnx")
    spilled = tmp_path / "spilled"
    spilled.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(spilled))
    found = []
    for limit in (1, 1 << 20):
        net = opened(path, *branch_feeds(4), max_memory=limit, threads=2)
        first, second = net.walk(range(4)), net.walk(range(2))
        for (layer,) in net.stages:
            found.append(np.concatenate(list(first.inputs(layer))))
            first.advance(changed(net, 2))
            second.advance({})
        found.append(np.concatenate([y for y, _ in first.outputs()]))
        assert open_files(spilled) == (limit == 1)
        assert not list(spilled.iterdir())
        first.close()
        second.close()
        assert open_files(spilled) == 0
    half = len(found) // 2
    for one, other in zip(found[:half], found[half:], strict=True):
        np.testing.assert_array_equal(one, other)


def open_files(folder: Path) -> int:
    """How many files of a folder this process has open, whether they have names or not."""
    found = 0
    for link in list(Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(OSError):  # that of the listing itself
            found += str(folder) in os.readlink(link)
    return found


def test_a_full_disk_says_which(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left on device; set TMPDIR") as caught:
        Store(0).put(np.ones(3))
    assert caught.value.filename == f"temporary file in {tmp_path}"
