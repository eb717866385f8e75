"""What the page of calibration shows of networks that were measured."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("benchmarks", reason="run from the repository")

from benchmarks.calibrate import table
from benchmarks.calibrate.methods import NETWORKS, Run, best
from benchmarks.calibrate.scores import Measure, Scores
from benchmarks.calibrate.table import ORIGINAL, Found
from elsa_format.levels import Pattern, parse_sparsity


def scores(*values: float) -> Scores:
    return Scores(np.array(values), np.array([1.0, 1, 2]))


def test_a_table_has_means_over_draws_and_errors_against_the_original(tmp_path: Path) -> None:
    network = SimpleNamespace(title="Net", measures={"right": Measure("right, %", 100, 1)})
    assert table.tables(network, tmp_path, 2) == "Not measured yet.\n"
    table.write(tmp_path, ORIGINAL, Found({"dense": {"right": scores(1, 1, 2)}}))
    for draw, first in ((1, 1.0), (2, 0.0)):
        found = {level: {"right": scores(first, 1, 0)} for level in ("90", "80", "70", "50")}
        found["dense"] = {"right": scores(1, 1, 2)}
        run = Run("nested", "90,80,70,50", draw)
        table.write(tmp_path, run, Found(found, 10.0 * draw, 10**9, busy=draw == 2))
    table.write(tmp_path, Run("alone", "2:4", 1), Found({"2:4": {"right": scores(1, 0, 0)}}))
    lines = table.tables(network, tmp_path, 2).splitlines()
    assert lines[0] == "Net: right, %; original 100.0."
    assert lines[2] == "| level | one level alone (1) | nested (2) |"
    # Lost: 0.5, 0 and 2 of 4; about the mean loss of 0.625 a unit: -0.125, 0.625 and -0.75.
    assert lines[4] == "| 90 % |  | 37.5 ± 24.6 |"
    assert "| dense, with 90,80,70,50 |  | 100.0 ± 0.0 |" in lines
    assert "| 2:4 | 25.0 ± 23.4 |  |" in lines
    assert "| time |  | 15 s (busy) |" in lines
    assert "| peak memory |  | 1.0 GB |" in lines


def test_the_trade_is_told_by_the_options(tmp_path: Path) -> None:
    measures = {name: Measure(name, 1, 1) for name in ("right", "unseen")}
    network = SimpleNamespace(title="Net", measures=measures)
    both = {"right": scores(1, 1, 2), "unseen": scores(0, 0, 0)}
    table.write(tmp_path, ORIGINAL, Found({"dense": both}))
    for method in ("dense", "alone", "nested"):
        levels = "90,80,70,50" if method != "alone" else "90"
        table.write(tmp_path, Run(method, levels, 1), Found({"90": both}))
    lines = table.trade(network, tmp_path, 1).splitlines()
    assert lines[2] == "| level | default (1) | `--favour dense` (1) |"
    assert lines[-1].startswith("| peak memory |")
    assert not any("unseen" in line for line in lines)


def test_wanda_keeps_the_best_of_each_row_or_block() -> None:
    score = np.array([[[4.0, 3, 2, 1], [1, 2, 3, 4]]])
    assert best(score, parse_sparsity("75"), 1).tolist() == [[[1, 0, 0, 0], [0, 0, 0, 1]]]
    assert best(score, Pattern(1, 2), 1).tolist() == [[[1, 0, 1, 0], [0, 1, 0, 1]]]
    # Two channels with two places each: of a place's two channels, one.
    assert best(score, Pattern(1, 2), 2).tolist() == [[[1, 1, 0, 0], [0, 0, 1, 1]]]


def test_the_page_has_a_place_for_each_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "calibrate.md"
    page.write_text(table.PAGE.read_text("utf-8"), "utf-8")
    monkeypatch.setattr(table, "PAGE", page)
    for name in NETWORKS:
        table.put(name, f"figures of {name}\n")
        assert f"<!-- {name} -->\nfigures of {name}\n<!-- end of {name} -->" in page.read_text()
    with pytest.raises(SystemExit, match="has no marks for other"):
        table.put("other", "")
