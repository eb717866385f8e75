"""Integers in sessions, exports and commands: asked for by `precision`, timed and measured."""

import json

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from elsa_converters import onnx as converter
from internals import _bench as bench_module
from internals import _fast as pick
from internals import _measure as timing
from internals import bench, export
from sparse_models import needs_library

from elsa_format import InvalidOption

pytestmark = needs_library


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
