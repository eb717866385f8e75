"""Models from anywhere: what the kernels rely on is checked when a session is made."""

import numpy as np
import onnxruntime
import pytest
from onnx import helper
from sparse_models import conv, matmul, needs_library, pattern_matmul, session, tensor

pytestmark = needs_library
X = np.ones((2, 128), np.float32)
WEIGHT = np.eye(6, 128, dtype=np.float32)
BIAS = np.zeros(6, np.float32)
PICTURE = np.ones((1, 4, 8, 8), np.float32)
KERNEL = np.ones((3, 4, 3, 3), np.float32)


def changed(made, weights=(), attributes=()):
    """The model with other tensors and attributes."""
    for name, array in dict(weights).items():
        (index,) = [i for i, t in enumerate(made.graph.initializer) if t.name == name]
        made.graph.initializer[index].CopyFrom(tensor(name, np.asarray(array)))
    node = made.graph.node[0]
    for name, value in dict(attributes).items():
        (index,) = [i for i, a in enumerate(node.attribute) if a.name == name]
        node.attribute[index].CopyFrom(helper.make_attribute(name, value))
    return made


def refused(made, words):
    """The session is refused, and says which operator and why."""
    with pytest.raises(Exception, match=words) as caught:
        session(made, sparse=True)
    assert type(caught.value).__module__.startswith("onnxruntime")
    assert "elsa." in str(caught.value)


@pytest.mark.parametrize("bits", [-1, 1, 7, 32, 1 << 40])
def test_bits(bits):
    """There are integers of 16 and of 8."""
    refused(matmul(X, WEIGHT, BIAS, bits=bits), "bits must be 16 or 8")


I32, U16, F32 = np.int32, np.uint16, np.float32


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ({"indptr": np.array([0, 1, 2, 3, 4, 5], I32)}, "one element more"),
        ({"indptr": np.array([1, 2, 3, 4, 5, 6, 6], I32)}, "begin with 0"),
        ({"indptr": np.array([0, 1, 2, 3, 4, 5, 7], I32)}, "end with"),
        ({"indptr": np.array([0, 1, 2, 3, 4, 5, -6], I32)}, "end with"),
        ({"indptr": np.array([0, 100, 2, 3, 4, 5, 6], I32)}, "rise"),
        ({"indptr": np.array([0, -5, 2, 3, 4, 5, 6], I32)}, "rise"),
        ({"indptr": np.array([0, 1, 1, 3, 4, 5, 6], I32)}, "rise"),
        ({"indptr": np.array([0, 2**31 - 1, 2, 3, 4, 5, 6], I32)}, "rise"),
        ({"indices": np.array([0, 1, 2, 3, 4, 128], U16)}, "less than"),
        ({"indices": np.array([65535] * 6, U16)}, "less than"),
        ({"indices": np.array([0] * 5, U16)}, "as many"),
        ({"indices": np.array([], U16)}, "as many|values"),
        ({"values": np.array([1] * 7, F32)}, "as many|indptr"),
        ({"values": np.array([], F32)}, "values"),
        ({"values": np.array([1] * 6, np.float64)}, "float or bfloat16"),
        ({"values": np.array([1] * 6, np.int8)}, "float or bfloat16"),
        ({"bias": np.zeros(5, F32)}, "bias"),
        ({"bias": np.zeros(0, F32)}, "bias"),
    ],
)
def test_rows(weights, words):
    """Indices that would read elsewhere."""
    refused(changed(matmul(X, WEIGHT, BIAS), weights), words)


def test_columns_must_rise_within_a_row():
    """Two values in one place mean different things to the definition and to a sum."""
    weights = {
        "values": np.ones(7, F32),
        "indices": np.array([3, 3, 1, 2, 3, 4, 5], U16),
        "indptr": np.array([0, 2, 3, 4, 5, 6, 7], I32),
    }
    refused(changed(matmul(X, WEIGHT, BIAS), weights), "rise within")
    weights["indices"][:2] = 4, 3
    refused(changed(matmul(X, WEIGHT, BIAS), weights), "rise within")


@pytest.mark.parametrize(
    "shape",
    [[6], [6, 128, 1], [0, 128], [6, 0], [-6, 128], [6, 1 << 40], [1 << 40, 128], [6, 5], [7, 128]],
)
def test_shape_of_matrix(shape):
    """Shapes that are not those of the weights."""
    refused(changed(matmul(X, WEIGHT, BIAS), (), {"shape": shape}), "must|at most")


