"""The table of what was measured, in docs/which-way.md."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.calibrate.methods import Run
from benchmarks.calibrate.scores import Measure, Scores
from benchmarks.calibrate.table import ORIGINAL, read
from benchmarks.finetune import LEVELS

PAGE = Path(__file__).parents[2] / "docs" / "which-way.md"


def table(network: Any, folder: Path, methods: Mapping[str, Any], seeds: int) -> str:
    """A row for each method, a column for each level."""
    ((name, measure),) = network.measures.items()
    original = read(folder, ORIGINAL)
    assert original is not None
    reference = original.scores["dense"][name]
    levels = [*LEVELS.split(","), "dense"]
    heads = [f"{level} %" if level.isdigit() else level for level in levels]
    lines = [
        f"{network.title.partition(',')[0]}: {measure.title}; original "
        f"{measure.show(reference.mean)}.",
        "",
        f"| levels | {' | '.join(heads)} | time |",
        "| --- " * (len(heads) + 2) + "|",
    ]
    for key, method in methods.items():
        runs = [read(folder, Run(key, method.levels, seed)) for seed in range(1, seeds + 1)]
        found = [run for run in runs if run is not None]
        if not found:
            continue
        cells = [_cell(measure, [one.scores.get(n, {}).get(name) for one in found], reference)
                 for n in levels]  # fmt: skip
        seconds = sum(one.seconds for one in found) / len(found)
        busy = " (busy)" if any(one.busy for one in found) else ""
        lines.append(
            f"| {method.title} ({len(found)}) | {' | '.join(cells)} | {seconds:.0f} s{busy} |"
        )
    return "\n".join(lines) + "\n"


def _cell(measure: Measure, found: list[Scores | None], reference: Scores) -> str:
    """The mean over seeds, and the standard error of its distance from the original's."""
    some = [scores for scores in found if scores is not None]
    if not some:
        return ""
    mean = Scores(np.mean([scores.values for scores in some], 0), reference.sizes)
    return f"{measure.show(mean.mean)} ± {measure.show(mean.error(reference))}"


def show(network: Any, folder: Path, methods: Mapping[str, Any], seeds: int) -> None:
    """Print the table, and put it between its marks in the page."""
    body = table(network, folder, methods, seeds)
    print(body, flush=True)
    if not PAGE.exists():
        return
    text = PAGE.read_text("utf-8")
    start, end = f"<!-- {network.name} -->\n", f"<!-- end of {network.name} -->"
    before, found, rest = text.partition(start)
    if found and end in rest:
        PAGE.write_text(f"{before}{start}{body}{end}{rest.partition(end)[2]}", "utf-8")
