"""What a run tells: progress, JSON lines, the table of results and plots."""

import json
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import IO, Any

from elsa_format.cli import columns, cut, wrap
from elsa_train._folder import Row, drop_cut_line, replacing
from elsa_train._loop import Report
from elsa_train._multilevel import FrozenLevel
from elsa_train._recipe import ACCURACY, Measure, of_language

COLUMNS = (
    ("elsa", "tab:blue", "ELSA"),
    ("reference", "tab:orange", "reference"),
    ("equal_epochs", "tab:green", "reference, equal epochs"),
    ("alone", "tab:red", "alone, equal steps"),
)
Curves = dict[str, dict[int, float]]
Hook = Callable[[int, dict[str, Any]], None]
"""Called with the steps done in all phases, and with what is a line of metrics.jsonl."""
MOST_LABELS = 12
SHORTEST = 6
"""Characters of a phase's name that are left when it is cut."""


class Reporter:
    """Progress on a stream, a line a second on a terminal, and metrics as JSON lines in a file."""

    def __init__(
        self,
        stream: IO[str] | None = None,
        lines: Path | None = None,
        hooks: Sequence[Hook] = (),
    ) -> None:
        """Take a stream, or None for none, the file of JSON lines to append to, and hooks."""
        self._stream, self._path, self._hooks = stream, lines, hooks
        self._terminal = stream is not None and stream.isatty()
        self._drawn = False
        self._every = 1.0 if self._terminal else 10.0
        self._lines: IO[str] | None = None
        self._started = self._shown = time.monotonic()
        self._total = self._done = self._skipped = self._labels = 0

    @property
    def silent(self) -> bool:
        """Tell whether nobody is told anything."""
        return self._stream is None

    def note(self, text: str) -> None:
        """Tell what the user should know before it starts."""
        self._say(f"note: {text}")

    def expect(self, steps: int) -> None:
        """Add steps to the time left."""
        self._total += steps

    def resumed(self, steps: int) -> None:
        """Count steps that an earlier run has done."""
        self._done += steps
        self._skipped += steps
        self._say(f"resumed after {steps} steps")

    def watch(self, report: Report) -> None:
        """Take a phase's report."""
        now = time.monotonic()
        self._labels += report.labels
        self._done += report.advanced
        elapsed = now - self._started
        rate = self._labels / max(elapsed, 1e-9)
        steps = self._done - self._skipped
        per_step = elapsed / max(steps, 1)
        self._write({**report._asdict(), f"{report.unit}_per_second": round(rate, 1)})
        if now - self._shown < self._every and report.step < report.steps:
            return
        self._shown = now
        left = per_step * (report.steps - report.step)
        line = show(report, rate, left, per_step * max(self._total - self._done, 0), self._width())
        if self._terminal:
            print(f"\r\x1b[K{line}", end="", file=self._stream, flush=True)
            self._drawn = True
        else:
            self._say(line)

    def _width(self) -> int | None:
        return columns(err=True, narrowest=1) if self._terminal else None

    def level(self, frozen: FrozenLevel) -> None:
        """Tell of a level just frozen."""
        measures = "  ".join(f"{k} {v:.4f}" for k, v in frozen.metrics.items())
        self._write({"frozen": frozen.level.name, "sparsity": frozen.sparsity, **frozen.metrics})
        self._say(f"level {frozen.level.name}: actual sparsity {frozen.sparsity:.4%}  {measures}")

    def dense(self, name: str, metrics: dict[str, float]) -> None:
        """Tell of a dense network measured."""
        self._write({"measured": name, **metrics})
        self._say(f"{name}: " + "  ".join(f"{k} {v:.4f}" for k, v in metrics.items()))

    def _say(self, text: str) -> None:
        if self._stream is not None:
            self._clear()
            print(wrap(text, self._width()), file=self._stream, flush=True)

    def _clear(self) -> None:
        if self._drawn:
            print("\r\x1b[K", end="", file=self._stream, flush=True)
            self._drawn = False

    def _write(self, entry: dict[str, Any]) -> None:
        if self._path and self._lines is None:
            drop_cut_line(self._path)
            self._lines = self._path.open("a", encoding="utf-8")
        if self._lines:
            print(json.dumps(entry), file=self._lines, flush=True)
        for hook in self._hooks:
            hook(self._done, entry)

    def close(self) -> None:
        """Clear the progress line, and close the file of JSON lines."""
        self._clear()
        if self._lines:
            self._lines.close()