@pytest.mark.parametrize(
    "attributes",
    [
        {"strides": [0, 1]},
        {"strides": [-1, 1]},
        {"strides": [1]},
        {"strides": [1, 1, 1]},
        {"strides": [1 << 40, 1]},
        {"pads": [-1, 0, 0, 0]},
        {"pads": [0, 0]},
        {"pads": [1 << 60, 0, 0, 0]},
        {"pads": [0] * 20},
        {"shape": [3, 4, 3]},
        {"shape": [3, 4, 9, 1 << 62]},
        {"shape": [3, 4, 0, 3]},
        {"shape": [3, 1, 33, 1]},
    ],
)
def test_attributes_of_conv(attributes):
    """Strides, pads and kernels that make no sense."""
    made = changed(conv(PICTURE, KERNEL, np.zeros(3, F32), [1, 1], [0] * 4), (), attributes)
    refused(made, "must|at most")


@pytest.mark.parametrize(
    ("weights", "attributes"),
    [
        ({}, {"pattern": [0, 8]}),
        ({}, {"pattern": [8, 8]}),
        ({}, {"pattern": [1, 0]}),
        ({}, {"pattern": [1, 16]}),
        ({}, {"pattern": [1]}),
        ({}, {"pattern": [3, 8]}),
        ({}, {"pattern": [1, 4]}),
        ({}, {"shape": [6, 64]}),
        ({}, {"shape": [6, 130]}),
        ({"codes": np.zeros(47, np.uint8)}, {}),
        ({"codes": np.full(48, 0x88, np.uint8)}, {}),
        ({"values": np.zeros(95, F32)}, {}),
        ({"bias": np.zeros(7, F32)}, {}),
    ],
)
def test_pattern(weights, attributes):
    """Codes that point outside their m columns, and counts that do not fit."""
    eighths = np.tile(np.eye(6, 8, dtype=F32), (1, 16))
    refused(changed(pattern_matmul(X, eighths, BIAS), weights, attributes), "must")


def test_codes_must_rise():
    """2:4 with the same place twice."""
    weight = np.tile(np.array([1, 1, 0, 0], F32), (6, 32))
    made = changed(pattern_matmul(X, weight, BIAS), {"codes": np.zeros(96, np.uint8)})
    refused(made, "rise")


def test_weights_must_be_constants():
    """An input can be anything at every run."""
    made = matmul(X, WEIGHT, BIAS)
    made.graph.input.append(helper.make_tensor_value_info("indices", 4, [None]))
    (index,) = [i for i, t in enumerate(made.graph.initializer) if t.name == "indices"]
    del made.graph.initializer[index]
    refused(made, "constants")


def test_inputs_of_other_shapes():
    """Said at the run, which leaves the session usable."""
    running = session(matmul(X, WEIGHT, BIAS, "Add"), sparse=True)
    good = {"x": X, "sum": np.zeros((2, 6), F32)}
    for bad in (
        good | {"x": X[:, :-1]},
        good | {"sum": np.zeros((2, 5), F32)},
        good | {"sum": np.zeros((1, 6), F32)},
    ):
        with pytest.raises(onnxruntime.capi.onnxruntime_pybind11_state.InvalidArgument):
            running.run(None, bad)
        assert running.run(None, good)[0].shape == (2, 6)
    running = session(conv(PICTURE, KERNEL, np.zeros(3, F32), [1, 1], [0] * 4), sparse=True)
    for bad in (PICTURE[:, :3], PICTURE[:, :, :2]):
        with pytest.raises(onnxruntime.capi.onnxruntime_pybind11_state.InvalidArgument):
            running.run(None, {"x": bad})
    assert running.run(None, {"x": PICTURE[:0]})[0].shape == (0, 3, 6, 6)


def test_too_large_to_pad():
    """Pads that ask for more memory than there is are an error of that run."""
    made = conv(PICTURE, KERNEL, np.zeros(3, F32), [65536, 65536], [65536] * 4)
    found = session(made, sparse=True).run(None, {"x": PICTURE})[0]
    assert found.shape == (1, 3, 3, 3)
    assert found[0, 0, 1, 1] == KERNEL[0].sum()
    with pytest.raises(Exception, match=r"(?i)memory|alloc|large"):
        session(conv(PICTURE, KERNEL, np.zeros(3, F32), [1, 1], [65536] * 4), sparse=True).run(
            None, {"x": PICTURE}
        )
