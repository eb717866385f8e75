"""The operators agree with their definition: with the library, without it, in onnx's evaluator."""

import json

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from internals import FIRST_OPSET, to_csr, to_pattern
from sparse_models import (
    close,
    conv,
    library,
    matmul,
    needs_library,
    pattern_matmul,
    run_everywhere,
    session,
    stock_conv,
)

pytestmark = needs_library
ENDINGS = ("", "Add", "Relu", "AddRelu")
DTYPES = (np.float32, ml_dtypes.bfloat16)


def finish(product, ending, more):
    """What the operator's name says is done with the product."""
    product = product + more if "Add" in ending else product
    return np.maximum(product, 0) if "Relu" in ending else product


@settings(max_examples=50)
@given(st.data())
def test_matmul(data):
    """Any number of rows, columns and dimensions, empty rows of weights, floats and halves."""
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 30)))
    outputs, width = data.draw(st.integers(1, 70)), data.draw(st.integers(1, 300))
    lead = data.draw(st.lists(st.integers(0, 7), min_size=0, max_size=3))
    dtype, ending = data.draw(st.sampled_from(DTYPES)), data.draw(st.sampled_from(ENDINGS))
    kept = rng.random((outputs, width)) < data.draw(st.sampled_from([0, 0.02, 0.1, 0.5, 1]))
    weight = (rng.uniform(-1, 1, (outputs, width)) * kept).astype(dtype)
    bias = rng.uniform(-1, 1, outputs).astype(np.float32)
    x = rng.uniform(-1, 1, (*lead, width)).astype(np.float32)
    more = rng.uniform(-1, 1, (*lead, outputs)).astype(np.float32)
    product = x.astype(np.float64) @ weight.astype(np.float64).T + bias
    expected = finish(product, ending, more)
    feeds = {"x": x} | ({"sum": more} if "Add" in ending else {})
    # ONNX Runtime's own MatMul refuses scalars of a vector; onnx's evaluator is slow.
    for found in run_everywhere(matmul(x, weight, bias, ending), feeds, reference=True):
        assert close(found, expected, width)


@settings(max_examples=40)
@given(st.data())
def test_pattern(data):
    """2:4, 1:4 and 1:8 by rows of one and of many."""
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 30)))
    n, m = data.draw(st.sampled_from([(1, 8), (1, 4), (2, 4)]))
    outputs, width = data.draw(st.integers(8, 40)), 16 * m // n * data.draw(st.integers(1, 3))
    dtype, ending = data.draw(st.sampled_from(DTYPES)), data.draw(st.sampled_from(ENDINGS))
    order = rng.random((outputs, width // m, m)).argsort(axis=2)
    kept = (order < n) & (rng.random(order.shape) < data.draw(st.sampled_from([0.85, 1])))
    weight = (rng.uniform(-1, 1, (outputs, width)) * kept.reshape(outputs, width)).astype(dtype)
    bias = rng.uniform(-1, 1, outputs).astype(np.float32)
    rows = data.draw(st.sampled_from([1, 2, 3, 4, 17]))
    x = rng.uniform(-1, 1, (rows, width)).astype(np.float32)
    more = rng.uniform(-1, 1, (rows, outputs)).astype(np.float32)
    expected = finish(x.astype(np.float64) @ weight.astype(np.float64).T + bias, ending, more)
    feeds = {"x": x} | ({"sum": more} if "Add" in ending else {})
    for found in run_everywhere(pattern_matmul(x, weight, bias, ending), feeds, reference=True):
        assert close(found, expected, width)


@settings(max_examples=60)
@given(st.data())
def test_conv(data):
    """One and two sides, strides, uneven pads, several pictures."""
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 30)))
    sides = data.draw(st.sampled_from([1, 2, 2, 2]))
    few = st.integers(1, 3)
    kernel = [data.draw(st.sampled_from([1, 2, 3, 3, 5, 7])) for _ in range(sides)]
    strides = [data.draw(few) for _ in range(sides)]
    pads = [data.draw(st.integers(0, 3)) for _ in range(2 * sides)]
    size = [
        max(data.draw(st.integers(1, 24)), kernel[i] - pads[i] - pads[sides + i])
        for i in range(sides)
    ]
    outputs, channels = data.draw(st.integers(1, 30)), data.draw(st.integers(1, 30))
    dtype, ending = data.draw(st.sampled_from(DTYPES)), data.draw(st.sampled_from(ENDINGS))
    kept = rng.random((outputs, channels, *kernel)) < data.draw(st.sampled_from([0, 0.05, 0.3, 1]))
    weight = (rng.uniform(-1, 1, kept.shape) * kept).astype(dtype)
    bias = rng.uniform(-1, 1, outputs).astype(np.float32)
    x = rng.uniform(-1, 1, (data.draw(few), channels, *size)).astype(np.float32)
    product = stock_conv(x, weight.astype(np.float32), bias, strides, pads)
    more = rng.uniform(-1, 1, product.shape).astype(np.float32)
    expected = finish(product, ending, more)
    feeds = {"x": x} | ({"sum": more} if "Add" in ending else {})
    made = conv(x, weight, bias, strides, pads, ending)
    for found in run_everywhere(made, feeds, reference=x.size < 2000):
        assert close(found, expected, weight[0].size)


