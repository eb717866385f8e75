"""The examples run, and say what they should."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, EXAMPLES / name],
        cwd=folder,
        env={**os.environ, "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_own_flax_model(tmp_path: Path) -> None:
    lines = run("own_flax_model.py", tmp_path).splitlines()
    assert [line.split(":")[0] for line in lines] == ["level 1", "level 2", "level 3", "dense"]
    assert all(float(line.rsplit(" ", 1)[1].rstrip("%")) > 80 for line in lines)


@pytest.mark.skipif(importlib.util.find_spec("jax2onnx") is None, reason="jax2onnx not installed")
def test_nnx_to_onnx(tmp_path: Path) -> None:
    names, *levels = run("nnx_to_onnx.py", tmp_path).splitlines()
    assert names == "first/bias, first/kernel, norm/bias, norm/scale, second/bias, second/kernel"
    assert len(levels) == 3
    for line in levels:
        trained, exported = re.findall(r"[\d.]+%", line)
        assert trained == exported
        assert float(trained.rstrip("%")) > 80


def test_stream_over_http(tmp_path: Path) -> None:
    assert "level 1: 1,364,428 bytes on the device, 209,715 weights" in run(
        "stream_over_http.py", tmp_path
    )


def test_switch_level(tmp_path: Path) -> None:
    lines = run("switch_level.py", tmp_path).splitlines()
    similarity = [float(line.rsplit(" ", 1)[1]) for line in lines]
    assert similarity == sorted(similarity, reverse=True)
    assert len(lines) == 3


def needs(*packages: str) -> pytest.MarkDecorator:
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    return pytest.mark.skipif(
        bool(missing), reason=f"{', '.join(missing)} not installed (make test-torch)"
    )


@needs("torch")
def test_torch_state_dict(tmp_path: Path) -> None:
    lines = run("torch_state_dict.py", tmp_path).splitlines()
    assert lines[1] == "level 2: 90.0% of the weights are zero"
    assert len(lines) == 3


@needs("torch")
def test_torch_digits(tmp_path: Path) -> None:
    *levels, dense = run("torch_digits.py", tmp_path).splitlines()
    assert [line.split(":")[0] for line in levels] == ["level 95%", "level 90%", "level 80%"]
    for line in levels:
        frozen, found = re.findall(r"([\d.]+)% (?:when|from)", line)
        assert frozen == found
        assert float(found) > 85
    assert float(dense.rsplit(" ", 1)[1].rstrip("%")) > 90


@needs("torch", "transformers", "accelerate")
def test_torch_transformer(tmp_path: Path) -> None:
    _, *levels = run("torch_transformer.py", tmp_path).splitlines()
    assert [line.split(":")[0] for line in levels] == ["level 80%", "level 50%"]
    for line in levels:
        frozen, found = map(float, re.findall(r"\d\.\d+", line))
        assert frozen == found < 2.5
