"""Levels chosen by their metrics, by the commands: from files and from delivery files."""

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from internals import find_command

import elsa_format as elsa

ACCURACY = {1: 0.8, 2: 0.85, 3: 0.86}
"""Of the levels; the last two are equal within their standard errors."""


@pytest.fixture
def net(tmp_path: Path) -> Path:
    """A network whose levels and dense network have an accuracy."""
    path, words = tmp_path / "net.safetensors", np.arange(4096, dtype="<u4") % 4
    levels = [
        elsa.LevelSpec(f"level {t}", metrics={"accuracy": found}, errors={"accuracy": 0.01})
        for t, found in ACCURACY.items()
    ]
    tensors = {"w": (words | 0x3F800000).view(np.float32)}
    elsa.write(path, tensors, levels=levels, nested=["w"], dense_metrics={"accuracy": 0.9})
    return path


def run(name: str, *words: object) -> Result:
    return CliRunner().invoke(find_command(name), [*map(str, words), "--json"])


@pytest.mark.parametrize(
    ("words", "level"),
    [
        (["--min", "accuracy=0.81"], 2),
        (["--min=accuracy=0.87"], "dense"),
        (["--min", "accuracy=0", "--layout", "bitmask", "--max-size", "1GB"], 2),
        (["--max", "accuracy=0.8"], 1),
    ],
)
def test_extract(net: Path, tmp_path: Path, words: list[str], level: object) -> None:
    done = run("extract", net, *words, "-o", tmp_path / "out.safetensors")
    assert (done.exit_code, json.loads(done.stdout)["level"]) == (0, level), done.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--min", "accuracy=0.95"], "no level has accuracy >= 0.95: accuracy: level 1 has 0.8, "),
        (["--max", "loss=1"], "no level records loss; record it with elsa-record"),
        (["--min", "accuracy=nan"], "'accuracy=nan' is not a metric and a number, such as"),
        (["--min", "accuracy=1e999"], "is not a metric and a number"),
        (["--min", "=1"], "is not a metric and a number"),
        (["--min", "a=1", "--min", "a=2"], "the same metric twice"),
        (["--min", "accuracy=0.8", "--level", "1"], "several ways to choose a level; give one of "),
        (["--min", "accuracy=0.8", "--restore"], "--restore gives the network as it was"),
    ],
)
def test_what_cannot_be_chosen(net: Path, tmp_path: Path, words: list[str], message: str) -> None:
    done = run("extract", net, *words, "-o", tmp_path / "out.safetensors")
    assert done.exit_code == 2
    assert message in done.stderr.replace("\n", " ")
    assert not (tmp_path / "out.safetensors").exists()


def test_fetch(net: Path, tmp_path: Path) -> None:
    ship, out = tmp_path / "net.ship.safetensors", tmp_path / "device.ship.safetensors"
    elsa.ship(net, ship)
    with elsa.open(ship) as file:
        sizes = file.network.downloads
    done = run("fetch", ship, "--min", "accuracy=0.84", "-o", out)
    assert json.loads(done.stdout)["level"] == 2, done.output
    out.unlink()
    assert elsa.fetch(ship, out, min={"accuracy": 0.8}, max_size=sizes["dense"]).level == "dense"
    out.unlink()
    # Level 3 fits and is better, by less than the errors.
    assert elsa.fetch(ship, out, min={"accuracy": 0.8}, max_size=sizes[3]).level == 2
    out.unlink()
    with pytest.raises(elsa.NoSuchLevel, match=f"or less; level 2 takes {sizes[2]}"):
        elsa.fetch(ship, out, min={"accuracy": 0.84}, max_size=sizes[2] - 1)
    with pytest.raises(TypeError, match="exactly one of"):
        elsa.fetch(ship, out, min={"accuracy": 0.84}, upgrade=2)
