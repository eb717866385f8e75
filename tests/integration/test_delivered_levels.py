"""Delivery files and their first bytes are taken wherever ELSA files are, in shards too."""

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from internals import main

import elsa_format as elsa

LAYOUTS = ("dense", "bitmask", "csr")
BIN = Path(sys.executable).parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network with per-level tensors, its delivery file, and the same in shards."""
    folder = tmp_path_factory.mktemp("delivered")
    rng = np.random.default_rng(5)
    dense = {f"layer{i}": rng.standard_normal((70, 90)).astype(np.float32) for i in range(4)}
    dense["half"] = rng.standard_normal((40, 30)).astype(np.float16)
    dense["bias"] = rng.standard_normal(90).astype(np.float32)
    dense["mean"] = rng.standard_normal(11)
    levels = []
    for t, kept in enumerate((0.95, 0.9, 0.8), 1):
        level = {}
        for name, array in dense.items():
            cut = np.quantile(abs(array.astype(np.float32)), kept) if array.ndim > 1 else 0
            level[name] = np.where(abs(array.astype(np.float32)) > cut, array, array.dtype.type(0))
        level["mean"] = dense["mean"] + t
        level["bias"] = dense["bias"]
        levels.append(level)
    for name, words in (("net.safetensors", {}), ("m.safetensors.index.json", {"size": 40_000})):
        size = words.get("size")
        elsa.pack(dense, folder / name, levels=levels, per_level="mean", max_shard_size=size)
    elsa.ship(folder / "net.safetensors", folder / "net.ship.safetensors", block=10)
    elsa.ship(folder / "m.safetensors.index.json", folder / "m.ship.safetensors.index.json")
    return folder


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].tobytes() == other[name].tobytes() and one[name].shape == other[name].shape
        for name in one
    )


def cut(folder: Path, level: Any, tmp_path: Path) -> Path:
    """The first bytes, just those of a level."""
    with elsa.open_delivery(folder / "net.ship.safetensors") as delivery:
        size = delivery.downloads[level]
    path = tmp_path / "cut.ship.safetensors"
    path.write_bytes((folder / "net.ship.safetensors").read_bytes()[:size])
    return path


@pytest.mark.parametrize("level", [1, 2, 3, "dense"])
def test_every_verb_takes_the_first_bytes(folder: Path, tmp_path: Path, level: Any) -> None:
    path = cut(folder, level, tmp_path)
    with elsa.open(folder / "net.safetensors") as file, elsa.open(path) as delivered:
        expected = file.load(level)
        assert same(delivered.load(level), expected)
        assert same({n: delivered.tensor(n, level) for n in expected}, expected)
        if level != "dense":
            with pytest.raises(elsa.Incomplete, match="fetch"):
                delivered.load("dense")
    assert same(dict(elsa.stream(path, level=level)), expected)
    command = [BIN / "elsa-extract", "-", "--level", str(level), "-o", "-"]
    piped = subprocess.run(command, input=path.read_bytes(), capture_output=True, check=True)
    for layout in LAYOUTS if level != "dense" else ("dense",):
        one, other = io.BytesIO(), io.BytesIO()
        elsa.extract(path, one, level=level, layout=layout)
        elsa.extract(folder / "net.safetensors", other, level=level, layout=layout)
        assert one.getvalue() == other.getvalue()
        assert layout != "dense" or one.getvalue() == piped.stdout
    if level != "dense":
        cut_here, cut_there = io.BytesIO(), io.BytesIO()
        elsa.extract(path, cut_here, level=level, keep_levels=True)
        elsa.extract(folder / "net.safetensors", cut_there, level=level, keep_levels=True)
        assert cut_here.getvalue() == cut_there.getvalue()
    report = elsa.verify(path)
    assert report.there == level
    assert report.digests == (3 if level == "dense" else level)


@pytest.mark.parametrize("level", [1, 3, "dense"])
def test_shards(folder: Path, tmp_path: Path, level: Any) -> None:
    index = folder / "m.ship.safetensors.index.json"
    with elsa.open(folder / "m.safetensors.index.json") as file, elsa.open(index) as delivered:
        expected = file.load(level)
        assert same(delivered.load(level), expected)
        assert same({n: delivered.tensor(n, level) for n in expected}, expected)
    assert same(dict(elsa.stream(index, level=level)), expected)
    out = tmp_path / "level.safetensors"
    elsa.extract(index, out, level=level, jobs=2)
    assert same(elsa.load_level(out), expected)
    shards = tmp_path / "level.safetensors.index.json"
    elsa.extract(index, shards, level=level)
    assert same(elsa.load_level(shards), expected)
    if level != "dense":
        elsa.extract(index, tmp_path / "cut.safetensors.index.json", level=level, keep_levels=True)
        with elsa.open(tmp_path / "cut.safetensors.index.json") as kept:
            assert same(kept.load(level), expected)
            assert same(kept.load(), expected)
    assert elsa.verify(index).digests == 3


def test_shards_of_which_one_has_less(folder: Path, tmp_path: Path) -> None:
    for path in folder.glob("m-*.ship.*"):
        shutil.copy(path, tmp_path)
    index = shutil.copy(folder / "m.ship.safetensors.index.json", tmp_path)
    last = sorted(tmp_path.glob("m-*"))[-1]
    with elsa.open_delivery(last) as delivery:
        size = delivery.downloads[2]
    os.truncate(last, size)
    assert elsa.verify(index).there == 2
    with elsa.open(index) as file, elsa.open(folder / "m.safetensors.index.json") as whole:
        assert same(file.load(2), whole.load(2))
        with pytest.raises(elsa.Incomplete):
            file.load(3)


def test_the_whole_comes_back(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "net.safetensors"
    assert elsa.extract(folder / "net.ship.safetensors", out, restore=True) == "dense"
    assert out.read_bytes() == (folder / "net.safetensors").read_bytes()
    index = tmp_path / "m.safetensors.index.json"
    elsa.extract(folder / "m.ship.safetensors.index.json", index, restore=True)
    for path in folder.glob("m*.safetensors*"):
        if ".ship." not in path.name:
            assert (tmp_path / path.name).read_bytes() == path.read_bytes(), path.name
    wrongs = ({"level": 1}, {"sparsity": 90}, {"layout": "csr"}, {"keep_levels": True})
    for wrong in wrongs:
        with pytest.raises(TypeError, match="restore"):
            elsa.extract(folder / "net.ship.safetensors", io.BytesIO(), restore=True, **wrong)
    with pytest.raises(elsa.InvalidOption, match="not a delivery file"):
        elsa.extract(folder / "net.safetensors", io.BytesIO(), restore=True)
    with pytest.raises(elsa.TooLarge):
        elsa.extract(folder / "net.ship.safetensors", io.BytesIO(), restore=True, max_bytes=10)
    prefix = cut(folder, 3, tmp_path)
    with pytest.raises(elsa.Incomplete):
        elsa.extract(prefix, tmp_path / "x.safetensors", restore=True)
    assert not (tmp_path / "x.safetensors").exists()


def test_what_is_made_for_others_refuses_it(folder: Path) -> None:
    with pytest.raises(elsa.InvalidLayout, match="is a delivery file"):
        elsa.load_level(folder / "net.ship.safetensors")
    with pytest.raises(elsa.InvalidLayout, match="is a delivery file"):
        elsa.pack(folder / "net.ship.safetensors", io.BytesIO(), sparsities=[90])


def test_commands(folder: Path, tmp_path: Path) -> None:
    run, path = CliRunner().invoke, cut(folder, 2, tmp_path)
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
