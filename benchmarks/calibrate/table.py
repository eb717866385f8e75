"""What was measured, kept in a file for each run, and the tables that the page shows of it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.calibrate.methods import METHODS, TRADES, Network, Run
from benchmarks.calibrate.scores import Measure, Scores

PAGE = Path(__file__).parents[2] / "docs" / "calibrate.md"
LEVELS = ("90,80,70,50", "1:4,2:4")
"""Those of a network, of two networks."""
ORIGINAL = Run("original", "dense", 0)


@dataclass(frozen=True)
class Found:
    """A run's scores by level and measure, and what packing took."""

    scores: dict[str, dict[str, Scores]]
    seconds: float = 0.0
    peak: int = 0
    busy: bool = False


def path_of(folder: Path, run: Run) -> Path:
    """Where a run is kept."""
    return folder / f"{run.method}-{run.levels.replace(':', 'of')}-{run.draw}.json"


def write(folder: Path, run: Run, found: Found) -> None:
    """Keep what was measured."""
    rows = {
        level: {
            name: [np.round(part, 7).tolist() for part in (scores.values, scores.sizes)]
            for name, scores in measures.items()
        }
        for level, measures in found.scores.items()
    }
    content = vars(found) | {"scores": rows}
    path_of(folder, run).write_text(json.dumps(content) + "\n", "utf-8")


def read(folder: Path, run: Run) -> Found | None:
    """What was kept, if the run has finished."""
    if not (path := path_of(folder, run)).is_file():
        return None
    content = json.loads(path.read_text("utf-8"))
    rows = {
        level: {name: Scores(*map(np.asarray, parts)) for name, parts in measures.items()}
        for level, measures in content.pop("scores").items()
    }
    return Found(rows, **content)


def runs(method: str, draw: int) -> list[Run]:
    """What a method is run for: each set of levels, or each level."""
    levels = LEVELS if method != "magnitude" or draw == 1 else ()  # which needs no samples
    if method == "alone":
        levels = tuple(level for some in LEVELS for level in some.split(","))
    return [Run(method, some, draw) for some in levels]


def trade(network: Network, folder: Path, draws: int) -> str:
    """The table of what the trade between levels and the dense network costs; its first measure."""
    titles = {method: title for method, (title, _) in TRADES.items()}
    return (
        tables(network, folder, draws, titles).partition("\n\n" + network.title)[0].rstrip() + "\n"
    )


def tables(network: Network, folder: Path, draws: int, titles: Mapping[str, str] = METHODS) -> str:
    """The tables of a network, one for each measure; the first with time and memory."""
    original = read(folder, ORIGINAL)
    if original is None:
        return "Not measured yet.\n"
    columns = {method: _columns(folder, method, draws) for method in titles}
    columns = {method: found for method, found in columns.items() if any(found.values())}
    parts = []
    for number, (name, measure) in enumerate(network.measures.items()):
        reference = original.scores["dense"][name]
        lines = [
            f"{network.title}: {measure.title}; original {measure.show(reference.mean)}.",
            "",
            "| level | "
            + " | ".join(_head(titles[m], found) for m, found in columns.items())
            + " |",
            "| --- " * (1 + len(columns)) + "|",
        ]
        for levels in LEVELS:
            for level in (*levels.split(","), "dense"):
                cells = [
                    _cell(measure, _scores(found, levels, level, name), reference)
                    for found in columns.values()
                ]
                label = f"{level} %" if level.isdigit() else level
                if level == "dense":
                    label += f", with {levels}"
                lines.append(f"| {label} | {' | '.join(cells)} |")
        if number == 0:
            lines += _costs(columns)
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


Column = dict[Run, Found]


def _columns(folder: Path, method: str, draws: int) -> Column:
    every = [run for draw in range(1, draws + 1) for run in runs(method, draw)]
    found = {run: read(folder, run) for run in every}
    return {run: one for run, one in found.items() if one is not None}


def _head(title: str, column: Column) -> str:
    return f"{title} ({len({run.draw for run in column})})"


def _scores(column: Column, levels: str, level: str, name: str) -> list[Scores]:
    """Those of all draws that have the level."""
    return [
        one.scores[level][name]
        for run, one in column.items()
        if run.levels in (levels, level) and level in one.scores
    ]


def _cell(measure: Measure, found: Sequence[Scores], reference: Scores) -> str:
    """The mean over draws, and the standard error of its distance from the original's."""
    if not found:
        return ""
    mean = Scores(np.mean([one.values for one in found], 0), reference.sizes)
    return f"{measure.show(mean.mean)} ± {measure.show(mean.error(reference))}"


def _costs(columns: dict[str, Column]) -> list[str]:
    """How long the first levels took, and how much memory."""
    wanted = {LEVELS[0], *LEVELS[0].split(",")}
    times, peaks = [], []
    for column in columns.values():
        kept = {run: one for run, one in column.items() if run.levels in wanted}
        draws = {run.draw for run in kept}
        seconds = sum(one.seconds for one in kept.values()) / max(len(draws), 1)
        busy = " (busy)" if any(one.busy for one in kept.values()) else ""
        times.append(f"{seconds:.0f} s{busy}" if kept else "")
        peaks.append(f"{max(one.peak for one in kept.values()) / 1e9:.1f} GB" if kept else "")
    return [f"| time | {' | '.join(times)} |", f"| peak memory | {' | '.join(peaks)} |"]


def show(network: Network, folder: Path, draws: int) -> None:
    """Put all tables of a network into the page."""
    put(network.name, tables(network, folder, draws))
    if f"<!-- {network.name}-trade -->" in PAGE.read_text("utf-8"):
        put(f"{network.name}-trade", trade(network, folder, draws))


def put(name: str, body: str) -> None:
    """Put the tables between their marks in the page."""
    text = PAGE.read_text("utf-8")
    start, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    before, found, rest = text.partition(start)
    if not found or end not in rest:
        raise SystemExit(f"{PAGE}: has no marks for {name}")
    PAGE.write_text(f"{before}{start}{body}{end}{rest.partition(end)[2]}", "utf-8")