@pytest.mark.parametrize("opset", [FIRST_OPSET, 13, 17, 18, 20, 21])
def test_opsets(opset):
    """The definitions are valid in a model of any opset from the first on."""
    rng = np.random.default_rng(1)
    weight = (rng.standard_normal((8, 128)) * (rng.random((8, 128)) < 0.1)).astype(np.float32)
    bias, x = np.ones(8, np.float32), rng.standard_normal((2, 128)).astype(np.float32)
    expected = x @ weight.T + bias
    for found in run_everywhere(matmul(x, weight, bias, opset=opset), {"x": x}, reference=True):
        assert close(found, expected, 128)
    sparse = np.where(np.arange(128) % 4 == 1, rng.standard_normal((8, 128)), 0).astype(np.float32)
    made = pattern_matmul(x, sparse, bias, opset=opset)
    for found in run_everywhere(made, {"x": x}, reference=True):
        assert close(found, x @ sparse.T + bias, 128)


def test_library_is_used(tmp_path, monkeypatch):
    """ONNX Runtime runs the operator where it has it, and else the stock operators."""
    monkeypatch.chdir(tmp_path)
    x, weight = np.ones((1, 64), np.float32), np.eye(32, 64, dtype=np.float32)
    made = matmul(x, weight, np.zeros(32, np.float32))
    ran = {}
    for sparse in (False, True):
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.enable_profiling = True
        if sparse:
            options.register_custom_ops_library(str(library()))
        running = onnxruntime.InferenceSession(made.SerializeToString(), options)
        running.run(None, {"x": x})
        events = json.loads((tmp_path / running.end_profiling()).read_text())
        ran[sparse] = {e["args"]["op_name"] for e in events if e.get("cat") == "Node"}
    assert ran[True] == {"SparseMatMul"}
    assert "MatMul" in ran[False] or "Gemm" in ran[False]
    assert "SparseMatMul" not in ran[False]


def test_one_session_many_shapes():
    """More shapes than a kernel keeps plans for, again and again."""
    rng = np.random.default_rng(2)
    weight = (rng.standard_normal((5, 4, 3, 3)) * (rng.random((5, 4, 3, 3)) < 0.3)).astype("f4")
    bias = np.zeros(5, np.float32)
    running = session(conv(np.zeros((1, 4, 9, 9)), weight, bias, [1, 1], [1] * 4), sparse=True)
    for _ in range(2):
        for side in range(1, 10):
            x = rng.standard_normal((2, 4, side, side + 1)).astype(np.float32)
            expected = stock_conv(x, weight, bias, [1, 1], [1] * 4)
            assert close(running.run(None, {"x": x})[0], expected, 36)


def test_wide_pictures():
    """Rows that are longer than offsets of 16 bits reach."""
    rng = np.random.default_rng(3)
    weight = rng.standard_normal((2, 2, 5, 3)).astype(np.float32)
    x = rng.standard_normal((1, 2, 6, 70_000)).astype(np.float32)
    bias = np.zeros(2, np.float32)
    running = session(conv(x, weight, bias, [1, 1], [2, 1, 2, 1]), sparse=True)
    found = running.run(None, {"x": x})[0]
    assert close(found, stock_conv(x, weight, bias, [1, 1], [2, 1, 2, 1]), 300)


def test_bits_that_matter():
    """Denormals and large values go through, -0 is a zero; ReLU keeps NaN."""
    weight = np.zeros((4, 128), np.float32)
    weight[0, 0], weight[1, 5], weight[2, 7], weight[3, 1] = 1e-42, -0.0, 3e38, 1
    csr = to_csr(weight)
    assert csr.values.view(np.uint32).tolist() == [714, 0, 0x7F61B1E6, 0x3F800000]
    assert csr.indices.tolist() == [0, 0, 7, 1]
    x = np.zeros((1, 128), np.float32)
    x[0, [0, 5, 7, 1]] = 1, 1, 1, np.nan
    found = session(matmul(x, weight, np.zeros(4, np.float32), "Relu"), sparse=True).run(
        None, {"x": x}
    )[0]
    assert found[0, 0] == np.float32(1e-42)
    assert found[0, 2] == np.float32(3e38)
    assert np.isnan(found[0, 3])
    # A zero that is not stored meets no NaN: the dense product would give NaN everywhere.
    assert not np.isnan(found[0, :3]).any()


def test_patterns_are_found():
    """The sparsest pattern that fits; none where the columns do not divide, or few are filled."""
    eighths = np.tile(np.eye(8, dtype=np.float32), (1, 16))
    assert (lambda p: (p.n, p.m))(to_pattern(eighths)) == (1, 8)
    assert to_pattern(eighths[:, :100]) is None
    assert to_pattern(np.ones((3, 128), np.float32)) is None
    assert to_pattern(np.eye(8, 128, dtype=np.float32)) is None
    halves = np.tile(np.array([0, 1, 0, 1], np.float32), (2, 32))
    found = to_pattern(halves)
    assert (found.n, found.m) == (2, 4)
    assert found.codes.tolist() == [0b11011101] * (2 * 64 // 4)
