"""What a run tells: progress, JSON lines and the table of results."""

import json
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from elsa_format.cli import columns, cut, wrap
from elsa_train._files import drop_cut_line
from elsa_train._measure import ACCURACY, Measure, of_language
from elsa_train._multilevel import FrozenLevel
from elsa_train._window import Report

COLUMNS = (
    ("elsa", "tab:blue", "ELSA"),
    ("reference", "tab:orange", "reference"),
    ("equal_epochs", "tab:green", "reference, equal epochs"),
    ("alone", "tab:red", "alone, equal steps"),
)
SHORTEST = 6
"""Characters of a phase's name that are left when it is cut."""


@dataclass(frozen=True)
class Row:
    """One line of the result table: accuracies from 0 to 1, or losses; None where not measured."""

    level: str
    sparsity: float
    nonzero: int
    elsa: float
    reference: float | None = None
    equal_epochs: float | None = None
    alone: float | None = None

    def __post_init__(self) -> None:
        """Refuse what no run has measured: rows are read back from a run's folder."""
        measured = [x for x in (self.reference, self.equal_epochs, self.alone) if x is not None]
        for number in (self.sparsity, self.nonzero, self.elsa, *measured):
            if type(number) not in (int, float) or not math.isfinite(number):
                raise ValueError(f"found {number!r} among the measures of level {self.level}")


class Reporter:
    """Progress on a stream, a line a second on a terminal, and metrics as JSON lines in a file."""

    def __init__(self, stream: IO[str] | None = None, lines: Path | None = None) -> None:
        """Take a stream, or None for none, and the file of JSON lines to append to."""
        self._stream, self._path = stream, lines
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
