"""Sparse operators that compute with integers: within the stated bounds, and floats elsewhere.

check.c has the same bounds over random layers, without ONNX Runtime.
"""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from elsa_converters import onnx as converter
from hypothesis import given, settings
from hypothesis import strategies as st
from internals import _bench as bench_module
from internals import _fast as pick
from internals import _measure as timing
from internals import bench, export, to_csr
from onnx.reference import ReferenceEvaluator
from sparse_models import conv, matmul, needs_library, session

from elsa_format import InvalidOption

pytestmark = needs_library
CPU = Path("/proc/cpuinfo")
VNNI = CPU.exists() and "avx512_vnni" in CPU.read_text()
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


def test_definition(tmp_path):
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


def nodes(path):
    """The bits of the sparse operators of a model file."""
    found = [node for node in onnx.load(path).graph.node if node.domain == "elsa"]
    return [{a.name: a.i for a in node.attribute}.get("bits", 0) for node in found]


def test_doors(packed, tmp_path, monkeypatch):
    """`precision` of sessions, exports and commands; floats are what it is without."""
    monkeypatch.setattr(timing, "SECONDS", 0)
    x = np.random.default_rng(6).standard_normal((40, 8, 12, 12)).astype(np.float32)
    floats = converter.session(*packed, level=2, fast=0.7).run(None, {"x": x})[0]
    for bits, worst in ((16, 1e-3), (8, 0.1)):
        net = converter.session(*packed, level=1, fast=0.7, precision=bits)
        net.use_level(2)
        found = net.run(None, {"x": x})[0]
        assert np.linalg.norm(found - floats) <= worst * np.linalg.norm(floats)
        made = tmp_path / f"{bits}.onnx"
        converter.export(*packed, made, level=2, fast=0.7, precision=bits)
        assert set(nodes(made)) == {bits}
    given = [str(packed.elsa), "--onnx", str(packed.template), "--level", "2", "--quiet"]
    made = tmp_path / "command.onnx"
    given += ["-o", str(made)]
    done = CliRunner().invoke(export, [*given, "--fast=0.7", "--precision", "8"])
    assert done.exit_code == 0, done.output
    assert set(nodes(made)) == {8}
    for wrong, words in (
        (["--precision", "16"], "--fast"),
        (["--fast=0.7", "--precision", "auto"], "without a sparsity"),
        (["--fast", "--precision", "4"], "not one of 32, 16, 8, auto"),
    ):
        done = CliRunner().invoke(export, [*given, "--force", *wrong])
        assert done.exit_code == 2
        assert words in done.output
    for options in ({}, {"fast": 0.7, "precision": 24}, {"fast": 0.7, "precision": "auto"}):
        with pytest.raises(InvalidOption, match="precision"):
            converter.session(*packed, level=1, **{"precision": 16, **options})


@pytest.mark.parametrize("fastest", [0, 1, 2])
def test_auto(packed, tmp_path, monkeypatch, fastest):
    """The faster of floats and 16 bits, or the dense network."""
    times = [1.0 if index == fastest else 2.0 for index in range(3)]
    monkeypatch.setattr(pick, "THRESHOLDS", (0.5,))
    monkeypatch.setattr(pick, "shortest_times", lambda sessions, feeds: times[: len(sessions)])
    made = tmp_path / "auto.onnx"
    converter.export(*packed, made, level=2, fast=True, precision="auto")
    assert set(nodes(made)) == [set(), {0}, {16}][fastest]


def test_measured(packed, tmp_path, monkeypatch):
    """`elsa-bench --precision` shows the time and the metric of each, and marks what is worse."""
    monkeypatch.setattr(timing, "SECONDS", 0)
    monkeypatch.setattr(bench_module, "session_memory", lambda *arguments: 1)
    monkeypatch.setattr(pick, "WORTH", 1e9)  # however slow this machine is today
    rng = np.random.default_rng(7)
    x = rng.standard_normal((50, 8, 12, 12)).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=x)
    given = [str(packed.elsa), "--onnx", str(packed.template), "--data", str(tmp_path / "data.npz")]
    given += ["--threads", "1", "--seconds", "0", "--quiet", "--precision", "8"]
    done = CliRunner().invoke(bench, [*given, "--precision", "16", "--json"])
    assert done.exit_code == 0, done.output
    *levels, dense = json.loads(done.output)
    assert dense["integers"] == {}
    for row in levels:
        for found in row["integers"].values():
            assert found["seconds"] > 0
            gap = row["metrics"]["agreement"]["value"] - found["metrics"]["agreement"]["value"]
            assert found["worse"] == (gap > 0.01 * row["metrics"]["agreement"]["value"])
        assert set(row["integers"]) == {"16", "8"}
    monkeypatch.setattr(bench_module, "MOST_LOSS", -2.0)  # nothing is good enough
    done = CliRunner().invoke(bench, given)
    assert "8 bits" in done.output
    assert "agreement, 8 bits" in done.output
    assert "! With integers agreement is worse by more than 1 % of it." in done.output
    done = CliRunner().invoke(bench, [*given, "--no-time"])
    assert done.exit_code == 2
