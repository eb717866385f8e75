"""Plots of a run: accuracy over sparsity, and the learning curves of all levels."""

import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from elsa_train._files import replacing
from elsa_train._measure import ACCURACY, Measure
from elsa_train._report import COLUMNS, Row, mean_std

MOST_LABELS = 12
Curves = dict[str, dict[int, float]]


def plot(
    seeds: Sequence[Sequence[Row]], path: Path, title: str = "", measure: Measure = ACCURACY
) -> None:
    """Draw accuracy, or loss, over sparsity (Figure 3), logarithmic in non-zero weights."""
    pyplot = _pyplot()
    levels = list(zip(*[rows[:-1] for rows in seeds], strict=True))
    figure, axes = pyplot.subplots(figsize=(6, 4))
    x = [statistics.fmean(row.nonzero for row in rows) for rows in levels]
    for column, colour, label in COLUMNS:
        found = [mean_std([getattr(row, column) for row in rows]) for rows in levels]
        known = [pair for pair in found if pair is not None]
        if len(known) < len(levels):
            continue
        mean = [measure.scale * m for m, _ in known]
        low = [measure.scale * (m - s) for m, s in known]
        high = [measure.scale * (m + s) for m, s in known]
        axes.plot(x, mean, "o-", color=colour, label=label, markersize=4)
        axes.fill_between(x, low, high, color=colour, alpha=0.2)
    dense = [rows[-1] for rows in seeds]
    for column, colour, label in (
        ("elsa", "tab:blue", "ELSA dense"),
        ("reference", "tab:orange", "initial dense"),
    ):
        pair = mean_std([getattr(row, column) for row in dense])
        if pair is not None:
            axes.axhline(measure.scale * pair[0], linestyle="--", color=colour, label=label)
    axes.set_xscale("log")
    names = [rows[0].level for rows in levels]
    step = max(1, len(x) // 8)
    axes.set_xticks(x[::step], names[::step])
    axes.minorticks_off()
    axes.set_xlabel("sparsity (axis: non-zero weights, logarithmic)")
    axes.set_ylabel(measure.axis)
    axes.set_title(title)
    axes.legend()
    figure.tight_layout()
    _save(figure, path)


def read_curves(lines: Iterable[str]) -> Curves:
    """Collect training losses over the run's steps from its JSON lines, a curve for each level.

    A step that a resumed run has trained again counts once. References are left out.

    >>> phases = [("dense", 20, 20), ("sparsify 90%", 10, 30), ("alone 90%", 30, 30)]
    >>> read_curves(
    ...     json.dumps({"phase": phase, "step": step, "steps": steps, "loss": 1.0})
    ...     for phase, step, steps in phases
    ... )
    {'dense': {20: 1.0}, 'sparsify 90%': {30: 1.0}}
    """
    starts: dict[str, int] = {}
    total = 0
    curves: Curves = {}
    for line in lines:
        entry = json.loads(line)
        phase = entry.get("phase", "")
        if not phase.startswith(("dense", "sparsify", "densify", "joint")):
            continue
        if phase not in starts:
            starts[phase] = total
            total += entry["steps"]
        step = starts[phase] + entry["step"]
        for name, loss in (entry.get("losses") or {phase: entry["loss"]}).items():
            curves.setdefault(name, {})[step] = loss
    return curves


def plot_curves(metrics: Path, path: Path, title: str = "") -> None:
    """Draw the training loss of every level over the steps of a run; densify phases are dashed."""
    pyplot = _pyplot()
    curves = read_curves(metrics.read_text("utf-8").splitlines())
    names = list(dict.fromkeys(name.split()[-1] for name in curves))
    colours = pyplot.get_cmap("viridis")
    figure, axes = pyplot.subplots(figsize=(8, 4))
    every = -(-len(names) // MOST_LABELS)
    for name, curve in curves.items():
        level = name.split()[-1]
        place, densify = names.index(level), name.startswith("densify")
        axes.plot(
            list(curve),
            list(curve.values()),
            "--" if densify else "-",
            color="grey" if level == "dense" else colours(place / max(1, len(names) - 1)),
            label=level if not densify and place % every == 0 else None,
            linewidth=1,
        )
    axes.set_xlabel("step")
    axes.set_ylabel("training loss")
    axes.set_title(title)
    axes.legend()
    figure.tight_layout()
    _save(figure, path)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _save(figure: Any, path: Path) -> None:
    with replacing(path) as temporary:
        figure.savefig(temporary, metadata={"Date": None} if path.suffix == ".svg" else None)
    _pyplot().close(figure)
