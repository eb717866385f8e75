"""What only delivery files and their first bytes have: options of the whole, words of commands."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from internals import main

import elsa_format as elsa

BIN = Path(sys.executable).parent


@pytest.fixture
def shipped(rich: Path, tmp_path: Path) -> Path:
    path = tmp_path / "net.ship.safetensors"
    elsa.ship(rich, path)
    return path


@pytest.fixture
def prefix(shipped: Path, tmp_path: Path) -> Path:
    """The first bytes, just those of level 2."""
    with elsa.open_delivery(shipped) as delivery:
        size = delivery.downloads[2]
    path = tmp_path / "cut.ship.safetensors"
    path.write_bytes(shipped.read_bytes()[:size])
    return path


def test_the_whole_goes_with_no_other_wish(shipped: Path) -> None:
    wrongs = ({"level": 1}, {"sparsity": 90}, {"layout": "csr"}, {"keep_levels": True})
    for wrong in wrongs:
        with pytest.raises(TypeError, match="restore"):
            elsa.extract(shipped, io.BytesIO(), restore=True, **wrong)
    with pytest.raises(elsa.TooLarge):
        elsa.extract(shipped, io.BytesIO(), restore=True, max_bytes=10)


def test_from_a_pipe_to_a_pipe(rich: Path, prefix: Path) -> None:
    command = [BIN / "elsa-extract", "-", "--level", "2", "-o", "-"]
    piped = subprocess.run(command, input=prefix.read_bytes(), capture_output=True, check=True)
    expected = io.BytesIO()
    elsa.extract(rich, expected, level=2)
    assert piped.stdout == expected.getvalue()


def test_commands(prefix: Path, tmp_path: Path) -> None:
    run, path = CliRunner().invoke, prefix
    shown = run(main, ["inspect", str(path)]).output
    assert "level 2 downloaded" in shown
    assert "download" in shown
    told = json.loads(run(main, ["inspect", str(path), "--json"]).output)["delivery"]
    assert told["there"] == 2
    assert [entry["level"] for entry in told["levels"]] == [1, 2, 3, "dense"]
    assert told["levels"][1]["size"] == path.stat().st_size
    assert run(main, ["verify", str(path)]).output.startswith(
        f"{path}: valid: 2 of 3 levels downloaded"
    )
    page = tmp_path / "page.html"
    assert run(main, ["inspect", str(path), "--html", str(page)]).exit_code == 0
    assert '"downloads":[' in page.read_text()
    wanting = run(main, ["extract", str(path), "--level", "3", "-o", str(tmp_path / "x")])
    assert (wanting.exit_code, "elsa-fetch" in wanting.stderr) == (3, True)
    assert not (tmp_path / "x").exists()
    whole = run(main, ["extract", str(path), "--restore", "--level", "1", "-o", "x"])
    assert whole.exit_code == 2
