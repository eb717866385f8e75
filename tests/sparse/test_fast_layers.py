"""Which layers of a graph become sparse operators, and that the graph means the same."""

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from internals import UnsupportedOnnx, prepare, use_sparse
from onnx import ModelProto, helper
from sparse_models import library, needs_library, tensor

RNG = np.random.default_rng(0)
node = helper.make_node


def sparse_weights(*shape, dtype=np.float32, share=0.1):
    """Random weights, most of them zero."""
    return (RNG.standard_normal(shape) * (RNG.random(shape) < share)).astype(dtype)


def numbers(*shape):
    """Random numbers."""
    return RNG.standard_normal(shape).astype(np.float32)


class Net:
    """A graph and its weights, as the exporter has them: apart."""

    def __init__(self, nodes, inputs, arrays, outputs=("y",), opset=21, open_inputs=(), rank=None):
        values = [helper.make_tensor_value_info(n, 1, s) for n, s in inputs.items()]
        values += [helper.make_tensor_value_info(n, 1, arrays[n].shape) for n in open_inputs]
        rank = rank or len(next(iter(inputs.values())))
        results = [helper.make_tensor_value_info(n, 1, [None] * rank) for n in outputs]
        graph = helper.make_graph(nodes, "graph", values, results)
        imports = [helper.make_opsetid("", opset)]
        self.proto = helper.make_model(graph, opset_imports=imports, ir_version=7)
        self.arrays, self.inputs = dict(arrays), inputs

    def fast(self, least=0.5):
        """The model with sparse operators, its weights in it."""
        proto, arrays = ModelProto(), dict(self.arrays)
        proto.CopyFrom(self.proto)
        layers = prepare(proto, arrays, "net.onnx")
        made, arrays = use_sparse(proto, arrays, [x for x in layers if x.sparsity >= least])
        return with_weights(made, arrays)

    def check(self, *operators, least=0.5, sizes=(2,)):
        """The operators in it, and that it gives what the dense graph gives."""
        fast = self.fast(least)
        onnx.checker.check_model(fast)
        assert sorted(n.op_type for n in fast.graph.node if n.domain == "elsa") == sorted(operators)
        assert sorted({f.name for f in fast.functions}) == sorted(set(operators))
        for size in sizes:
            feeds = {
                name: numbers(*(d if isinstance(d, int) else size for d in shape))
                for name, shape in self.inputs.items()
            }
            expected = run(with_weights(self.proto, self.arrays), feeds)
            for found in (run(fast, feeds), run(fast, feeds, sparse=True)):
                for mine, theirs in zip(found, expected, strict=True):
                    np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-4)
        return fast


def with_weights(proto, arrays):
    """A model with its weights in it."""
    full = ModelProto()
    full.CopyFrom(proto)
    full.graph.initializer.extend(tensor(name, array) for name, array in arrays.items())
    return full


