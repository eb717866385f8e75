"""What commands print, for people: it fits their terminal, and says what they need to know."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from internals import estimated_downloads, main, open_network
from terminal import on_a_terminal

import elsa_format as elsa
from elsa_format import cli

BIN = Path(sys.executable).parent
COLUMNS = 80


def weights(*shape: int, scale: float = 1.0) -> Any:
    return (scale * np.random.default_rng(0).standard_normal(shape)).astype(np.float32)


@pytest.fixture
def long(tmp_path: Path) -> Path:
    """A network whose names and levels are more than a terminal has columns."""
    names = [
        f"encoder.layer.{n}.attention.output.a_rather_long_name.dense.weight" for n in range(6)
    ]
    out = tmp_path / "net.safetensors"
    sparsities = [99, 98, 97, 95, 93, 90, 85, 80]
    elsa.pack({name: weights(64, 64) for name in names}, out, sparsities=sparsities)
    return out


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="no terminals")
def test_tables_fit_the_terminal(
    long: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a path is not cut
    lines = on_a_terminal("inspect", long.name)
    assert max(map(len, lines)) <= COLUMNS
    row = next(line for line in lines if line.startswith("encoder.layer.0"))
    assert "…" in row  # the name's middle, and levels that do not fit
    assert row.split()[0].endswith("weight")
    assert all(word.endswith("%") for word in row.split()[3:-1])
    level = tmp_path / "level.safetensors"
    elsa.extract(long, level, level=1, layout="bitmask")
    assert max(map(len, on_a_terminal("inspect", level)[3:])) <= COLUMNS


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="no terminals")
@pytest.mark.parametrize("columns", [60, 80])
def test_metrics_are_shown_on_a_narrow_terminal(rich: Path, columns: int) -> None:
    """Sizes are left out before them."""
    lines = on_a_terminal("inspect", rich, "--no-layers", columns=columns)
    (head,) = [at for at, line in enumerate(lines) if line.startswith("level ")]
    assert max(map(len, lines[head:])) <= columns
    end = lines[head].index("accuracy") + len("accuracy")
    cells = [line[:end].split()[-1] for line in lines[head + 1 : head + 4]]
    assert cells == ["0.9", "0.93", "0.95"]


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="no terminals")
@pytest.mark.parametrize("columns", [60, 80])
def test_summaries_break_between_words(
    long: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.chdir(tmp_path)
    elsa.ship(long, "ship.safetensors")
    elsa.fetch("ship.safetensors", "out.safetensors", level=2)
    for words in (
        ["verify", long.name],
        ["fetch", "ship.safetensors", "--level", "1", "-o", "out.safetensors"],
        ["extract", long.name, "--level", "1", "-o", f"{'level' * 8}.safetensors"],
    ):
        lines = on_a_terminal(*words, columns=columns)
        assert max(map(len, lines)) <= columns
        complete = CliRunner().invoke(main, [*words, *(["-f"] if words[0] == "extract" else [])])
        assert " ".join(line.strip() for line in lines) == complete.output.strip()


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="no terminals")
def test_lists_of_names_break_between_words(long: Path, tmp_path: Path) -> None:
    elsa.extract(long, tmp_path / "dense.safetensors", level="dense")
    words = ["pack", tmp_path / "dense.safetensors", "--sparsities", "90,80", "-o"]
    lines = on_a_terminal(*words, tmp_path / "out")
    assert max(len(line) for line in lines[:-1]) <= COLUMNS
    names = [word.rstrip(",") for line in lines for word in line.split() if "encoder" in word]
    with elsa.open(long) as file:
        assert names == list(file.tensors)[:4]


def test_what_is_piped_is_complete(long: Path) -> None:
    lines = CliRunner().invoke(main, ["inspect", str(long)]).output.splitlines()
    assert max(map(len, lines)) > COLUMNS
    with elsa.open(long) as file:
        assert all(any(line.startswith(f"{name} ") for line in lines) for name in file.tensors)


def test_a_narrow_table() -> None:
    """Names are cut first; then columns are left out, the last first."""
    rows = [["name", *(f"level {n}" for n in range(9))], ["n" * 50, *["12.34%"] * 9]]
    assert cli.table(rows, width=None).splitlines()[1].startswith("n" * 50)
    for width in (40, 60, 80, 100, 120, 200):
        lines = cli.table(rows, width=width).splitlines()
        assert max(map(len, lines)) <= width
        assert lines[1].split()[1] == "12.34%"
    assert cli.cut("abcdef", 5) == "ab…ef"


@pytest.mark.parametrize("size", [64, 512])
def test_what_a_level_takes_is_estimated(size: int, tmp_path: Path) -> None:
    net = tmp_path / "net.safetensors"
    dense = {"layer": weights(size, 256), "embed": weights(256, 128), "bias": weights(256)}
    report = elsa.pack(dense, net, sparsities=[95, 80], exclude="embed")
    sizes = elsa.ship(net, tmp_path / "net.ship.safetensors").sizes
    assert report.downloads.keys() == sizes.keys()
    for level, size in sizes.items():
        assert report.downloads[level] == pytest.approx(size, rel=0.1)
    with open_network(net) as network:
        assert estimated_downloads(network.header.tensors, network.profile) == report.downloads
    found = CliRunner().invoke(main, ["inspect", str(net)]).output
    assert cli.show_estimate(report.downloads[1]) in found
    found = CliRunner().invoke(main, ["inspect", str(net), "--json"]).output
    assert json.loads(found)["levels"][0]["download_estimate"] == report.downloads[1]


def test_the_share_of_parameters_that_is_nested(tmp_path: Path) -> None:
    """That of 90 % of half of the weights is not 90 % of all."""
    np.savez(tmp_path / "dense.npz", layer=weights(47, 100), embed=weights(53, 100))
    net = tmp_path / "net.safetensors"
    words = ["pack", str(tmp_path / "dense.npz"), "--sparsities", "90", "--exclude", "embed"]
    found = CliRunner().invoke(main, [*words, "-o", str(net)]).stderr
    assert "47% of all parameters are nested: 4,700 of 10,000" in found
    assert (
        "10,000 parameters (47% nested)" in CliRunner().invoke(main, ["inspect", str(net)]).output
    )
    elsa.extract(net, tmp_path / "level", level=1)
    found = CliRunner().invoke(main, ["inspect", str(tmp_path / "level")]).output
    assert "10,000 parameters (47% nested)" in found


# --- What was chosen ------------------------------------------------------------------------------


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    """The directory of a transformer."""
    layers = {"encoder.layer.0.dense.weight": weights(64, 64), "pooler.weight": weights(64, 64)}
    dense = {"embeddings.word_embeddings.weight": weights(100, 64, scale=3), **layers}
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "config.json").write_text("{}")
    elsa.pack(dense, tmp_path / "packed", sparsities=[50])
    elsa.extract(tmp_path / "packed", tmp_path / "bert" / "model.safetensors", level="dense")
    return tmp_path / "bert"


def packed(source: Path, *options: str) -> str:
    words = ["pack", str(source), "-f", "-o", str(source.parent / "out"), *options]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    return result.stderr


def test_defaults_are_printed_with_their_reason(bert: Path) -> None:
    found = packed(bert, "--sparsities", "90")
    assert "default: --scope uniform, as DENSE is a model directory\n" in found
    assert "default: layers only, as DENSE is a model directory; --nest-all" in found
    assert "warning: the model directory" not in found
    found = packed(bert, "--sparsities", "90", "--scope", "uniform", "--nest-all")
    assert "default:" not in found
    assert "along the inputs of each layer" in packed(bert, "--sparsities", "2:4")
    elsewhere = bert.rename(bert.with_name("other"))
    found = packed(elsewhere / "model.safetensors", "--sparsities", "90")
    assert "default: --scope global, as DENSE is not a model directory\n" in found


def test_a_file_of_a_transformer_is_packed_as_before_and_told_what_differs(bert: Path) -> None:
    weights_file = bert / "model.safetensors"
    os.rename(bert / "config.json", bert.parent / "config.json")
    found = packed(weights_file, "--sparsities", "90")
    assert "would get --scope uniform, and no levels in 1 of these tensors" in found
    assert "('embeddings.word_embeddings.weight')" in found
    found = packed(weights_file, "--sparsities", "90", "--scope", "uniform")
    assert "would get no levels in 1 of these tensors" in found
    found = packed(weights_file, "--sparsities", "90", "--exclude", "embeddings*")
    assert "warning: the model directory" not in found


def test_warnings_name_the_option(bert: Path) -> None:
    """Magnitudes of other scales starve; each in its own scope does not."""
    found = packed(bert / "model.safetensors", "--sparsities", "99")
    assert "; --scope uniform gives each its share" in found
    assert "gives each" not in packed(bert, "--sparsities", "99")


# --- One way to say it ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        ["pack", "x", "--bad"],
        ["pack", "x", "-o", "y"],
        ["pack", "--sparsities", "9", "-o", "y"],
        ["inspect", "x", "--full"],
        ["inspect", "missing"],
        ["nothing"],
        ["extract", "x", "--max-size", "many", "-o", "y"],
    ],
)
def test_errors_begin_alike(words: list[str], tmp_path: Path) -> None:
    done = subprocess.run(
        [str(BIN / "elsa"), *words], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode in (1, 2)
    assert done.stdout == ""
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert "Error:" not in done.stderr
    assert done.stderr.startswith(("error: ", "Usage: elsa"))


def test_help_where_nothing_is_asked_for(tmp_path: Path) -> None:
    done = subprocess.run([str(BIN / "elsa")], capture_output=True, text=True, check=False)
    assert done.stderr.startswith("Usage: elsa [OPTIONS] COMMAND")
    assert "error" not in done.stderr


def test_a_report_is_titled_by_its_directory(bert: Path, tmp_path: Path) -> None:
    elsa.pack(bert, tmp_path / "bert-elsa", sparsities=[50])
    page = tmp_path / "report.html"
    for source in (tmp_path / "bert-elsa", f"{tmp_path}/bert-elsa/", f"{tmp_path}/bert-elsa/."):
        words = ["inspect", str(source), "--html", str(page), "-f"]
        assert CliRunner().invoke(main, words).exit_code == 0
        assert "<title>bert-elsa" in page.read_text()


def test_help_of_pack_names_what_it_reads() -> None:
    shown = CliRunner().invoke(main, ["pack", "--help"]).output
    for suffix in (".safetensors", ".npz", ".pt", ".bin", ".onnx", ".index.json"):
        assert suffix in shown
