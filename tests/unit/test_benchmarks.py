"""The benchmarks run, and judge what they measure."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

pytest.importorskip("benchmarks", reason="run from the repository")

from benchmarks import copies
from benchmarks._files import Files
from benchmarks._rows import Race, Row, measure
from benchmarks.plots import draw, tables

REPOSITORY = Path(__file__).parents[2]


def test_rows_run_and_leave_nothing_behind(tmp_path: Path) -> None:
    out = tmp_path / "table.md"
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    options = ["--size", "1", "--largest", "4", "--seconds", "0.01", "--scratch", str(scratch)]
    rows = ["--only", "load.csr", "--only", "stream.extract_*", "--only", "pack.counters"]
    command = [sys.executable, "-m", "benchmarks", *options, *rows, "--output", str(out)]
    subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True)
    table = out.read_text("utf-8")
    assert "| load a level, CSR |" in table
    assert "| pack from counters, no digests |" in table
    assert list(scratch.iterdir()) == []


def judge(tmp_path: Path, subject: int, peer: int, *, contains_peer: bool) -> bool | None:
    """Whether a row with a target of 1.5 × counts as reached, for two times on a clock."""
    clock: list[int] = []
    race = Race(
        lambda: clock.extend(range(subject)),
        lambda: clock.extend(range(peer)),
        1,
        contains_peer=contains_peer,
        clock=lambda: len(clock),
    )
    row = Row("x.y", "what", "peer", "≤ 1.5 ×", lambda files: race)
    return measure(row, Files(tmp_path, 1, 1), 0).reached


def test_a_target_is_reached_or_missed(tmp_path: Path) -> None:
    assert judge(tmp_path, 3, 2, contains_peer=False) is True
    assert judge(tmp_path, 16, 10, contains_peer=False) is False


def test_a_subject_faster_than_its_own_part_proves_nothing(tmp_path: Path) -> None:
    assert judge(tmp_path, 10, 10, contains_peer=True) is True
    assert judge(tmp_path, 8, 10, contains_peer=True) is None


SVG = "{http://www.w3.org/2000/svg}"
TABLES = """\
# Benchmarks

## Load

| what | against | ratio | target |
| --- | --- | --- | --- |
| load | `a < b` | 0.30 × | ≤ 0.5 × |
| run | b | 2.00 × | ≥ 4 × faster |
| x | y | 1 × | |

## Fast levels

| network | threads | 70% zeros | 80% zeros | 90% zeros |
| --- | --- | --- | --- | --- |
| MLP | 1 | 1.0 × | 2.0 × (≥ 1.60) | 4.00 × (**not ≥ 5**) |

## Bytes to each level