def run(model, feeds, *, sparse=False) -> Any:
    """The outputs of a model."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    if sparse and library() is not None:
        options.register_custom_ops_library(str(library()))
    return onnxruntime.InferenceSession(model.SerializeToString(), options).run(None, feeds)


PADS = {"pads": [1, 1, 1, 1]}


def test_residual_block_with_batch_norm():
    """Batch norm is folded, the shortcut and the ReLU are taken in; the stem stays dense."""
    nodes = [
        node("Conv", ["x", "stem"], ["s"], "stem", **PADS),
        node("Relu", ["s"], ["rs"]),
        node("Conv", ["rs", "w1"], ["c1"], "one", **PADS),
        node("BatchNormalization", ["c1", "scale", "shift", "mean", "var"], ["n1"]),
        node("Relu", ["n1"], ["r1"]),
        node("Conv", ["r1", "w2", "b2"], ["c2"], "two", **PADS),
        node("Add", ["c2", "rs"], ["a2"]),
        node("Relu", ["a2"], ["r2"]),
        node("Conv", ["r2", "w3"], ["c3"], "down", strides=[2, 2]),
        node("Conv", ["r2", "w4"], ["c4"], "side", strides=[2, 2]),
        node("Add", ["c3", "c4"], ["y"]),
    ]
    arrays = {
        "stem": numbers(8, 3, 3, 3),
        "w1": sparse_weights(8, 8, 3, 3),
        "w2": sparse_weights(8, 8, 3, 3),
        "b2": numbers(8),
        "w3": sparse_weights(4, 8, 1, 1),
        "w4": sparse_weights(4, 8, 1, 1),
        **{name: numbers(8) for name in ("scale", "shift", "mean")},
        "var": np.abs(numbers(8)) + 0.1,
    }
    net = Net(nodes, {"x": ["n", 3, 10, 10]}, arrays)
    fast = net.check("SparseConv", "SparseConvAdd", "SparseConvAddRelu", "SparseConvRelu")
    assert [n.op_type for n in fast.graph.node if not n.domain] == ["Conv", "Relu"]
    assert next(n for n in fast.graph.node if n.op_type == "SparseConvAddRelu").name == "two"


def test_products_with_everything():
    """MatMul and Gemm in all their forms; three dimensions; a bias on either side of the sum."""
    nodes = [
        node("MatMul", ["x", "w1"], ["m1"]),
        node("Add", ["b1", "m1"], ["a1"]),
        node("Relu", ["a1"], ["r1"]),
        node("MatMul", ["r1", "w2"], ["m2"]),
        node("Add", ["m2", "x"], ["a2"]),
        node("Add", ["a2", "b2"], ["y"]),
    ]
    arrays = {
        "w1": sparse_weights(16, 40),
        "b1": numbers(40),
        "w2": sparse_weights(40, 16),
        "b2": numbers(16),
    }
    Net(nodes, {"x": ["n", 3, 16]}, arrays).check("SparseMatMulRelu", "SparseMatMulAdd")
    for bias in (numbers(40), numbers(1), numbers(1, 40), np.float32(3)):
        for turned in (0, 1):
            weight = sparse_weights(16, 40)
            gemm = node("Gemm", ["x", "w", "b"], ["y"], transB=turned)
            arrays = {"w": weight.T.copy() if turned else weight, "b": np.asarray(bias)}
            Net([gemm], {"x": ["n", 16]}, arrays).check("SparseMatMul", sizes=(1, 7))


@pytest.mark.parametrize(
    ("gemm", "bias"),
    [({"alpha": 2.0}, None), ({"beta": 0.5}, 40), ({"transA": 1}, None), ({}, (2, 40))],
)
def test_other_products_stay(gemm, bias):
    """What is scaled, turned, or has a bias for each row."""
    arrays = {"w": sparse_weights(2 if "transA" in gemm else 16, 40)}
    if bias:
        arrays["b"] = numbers(*(bias if isinstance(bias, tuple) else (bias,)))
    made = node("Gemm", ["x", *arrays], ["y"], **gemm)
    Net([made], {"x": [2, 16]}, arrays).check()


@pytest.mark.parametrize(
    ("shape", "attributes"),
    [
        ((8, 1, 3, 3), {"group": 8}),
        ((8, 4, 3, 3), {"group": 2}),
        ((8, 8, 3, 3), {"dilations": [2, 1]}),
        ((8, 8, 3, 3), {"auto_pad": "SAME_UPPER", "strides": [2, 2]}),
        ((8, 8, 33, 1), {"pads": [30, 0, 30, 0]}),
        ((8, 8, 1, 1, 1), {}),
    ],
)
def test_other_convolutions_stay(shape, attributes):
    """Grouped, dilated, padded by the input's size, with three sides, of huge kernels."""
    arrays = {"w": sparse_weights(*shape)}
    picture = ["n", 8, 12, 12] + [4] * (len(shape) - 4)
    made = node("Conv", ["x", "w"], ["y"], **attributes)
    Net([made], {"x": picture}, arrays).check()