def show(report: Report, rate: float, left: float, of_run: float, width: int | None = None) -> str:
    """Write a phase's report as a line, of a terminal that is so wide: less of it, if need be.

    >>> report = Report("sparsify 90%", 12, 40, 0.5, 0.75, 0.9, 1, 256, "images", {})
    >>> show(report, 1e4, 28, 75, width=80)
    'sparsify 90%: step 12/40  loss 0.5000  accuracy 75.00%  run 0:01:15 left'
    >>> show(report, 1e4, 28, 75, width=40)
    'spa…90%: step 12/40  run 0:01:15 left'
    """
    step, loss = f"step {report.step}/{report.steps}", f"loss {report.loss:.4f}"
    accuracy, sparsity = f"accuracy {report.accuracy:.2%}", f"sparsity {report.sparsity:.2%}"
    speed, phase = f"{rate:.0f} {report.unit}/s", f"{clock(left)} left"
    run = f"run {clock(of_run)} left"
    words = [step, loss, accuracy, sparsity, speed, phase, run]
    if width is None:
        return f"{report.phase}: {'  '.join(words)}"
    room = width - 3  # terminals add ^C, and break the line in their last column
    label = len(report.phase)
    for word in (speed, phase, sparsity, accuracy, loss, run):
        if word is run:
            label = min(label, SHORTEST)  # rather than lose this word
        if label + 2 + len("  ".join(words)) <= room:
            break
        words.remove(word)
    text = "  ".join(words)
    return f"{cut(report.phase, max(room - len(text) - 2, 1))}: {text}"[:room]


def clock(seconds: float) -> str:
    """Write a time as h:mm:ss.

    >>> clock(75)
    '0:01:15'
    """
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def mean_std(values: Sequence[float | None]) -> tuple[float, float] | None:
    """Return mean and (as in the paper) population standard deviation, if all are there."""
    found = [value for value in values if value is not None]
    if not found or len(found) < len(values):
        return None
    return statistics.fmean(found), statistics.pstdev(found)


def cells(seeds: Sequence[Sequence[Row]], measure: Measure = ACCURACY) -> list[list[str]]:
    """Return the paper's table: a head, then a row per level, mean ± std over the seeds."""
    labels = {column: f"{label}{measure.unit}" for column, _, label in COLUMNS}
    columns = [c for c in labels if any(getattr(row, c) is not None for row in seeds[0])]
    heads = [labels[c] for c in columns] + [f"ELSA, {m.replace('_', ' ')}" for m in measure.also]
    lines = [["level", "actual sparsity", *heads]]
    for rows in zip(*seeds, strict=True):
        zeros = statistics.fmean(row.sparsity for row in rows)
        sparsity = "" if rows[0].level == "dense" and not zeros else f"{zeros:.4%}"
        line = [rows[0].level, sparsity]
        values = [[getattr(row, column) for row in rows] for column in columns]
        values += [[of_language(row.elsa)[metric] for row in rows] for metric in measure.also]
        for value in values:
            found = mean_std(value)
            cell = "" if found is None else measure.show(found[0])
            if found is not None and len(seeds) > 1:
                cell += f" ± {measure.show(found[1])}"
            line.append(cell)
        lines.append(line)
    return lines


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Write rows as a Markdown table, the first as its head."""
    head, *rest = rows
    lines = [head, ["---"] * len(head), *rest]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


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
