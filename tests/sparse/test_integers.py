"""Sparse operators that compute with integers: within the stated bounds, and floats elsewhere.

check.c has the same bounds over random layers, without ONNX Runtime.
"""

import os
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from internals import to_csr
from onnx.reference import ReferenceEvaluator
from sparse_models import conv, matmul, needs_library, session, stock_conv

pytestmark = needs_library
CPU = Path("/proc/cpuinfo")
VNNI = CPU.exists() and "avx512_vnni" in CPU.read_text()
VNNI &= os.environ.get("ELSA_SPARSE_ISA", "avx512") == "avx512"
"""Whether this processor computes with integers; else all of this holds with floats."""


def ran(made, *, threads=1, sparse=True, **feeds):
    """The output of a model."""
    return session(made, sparse=sparse, threads=threads).run(None, feeds)[0]


def halves(x, weight, bits):
    """Half of what an integer is worth, of each row of x and of each row of weights."""
    high, low = np.maximum(x.max(1), 0), np.minimum(x.min(1), 0)
    sizes = np.abs(weight)
    largest, total, count = sizes.max(1), sizes.sum(1), (sizes != 0).sum(1)
    if bits == 16:
        limit = np.maximum(largest / 32766, total / (131070 - count / 2))
        return np.maximum(high, -low) / 16383 / 2, limit / 2
    return (high - low) / 255 / 2, largest / 127 / 2


def bound(x, weight, bits):
    """How far integers may be from the product of x and the weights: integer.c says why."""
    x, weight = x.astype(np.float64), weight.astype(np.float64)
    of_x, of_weight = halves(x, weight, bits)
    kept = (weight != 0).astype(np.float64)
    error = of_x[:, None] * np.abs(weight).sum(1) + (np.abs(x) @ kept.T) * of_weight
    error += of_x[:, None] * of_weight * kept.sum(1)
    return 1.0001 * error + 4e-6 * (np.abs(x) @ np.abs(weight).T)


@settings(max_examples=40)
@given(st.data())
def test_products(data):
    """Any number of rows, weights and inputs of any size, zeros and denormals among them."""
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 30)))
    bits = data.draw(st.sampled_from([16, 8]))
    outputs, width = data.draw(st.integers(1, 300)), data.draw(st.integers(1, 900))
    rows = data.draw(st.sampled_from([1, 2, 4, 5, 8, 12, 31, 64, 130, 200]))
    kept = rng.random((outputs, width)) < data.draw(st.sampled_from([0, 0.02, 0.1, 0.5, 1]))
    size = np.float32(2.0 ** data.draw(st.sampled_from([-50, -3, 0, 40])))
    weight = (rng.standard_normal((outputs, width)) * kept).astype(np.float32) * size
    x = rng.standard_normal((rows, width)).astype(np.float32)
    kind = data.draw(st.sampled_from(["", "zeros", "huge", "denormal", "rising", "equal"]))
    if kind == "zeros":
        x[::3] = np.where(rng.random(width) < 0.5, np.float32(-0.0), np.float32(0))
    elif kind == "huge":
        x[rng.integers(rows), rng.integers(width)] = 1e15
    elif kind == "denormal":
        x[0] = 1e-40
    elif kind == "rising":
        x = np.abs(x)
    elif kind == "equal":  # sums as large as they can be
        x[...], weight = 3, np.where(kept, size, np.float32(0))
    found = ran(matmul(x, weight, np.zeros(outputs, np.float32), bits=bits), x=x)
    expected = x.astype(np.float64) @ weight.T.astype(np.float64)
    assert np.all(np.abs(found - expected) <= bound(x, weight, bits) + 1e-30)


@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize("rows", [2, 7, 16])
@pytest.mark.parametrize("sign", [1, -1])
def test_largest_sums(bits, sign, rows):
    """The widest rows, of the largest integers there are: no sum overflows."""
    x = np.full((rows, 1 << 16), 1, np.float32)
    weight = np.full((2, 1 << 16), sign, np.float32)
    found = ran(matmul(x, weight, np.zeros(2, np.float32), bits=bits), x=x)
    np.testing.assert_allclose(found, sign * 65536.0, rtol=4e-3)
    x[:, ::2] = -1
    weight[:, ::2] = -sign  # products alike, inputs of both signs
    found = ran(matmul(x, weight, np.zeros(2, np.float32), bits=bits), x=x)
    np.testing.assert_allclose(found, sign * 65536.0, rtol=8e-3)


