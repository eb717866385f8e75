"""A package outside of the tree adds a kind of checkpoint and a command, by public names alone."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import elsa_format

PACKAGE = Path(__file__).parent / "acme"
BIN = Path(sys.executable).parent


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(PACKAGE)}
    command = [str(BIN / "elsa"), *words]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """A file packed of the other package's kind of checkpoint."""
    matrix = np.random.default_rng(0).standard_normal((8, 5)).astype(np.float32)
    rows = "\n".join(",".join(repr(float(x)) for x in row) for row in matrix)
    (tmp_path / "net.acme").write_text(f"#acme\n{rows}\n")
    np.save(tmp_path / "matrix.npy", matrix)
    words = ("net.acme", "--sparsities", "75,50", "-o", "net.safetensors")
    done = run(tmp_path, "pack", *words)
    assert done.returncode == 0, done.stderr
    return tmp_path / "net.safetensors"


def test_the_package_uses_public_names_only() -> None:
    source = (PACKAGE / "acme_elsa.py").read_text()
    assert re.findall(r"elsa_format[\w.]*\._", source) == []


def test_its_checkpoints_are_packed(packed: Path) -> None:
    matrix = np.load(packed.parent / "matrix.npy")
    with elsa_format.open(packed) as file:
        assert file.metadata == {"origin": "acme"}
        dense, kept = file.tensor("matrix"), file.tensor("matrix", 1)
    assert np.allclose(dense, matrix, rtol=1e-6)
    assert np.array_equal(np.flatnonzero(kept), np.sort(np.argsort(-abs(matrix).ravel())[:10]))


def test_a_file_that_is_not_of_its_kind_is_left_to_others(packed: Path) -> None:
    (packed.parent / "page.txt").write_text("<html><body>not found</body></html>")
    done = run(packed.parent, "pack", "page.txt", "--sparsities", "50", "-o", "x.safetensors")
    assert done.returncode == 3
    assert "is a web page" in done.stderr


def test_its_errors_are_one_line(packed: Path) -> None:
    (packed.parent / "bad.acme").write_text("#acme\n1,2\n3\n")
    done = run(packed.parent, "pack", "bad.acme", "--sparsities", "50", "-o", "x.safetensors")
    assert (done.returncode, done.stderr) == (3, "error: bad.acme: rows of different lengths\n")


def test_its_command_joins_the_others(packed: Path) -> None:
    assert "sums" in run(packed.parent, "--help").stdout
    done = run(packed.parent, "sums", packed.name, "--level", "75%", "-o", "sums.txt", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"output": "sums.txt", "level": 1, "tensors": 1}
    with elsa_format.open(packed) as file:
        expected = f"matrix {file.tensor('matrix', 1).sum():.3f}\n"
    assert (packed.parent / "sums.txt").read_text() == expected
    wrong = run(packed.parent, "sums", packed.name, "--level", "7", "-o", "x.txt")
    assert (wrong.returncode, len(wrong.stderr.splitlines())) == (2, 1)
    assert not (packed.parent / "x.txt").exists()