| network | | level 1 | level 2 | 3 … last | whole |
| --- | --- | --- | --- | --- | --- |
| net | F32 | 5.0 % | 9.0 % | 12.0 … 20.0 % | 75.0 % |
"""


def test_pictures_show_what_a_page_holds(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    page = tmp_path / "page.md"
    page.write_text(TABLES, "utf-8")
    draw(page)
    once = page.read_text("utf-8")
    assert once.index("(images/benchmarks.svg)") < once.index("## Load")
    assert "## Fast levels\n\n![" in once
    draw(page)
    assert page.read_text("utf-8") == once

    def drawn(name: str, mark: str) -> list[str]:
        tree = ElementTree.parse(tmp_path / "images" / f"{name}.svg")
        return [found.attrib["class"] for found in tree.iter(f"{SVG}{mark}")]

    assert drawn("benchmarks", "rect") == ["c1", "missed"]
    assert drawn("fast", "circle")[3:] == ["s2", "s3", "s4"]
    assert drawn("bytes", "rect") == ["c1", "c2", "c3", "c0"]


FIGURES = REPOSITORY / "docs" / "benchmarks.md"
MARKED = re.compile(r"<!-- docs/benchmarks\.md: \w+ -->\n.*?<!-- end -->", re.DOTALL)
PAGES = [REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md"), REPOSITORY / "js/README.md"]


def test_pages_and_pictures_repeat_the_figures_of_the_benchmarks(tmp_path: Path) -> None:
    docs = shutil.copytree(REPOSITORY / "docs", tmp_path / "docs")
    shutil.copy(REPOSITORY / "README.md", tmp_path)
    draw(docs / "benchmarks.md")
    copies.repeat(tmp_path)
    for path in [path for path in tmp_path.rglob("*") if path.is_file()]:
        assert path.read_bytes() == (REPOSITORY / path.relative_to(tmp_path)).read_bytes(), path
    with pytest.raises(SystemExit, match="no place for other"):
        copies.put(tmp_path / "README.md", "other", "")


def test_a_figure_that_is_measured_anew_is_repeated(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    for name in (
        "README.md",
        "docs/fast.md",
        "docs/benchmarks.md",
        "docs/calibrate.md",
        "docs/pack.md",
    ):
        shutil.copy(REPOSITORY / name, tmp_path / name)
    page = tmp_path / "docs" / "benchmarks.md"
    text = page.read_text("utf-8")
    (row,) = [line for line in text.splitlines() if line.startswith("| masking kernel, F32 |")]
    (size,) = [line for line in text.splitlines() if line.startswith("| magika | F32 |")]
    text = text.replace(row, re.sub(r"[\d.]+ ×", "9.87 ×", row, count=1))
    page.write_text(text.replace(size, re.sub(r"\| [\d.]+ %", "| 0.1 %", size, count=1)), "utf-8")
    copies.repeat(tmp_path)
    readme = (tmp_path / "README.md").read_text("utf-8")
    assert "| masking kernel against memcpy, one thread | 9.87 × |" in readme
    assert "F32 | 0.1–4.9 % |" in readme


def test_no_other_page_has_a_table_of_the_same_rows() -> None:
    def rows(text: str) -> set[str]:
        cells = [next(iter(row.values())) for table in tables(text) for row in table.rows]
        return {re.split(r", \d", cell.replace("`", ""))[0] for cell in cells} - {"dense", ""}

    measured = rows(FIGURES.read_text("utf-8"))
    for page in PAGES:
        if page != FIGURES:
            assert rows(MARKED.sub("", page.read_text("utf-8"))) & measured == set(), page.name


def test_the_picture_of_a_delivery_file_has_the_sizes_of_a_real_one() -> None:
    picture = (FIGURES.parent / "images" / "delivery.svg").read_text("utf-8")
    (row,) = re.findall(r"\| magika \| F32 \|[^|]*\|(.*)\|.*\|", FIGURES.read_text("utf-8"))
    assert re.findall(r"[\d.]+ %", picture) == re.findall(r"[\d.]+ %", row)


def test_the_page_of_results_has_the_commands_and_the_picture_of_its_tables(tmp_path: Path) -> None:
    pytest.importorskip("jax")
    from benchmarks import curves, results

    text = results.PAGE.read_text("utf-8")
    for part in results.PARTS:
        assert f"<!-- {part.name} -->\n{results.shown(part)}\n| level |" in text
    (tmp_path / "images").mkdir()
    (tmp_path / "results.md").write_text(text, "utf-8")
    curves.draw(tmp_path / "results.md")
    drawn = (tmp_path / "images" / "fifty-levels.svg").read_text("utf-8")
    assert drawn == (results.PAGE.parent / "images" / "fifty-levels.svg").read_text("utf-8")
    ElementTree.fromstring(drawn)
    assert drawn.count("<polyline") == 3
    assert drawn.count("<circle") == 3


def test_sheets_of_an_npm_package_become_the_binary_files_of_cifar10(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    pytest.importorskip("jax")
    from benchmarks import cifar10
    from elsa_train.data.arrays import load_cifar

    rng = np.random.default_rng(0)
    images = {name: rng.integers(0, 256, (3, 32, 32, 3), np.uint8) for name in cifar10.SHEETS}
    for name, pixels in images.items():
        image.fromarray(pixels.reshape(3, 1024, 3)).save(tmp_path / f"{name}.png")
    labels = [0] * 50_000
    for first in range(0, 50_000, 10_000):
        labels[first : first + 3] = [first // 10_000, 8, 9]
    (tmp_path / "train_lables.json").write_text(json.dumps(labels))
    (tmp_path / "test_lables.json").write_text("[6, 7, 8]")
    cifar10.repack(tmp_path, tmp_path / "out")
    data = load_cifar(tmp_path / "out", 10)
    wanted = np.concatenate([images[f"data_batch_{i}"] for i in range(1, 6)])
    assert np.array_equal(data.train[0], wanted)
    assert data.train[1].tolist() == [x for i in range(5) for x in (i, 8, 9)]
    assert np.array_equal(data.test[0], images["test_batch"])
    assert data.test[1].tolist() == [6, 7, 8]


def test_a_table_keeps_what_was_not_run_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("jax")
    from benchmarks import results

    monkeypatch.setattr(results, "RUNS", tmp_path)
    part = results.part("net", "digits", 1, seeds=2, twice="digits --epochs 40")
    before = (
        "| level | actual sparsity | sequential (2) | joint (2) | joint, twice the steps (1) |\n"
        "| --- | --- | --- | --- | --- |\n"
        "| 90% | 89.0000% | 91.00 ± 1.00 | 92.00 | 80.00 |\n"
        "| dense |  | 93.00 | 94.00 | 81.00 |\n"
        "\n"
        "- `sequential`: of 1 of 2 seeds something.\n"
        "- `twice`: something old.\n"
    )
    assert results.table(part, "") == "Not run yet.\n"
    assert results.table(part, before) == before
    for seed, accuracy in enumerate((0.5, 0.7)):
        (tmp_path / "net" / "twice" / f"seed-{seed}").mkdir(parents=True)
        rows = [
            {"level": "90%", "sparsity": 0.89, "nonzero": 11, "elsa": accuracy},
            {"level": "dense", "sparsity": 0.0, "nonzero": 100, "elsa": 0.9},
        ]
        found = tmp_path / "net" / "twice" / f"seed-{seed}" / "results.json"
        found.write_text(json.dumps({"rows": rows}))
    after = results.table(part, before)
    assert after == (
        "| level | actual sparsity | sequential (2) | joint (2) | joint, twice the steps (2) |\n"
        "| --- | --- | --- | --- | --- |\n"
        "| 90% | 89.0000% | 91.00 ± 1.00 | 92.00 | 60.00 ± 10.00 |\n"
        "| dense |  | 93.00 | 94.00 | 90.00 ± 0.00 |\n"
        "\n"
        "- `sequential`: of 1 of 2 seeds something.\n"
    )