@pytest.mark.parametrize("padding", ["SAME_UPPER", "SAME_LOWER", "VALID", "NOTSET"])
@pytest.mark.parametrize("kernel", [(4, 3), (5,)])
def test_padding_by_name(padding, kernel):
    """What a convolution without strides is padded by is known."""
    arrays = {"w": sparse_weights(8, 6, *kernel)}
    made = node("Conv", ["x", "w"], ["y"], auto_pad=padding)
    Net([made], {"x": ["n", 6, 12, 11][: 2 + len(kernel)]}, arrays).check("SparseConv")


def test_only_what_is_used_once_is_taken_in():
    """An output of the graph in the middle, and a value that two nodes read."""
    nodes = [
        node("Conv", ["x", "w1"], ["middle"]),
        node("Relu", ["middle"], ["r"]),
        node("Conv", ["r", "w2"], ["c"]),
        node("Relu", ["c"], ["p"]),
        node("Add", ["c", "p"], ["y"]),
    ]
    arrays = {"w1": sparse_weights(8, 8, 1, 1), "w2": sparse_weights(8, 8, 1, 1)}
    net = Net(nodes, {"x": ["n", 8, 4, 4]}, arrays, ("middle", "y"))
    net.check("SparseConv", "SparseConv")


def test_what_is_added_must_have_the_shape():
    """A sum that broadcasts, or whose shape is not known, stays outside."""
    nodes = [node("Conv", ["x", "w"], ["c"]), node("Add", ["c", "z"], ["y"])]
    arrays = {"w": sparse_weights(8, 8, 1, 1)}
    Net(nodes, {"x": ["n", 8, 4, 4], "z": ["n", 8, 1, 1]}, arrays).check("SparseConv")
    Net(nodes, {"x": ["n", 8, 4, 4], "z": ["m", 8, 4, 4]}, arrays).check("SparseConv")
    Net(nodes, {"x": ["n", 8, 4, 4], "z": ["n", 8, 4, 4]}, arrays).check("SparseConvAdd")
    twice = [node("Conv", ["x", "w"], ["c"]), node("Add", ["c", "c"], ["y"])]
    Net(twice, {"x": ["n", 8, 4, 4]}, arrays).check("SparseConv")


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_halves(dtype):
    """Weights stored in 16 bits stay so where the operator takes them, bit by bit."""
    nodes = [
        node("Cast", ["w1"], ["f1"], to=1),
        node("Conv", ["x", "f1"], ["c"]),
        node("BatchNormalization", ["c", *["s"] * 4], ["n"]),
        node("Flatten", ["n"], ["f"]),
        node("Cast", ["w2"], ["f2"], to=1),
        node("MatMul", ["f", "f2"], ["y"]),
    ]
    arrays = {
        "w1": sparse_weights(8, 8, 1, 1, dtype=dtype),
        "w2": sparse_weights(32, 16, dtype=dtype),
        "s": np.ones(8, np.float32),
    }
    fast = Net(nodes, {"x": ["n", 8, 2, 2]}, arrays, rank=2).check("SparseConv", "SparseMatMul")
    assert not [n for n in fast.graph.node if n.op_type in ("Cast", "BatchNormalization")]
    (values,) = [t for t in fast.graph.initializer if t.name == "w2.values"]
    kept = arrays["w2"].T[arrays["w2"].T != 0]
    if dtype is not np.float16:
        assert values.raw_data == kept.tobytes()


