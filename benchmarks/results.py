"""Train every network of docs/results.md and write its tables: `make results`.

Parts that begin with `calibrate-` measure networks for docs/calibrate.md (benchmarks/calibrate).

Each run is a command that can be given by hand. What is finished is left alone, what was stopped
goes on, so that this can be stopped and started at any time. Parts are named on the command line
(`make results PARTS="digits-global digits-nm"`); without names, all whose data is there.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from internals import ACCURACY, LOSS, Measure, Row, import_line, mean_std

from benchmarks import curves
from benchmarks.plots import tables

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "results.md"
RUNS = Path("runs/results")
REDUCED = "--width 8 --train-images 12000 --batch-size 128"
ONCE = "--epochs 2 --sparsify-epochs 1 --densify-epochs 0.5 --warmup-epochs 0.2 --mask-every 5"
TWICE = "--epochs 4 --sparsify-epochs 2 --densify-epochs 1 --warmup-epochs 0.2 --mask-every 5"
FASHION = f"fashion-mnist --data-dir {{fashion}} {REDUCED}"
CIFAR = f"cifar10-speedyresnet --data-dir {{cifar10}} {REDUCED}"
SMALL = (
    "cifar10-speedyresnet --data-dir {cifar10} --width 8 --train-images 5000 --test-images 2000 "
    "--batch-size 64 --epochs 2 --sparsify-epochs 2 --densify-epochs 0.5 --warmup-epochs 0.2 "
    "--mask-every 8"
)
INNER = f"{SMALL} --prune kernel$ --exclude '^(head|whiten|project)/'"
TEXT_TWICE = "text-gpt --epochs 2 --sparsify-epochs 2 --densify-epochs 0.5"


@dataclass(frozen=True)
class Command:
    """One `elsa-train`, and which of its measures are columns of the table."""

    name: str
    words: str
    columns: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Part:
    """A table of the page, and about how long it takes on two idle cores."""

    name: str
    minutes: int
    commands: tuple[Command, ...]
    measure: Measure = ACCURACY


def part(
    name: str,
    words: str,
    minutes: int,
    *,
    seeds: int,
    joint: str = "",
    densify: bool = False,
    twice: str = "",
    measure: Measure = ACCURACY,
) -> Part:
    """Lay out a table: the two methods and their references.

    With `densify` also densify at the paper's rate, with `twice` joint training by these words.
    """
    usual = f" --seeds {seeds} --plot none"
    words += usual
    commands = [
        Command("sequential", f"{words} --reference", (("elsa", "sequential"), PRUNED)),
        Command(
            "joint",
            f"{words} --method joint{joint} --alone",
            (("elsa", "joint"), ("alone", "alone, equal steps")),
        ),
    ]
    if densify:
        rates = "--densify-factor 0.01 --densify-between-factor 0.01"
        slow = Command("slow", f"{words} {rates}", (("elsa", "sequential, ×0.01"),))
        commands.insert(1, slow)
    if twice:
        columns = (("elsa", "joint, twice the steps"),)
        commands.append(Command("twice", f"{twice}{usual} --method joint", columns))
    return Part(name, minutes, tuple(commands), measure)


def compared(
    name: str,
    words: str,
    minutes: int,
    *,
    seeds: int,
    tried: dict[str, str],
    measure: Measure = ACCURACY,
) -> Part:
    """Lay out a column for each of these words."""
    words += f" --seeds {seeds} --plot none"
    commands = [
        Command(head.replace(" ", "-"), f"{words} {given}", (("elsa", head),))
        for head, given in tried.items()
    ]
    return Part(name, minutes, tuple(commands), measure)


def settings(name: str, words: str, minutes: int, **given: Any) -> Part:
    """Lay out how joint training was set: by data held out, never by that of the test."""
    tried = {head: f"--method joint {words}" for head, words in given.pop("tried").items()}
    return compared(name, f"{words} --judge validation", minutes, tried=tried, **given)


ON_DIGITS = {
    "fixed 0.3": "--joint-dense 0.25 --joint-fixed 0.3",
    "fixed 0.65": "--joint-dense 0.15 --joint-fixed 0.65",
    "fixed 0.8": "--joint-dense 0.1 --joint-fixed 0.8",
    "shares 5,5,5,5": "--joint-dense 0.15 --joint-fixed 0.65 --joint-shares 5,5,5,5",
}
ON_TEXT = {
    "shares 8,6,4,2": "--joint-shares 8,6,4,2",
    "shares 6,5,5,4": "--joint-shares 6,5,5,4",
    "shares 5,5,5,5": "--joint-shares 5,5,5,5",
    "fixed 0.65": "--joint-dense 0.15 --joint-fixed 0.65",
}
RULES = {rule: f"--sparsify {rule}" for rule in ("gmp", "acdc", "rigl")}
AXES = {"outputs": "--axis -1", "inputs": "--axis -2"}
PRUNED = ("reference", "pruned from its initial network")
FIFTY = " --joint-every 50 --alone-levels 99%,90%,50%"
PARTS = (
    part("digits-global", "digits", 22, seeds=4, densify=True),
    part("digits-sparse", "digits --levels 99,98,97", 19, seeds=4),
    part("digits-uniform", "digits --scope uniform", 19, seeds=4),
    part("digits-nm", "digits --scope nm", 19, seeds=4),
    settings(
        "digits-settings",
        "digits --levels 99,98,97 --validation 0.25",
        8,
        seeds=4,
        tried=ON_DIGITS,
    ),
    part("text", "text-gpt", 120, seeds=3, twice=TEXT_TWICE, measure=LOSS),
    settings(
        "text-settings", "text-gpt --validation 0.1", 26, seeds=2, tried=ON_TEXT, measure=LOSS
    ),
    part("digits-50-levels", "digits --levels 99..50", 85, seeds=4, joint=FIFTY),
    part(
        "fashion-mnist",
        f"{FASHION} {ONCE}",
        75,
        seeds=3,
        densify=True,
        twice=f"{FASHION} {TWICE}",
    ),
    part("cifar10", f"{CIFAR} {ONCE}", 60, seeds=3, twice=f"{CIFAR} {TWICE}"),
    compared("cifar10-rules", f"{INNER} --scope uniform --levels 90,80", 12, seeds=3, tried=RULES),
    compared("cifar10-axes", f"{INNER} --scope nm --levels 1:8,2:4", 8, seeds=3, tried=AXES),
)


CALIBRATED = {"ocr": 30, "minilm": 60, "cifar": 30, "gpt": 20}
"""Networks of docs/calibrate.md, and about how long each takes on two idle cores."""


def rows_of(folder: Path) -> list[list[Row]]:
    """Read what a command has measured so far, a list of rows for each finished seed."""
    found = []
    for path in sorted(folder.glob("seed-*/results.json")):
        found.append([Row(**row) for row in json.loads(path.read_text("utf-8"))["rows"]])
    return found


def table(wanted: Part, before: str) -> str:
    """Write the table of what has finished here; columns not run here stay as they were before."""
    (known,) = [found.rows for found in tables(before)] or [[]]
    ran = {c.name: rows_of(RUNS / wanted.name / c.name) for c in wanted.commands}
    if seeds := next(filter(None, ran.values()), None):
        levels = list(zip(*seeds, strict=True))
        columns = {
            "level": [rows[0].level for rows in levels],
            "actual sparsity": [_sparsity(rows) for rows in levels],
        }
    elif known:
        columns = {head: [row[head] for row in known] for head in ("level", "actual sparsity")}
    else:
        return "Not run yet.\n"
    notes = []
    for command in wanted.commands:
        seeds, begins = ran[command.name], f"- `{command.name}`: "
        if kept := sum(rows[-1].nonzero == rows[-2].nonzero for rows in seeds):
            notes.append(
                f"{begins}of {kept} of {len(seeds)} seeds the last level was better on what was "
                "held out, and is the dense network."
            )
        if not seeds:
            notes += [line for line in before.splitlines() if line.startswith(begins)]
        for column, head in command.columns:
            has = [rows for rows in seeds if any(getattr(row, column) is not None for row in rows)]
            if has:
                columns[f"{head} ({len(has)})"] = [
                    _cell(wanted.measure, [getattr(one, column) for one in row])
                    for row in zip(*has, strict=True)
                ]
            else:
                was = [name for name in (known[0] if known else {}) if name.startswith(f"{head} (")]
                columns |= {name: [row[name] for row in known] for name in was}
    lines = [f"| {' | '.join(columns)} |", "| --- " * len(columns) + "|"]
    lines += [f"| {' | '.join(cells)} |" for cells in zip(*columns.values(), strict=True)]
    return "\n".join([*lines, "", *notes]).rstrip() + "\n"


def _sparsity(rows: Sequence[Row]) -> str:
    """Show the actual sparsity of a level, the mean over seeds."""
    return "" if rows[0].level == "dense" else f"{fmean(row.sparsity for row in rows):.4%}"


def _cell(measure: Measure, found: list[float | None]) -> str:
    """Show the mean, and of several seeds the standard deviation."""
    pair = mean_std(found)
    if pair is None:
        return ""
    mean, deviation = map(measure.show, pair)
    return f"{mean} ± {deviation}" if len(found) > 1 else mean


def words_of(wanted: Part, command: Command) -> str:
    """Return a command, with names in braces for where data is."""
    return f"elsa-train {command.words} -o {RUNS / wanted.name / command.name}"


def shown(wanted: Part) -> str:
    """Return the commands of a part as they stand in the page."""
    words = "\n".join(words_of(wanted, command) for command in wanted.commands)
    words = words.replace("{fashion}", "FASHION").replace("{cifar10}", "CIFAR10")
    return f"```text\n{words}\n```\n"


def write_page() -> None:
    """Put commands and tables between their marks in the page, and draw its picture."""
    text = PAGE.read_text("utf-8")
    for wanted in PARTS:
        start, end = f"<!-- {wanted.name} -->\n", f"<!-- end of {wanted.name} -->"
        before, found, rest = text.partition(start)
        if not found or end not in rest:
            raise SystemExit(f"{PAGE}: has no marks for {wanted.name}")
        was, _, after = rest.partition(end)
        body = f"{shown(wanted)}\n{table(wanted, was)}"
        text = f"{before}{start}{body}{end}{after}"
    PAGE.write_text(text, "utf-8")
    curves.draw(PAGE)


def calibrate(name: str, images: str) -> None:
    """Train a network, if it is one of ours that is not trained yet; nest and test its levels."""
    if name == "cifar" and not Path(images).exists():
        print(f"calibrate-{name}: {images} is not there; see docs/results.md")
        return
    data = ["--data", images] if name == "cifar" else []
    modules = ["benchmarks.calibrate"]
    if name in ("cifar", "gpt") and not Path(f"runs/calibrate/{name}.pt").exists():
        modules.insert(0, "benchmarks.calibrate.networks")
    for module in modules:
        print(f"$ python -m {module} {shlex.join([name, *data])}", flush=True)
        subprocess.run([sys.executable, "-m", module, name, *data], cwd=ROOT, check=True)


def main() -> None:
    """Train what is asked for, and write the page after each run."""
    parser = argparse.ArgumentParser(prog="make results", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help="names; without any, all")
    parser.add_argument("--list", action="store_true", help="tell how long each part takes")
    parser.add_argument("--page", action="store_true", help="write the page only, train nothing")
    parser.add_argument("--fashion", default="/usr/share/datasets/fashion-mnist", metavar="DIR")
    parser.add_argument("--cifar10", default="cifar-10-batches-bin", metavar="DIR")
    given = parser.parse_args()
    known = {known.name: known for known in PARTS}
    calibrated = {f"calibrate-{name}": name for name in CALIBRATED}
    if unknown := set(given.parts) - set(known) - set(calibrated):
        parser.error(f"no part {min(unknown)!r}; there are {', '.join((*known, *calibrated))}")
    if given.list:
        minutes = {wanted.name: wanted.minutes for wanted in PARTS}
        minutes |= {part: CALIBRATED[name] for part, name in calibrated.items()}
        for name, length in minutes.items():
            print(f"{name:<18} about {length} minutes on two idle cores")
        return
    chosen = [] if given.page else given.parts or [*known, *calibrated]
    for name in chosen:
        if name in calibrated:
            calibrate(calibrated[name], given.cifar10)
    for wanted in [known[name] for name in chosen if name in known]:
        for command in wanted.commands:
            words = words_of(wanted, command)
            for name in ("fashion", "cifar10"):
                folder = getattr(given, name)
                if f"{{{name}}}" in words and not Path(folder).exists():
                    print(f"{wanted.name}: {folder} is not there; see docs/results.md")
                    break
                words = words.replace(f"{{{name}}}", folder)
            else:
                print(f"$ {words}", flush=True)
                program = [sys.executable, "-c", f"{import_line('train_main')}; train_main()"]
                # All seeds run the same programs.
                env = {"JAX_COMPILATION_CACHE_DIR": str(RUNS / "programs")} | os.environ
                words_given = shlex.split(words)[1:]
                subprocess.run([*program, *words_given], cwd=ROOT, check=True, env=env)
                write_page()
    write_page()


if __name__ == "__main__":
    main()