@pytest.mark.parametrize("bits", [16, 8])
def test_threads(bits):
    """The same bits with one thread and with two, and not those of floats."""
    rng = np.random.default_rng(3)
    weight = (rng.standard_normal((512, 768)) * (rng.random((512, 768)) < 0.2)).astype(np.float32)
    x, bias = rng.standard_normal((128, 768)).astype(np.float32), np.zeros(512, np.float32)
    made = matmul(x, weight, bias, bits=bits)
    alone = ran(made, x=x)
    assert np.array_equal(alone, ran(made, threads=2, x=x))
    assert np.array_equal(alone, ran(matmul(x, weight, bias), x=x)) != VNNI
    kernel = weight[:64, :576].reshape(64, 64, 3, 3)
    picture = rng.standard_normal((2, 64, 30, 31)).astype(np.float32)
    made = conv(picture, kernel, bias[:64], [1, 2], [1, 0, 1, 2], bits=bits)
    alone = ran(made, x=picture)
    assert np.array_equal(alone, ran(made, threads=2, x=picture))


@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e30, 1e-30])
def test_unfit_inputs(bits, value):
    """NaN, infinities and sizes beyond 2^60 are computed in floats, for all rows of a product."""
    rng = np.random.default_rng(4)
    weight = (rng.standard_normal((40, 70)) * (rng.random((40, 70)) < 0.3)).astype(np.float32)
    x, bias = rng.standard_normal((20, 70)).astype(np.float32), np.ones(40, np.float32)
    x[7] = value
    found = ran(matmul(x, weight, bias, "Relu", bits=bits), x=x)
    np.testing.assert_array_equal(found, ran(matmul(x, weight, bias, "Relu"), x=x))
    x[7] = 1
    weight[3, 5] = value  # of weights: the whole layer
    found = ran(matmul(x, weight, bias, bits=bits), x=x)
    np.testing.assert_array_equal(found, ran(matmul(x, weight, bias), x=x))


@pytest.mark.parametrize("bits", [16, 8])
def test_many_shapes(bits):
    """More input shapes than a layer keeps integers for: the others are computed in floats."""
    rng = np.random.default_rng(8)
    kept = rng.random((16, 24, 3, 3)) < 0.3
    kernel = (rng.standard_normal(kept.shape) * kept).astype(np.float32)
    bias, strides, pads = np.zeros(16, np.float32), [1, 1], [1, 1, 1, 1]
    pictures = [rng.standard_normal((1, 24, 9 + n, 30)).astype(np.float32) for n in range(7)]
    net = session(conv(pictures[0], kernel, bias, strides, pads, bits=bits), sparse=True)
    for picture in pictures * 2:
        (found,) = net.run(None, {"x": picture})
        expected = stock_conv(picture, kernel, bias, strides, pads)
        assert np.linalg.norm(found - expected) <= (0.02 if bits == 8 else 1e-3) * np.linalg.norm(
            expected
        )


def test_definition():
    """Without the library the model has its floats, in ONNX Runtime and in onnx's evaluator."""
    rng = np.random.default_rng(5)
    weight = (rng.standard_normal((40, 70)) * (rng.random((40, 70)) < 0.3)).astype(np.float32)
    x, bias = rng.standard_normal((20, 70)).astype(np.float32), np.ones(40, np.float32)
    made = matmul(x, weight, bias, bits=8)
    onnx.checker.check_model(made, full_check=True)
    for found in (ran(made, sparse=False, x=x), ReferenceEvaluator(made).run(None, {"x": x})[0]):
        np.testing.assert_allclose(found, x @ weight.T + bias, rtol=1e-4, atol=1e-4)
    values = next(t for t in made.graph.initializer if t.name == "values")
    assert values.raw_data == to_csr(weight).values.tobytes()