def test_weights_that_are_turned_shared_or_used_elsewhere():
    """As flax has them; two layers with one kernel; a table that is also looked up."""
    nodes = [
        node("Transpose", ["hwio"], ["oihw"], perm=[3, 2, 0, 1]),
        node("Conv", ["x", "oihw"], ["c1"], **PADS),
        node("Conv", ["c1", "oihw"], ["c2"], **PADS),
        node("GlobalAveragePool", ["c2"], ["g"]),
        node("Flatten", ["g"], ["f"]),
        node("Transpose", ["table"], ["turned"]),
        node("MatMul", ["f", "turned"], ["m"]),
        node("Gather", ["table", "i"], ["row"]),
        node("Add", ["m", "row"], ["y"]),
    ]
    table = sparse_weights(8, 8)
    arrays = {
        "hwio": sparse_weights(3, 3, 8, 8),
        "table": table,
        "i": np.array([1], np.int64),
    }
    fast = Net(nodes, {"x": ["n", 8, 5, 5]}, arrays, rank=2).check(
        "SparseConv", "SparseConv", "SparseMatMul"
    )
    names = [t.name for t in fast.graph.initializer]
    assert "table" in names
    assert "hwio" not in names
    assert names.count("hwio.values") == 1


@pytest.mark.parametrize(("width", "parts"), [(4096, 1), (4100, 2), (70_001, 18)])
def test_wide_products_are_several_that_add_up(width, parts):
    """Their inputs stay in the cache, and their indices reach any width."""
    arrays = {"w": sparse_weights(width, 4, share=0.01), "b": numbers(4)}
    nodes = [
        node("MatMul", ["x", "w"], ["m"]),
        node("Add", ["m", "b"], ["a"]),
        node("Relu", ["a"], ["y"]),
    ]
    operators = ["SparseMatMul", *["SparseMatMulAdd"] * (parts - 1)]
    operators[-1] += "Relu"
    Net(nodes, {"x": ["n", width]}, arrays).check(*operators, sizes=(1, 5))


def test_names():
    """Any script, and names that are taken."""
    arrays = {
        "вес": sparse_weights(16, 8),
        "вес.values": numbers(8),
        "вес.no_bias": numbers(8),
    }
    nodes = [
        node("MatMul", ["x", "вес"], ["m"], "слой"),
        node("Mul", ["m", "вес.values"], ["s"]),
        node("Add", ["s", "вес.no_bias"], ["y"]),
    ]
    Net(nodes, {"x": ["n", 16]}, arrays).check("SparseMatMul")


def test_patterns():
    """2:4 along the inputs becomes an operator of its own; along the outputs it does not."""
    weight = numbers(128, 8)
    weight.reshape(32, 4, 8)[:, 2:] = 0
    product = [node("MatMul", ["x", "w"], ["y"])]
    Net(product, {"x": ["n", 128]}, {"w": weight}).check("NMMatMul", sizes=(1, 5))
    across = numbers(128, 8)
    across.reshape(128, 2, 4)[..., 2:] = 0
    Net(product, {"x": ["n", 128]}, {"w": across}).check("SparseMatMul")


def test_what_a_caller_may_replace_stays():
    """An initializer that is an input, too, is not constant."""
    arrays = {"w": sparse_weights(16, 8)}
    made = [node("MatMul", ["x", "w"], ["y"])]
    net = Net(made, {"x": ["n", 16]}, arrays, open_inputs=["w"])
    assert not net.fast().functions


def test_nothing_to_do():
    """A dense network comes out as it went in."""
    net = Net([node("MatMul", ["x", "w"], ["y"])], {"x": ["n", 16]}, {"w": numbers(16, 8)})
    assert (
        net.check().SerializeToString() == with_weights(net.proto, net.arrays).SerializeToString()
    )


def test_old_opsets():
    """Said, with what to do."""
    nodes = [node("MatMul", ["x", "w"], ["y"])]
    arrays = {"w": sparse_weights(16, 8)}
    Net(nodes, {"x": ["n", 16]}, arrays, opset=12).check("SparseMatMul")
    with pytest.raises(UnsupportedOnnx, match="opset 11, sparse operators need 12"):
        Net(nodes, {"x": ["n", 16]}, arrays, opset=11).fast()


@needs_library
def test_empty_rows_of_inputs():
    """No rows, no pictures."""
    nodes = [node("MatMul", ["x", "w"], ["y"])]
    Net(nodes, {"x": ["n", 16]}, {"w": sparse_weights(16, 8)}).check("SparseMatMul", sizes=(0, 1))
