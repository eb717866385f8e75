"""`python -m benchmarks.copies`: repeat figures of docs/benchmarks.md and others on other pages.

Every figure is measured and stored once, on such a page. A page that repeats some has a place for
them, between `<!-- docs/benchmarks.md: NAME -->` and `<!-- end -->`, which is filled from there.
"""

import re
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.plots import NUMBER, tables

RATIOS = {
    "load a level against `safetensors.numpy.load_file` of the same file": (
        "load a level, dense",
        "`safetensors.numpy.load_file`",
    ),
    "load a 90 % level as bitmask, against the same": (
        "load a level, bitmask",
        "`safetensors.numpy.load_file`",
    ),
    "peak memory of loading a 90 % level as bitmask, against what it returns": (
        "peak memory of a load, bitmask",
        "bytes returned",
    ),
    "extract a level, file to file, against copying the file": (
        "extract file → file, dense",
        "chunked copy",
    ),
    "extract with checksums, against only reading the file": (
        "extract, checksums on",
        "plain chunked read",
    ),
    "pack one-shot levels with their digests, against copying the file": (
        "pack one-shot, global, digests of 3 levels",
        "chunked copy",
    ),
    "masking kernel against memcpy, one thread": ("masking kernel, F32", "memcpy, warm"),
    "encode a bitmask, against compressed-tensors: times faster": (
        "encode a level as bitmask + values",
        "compressed-tensors",
    ),
    "decode a bitmask, against compressed-tensors: times faster": (
        "decode bitmask + values",
        "compressed-tensors",
    ),
    "time per byte of a 4 GiB file, against one of 64 MiB": (
        "extract, largest file, per byte",
        "of a file a 64th as large",
    ),
}
"""Rows of the README: what was measured, and against what. A version may follow."""


def ratios(text: str) -> str:
    """The README's short table of ratios."""
    rows = [row for table in tables(text) for row in table.rows if "ratio" in row]
    lines = ["| | ratio |", "| --- | --- |"]
    for said, (what, against) in RATIOS.items():
        found = [
            row["ratio"]
            for row in rows
            if row["what"] == what and re.sub(r" [\d.]+$", "", row["against"]) == against
        ]
        if len(found) != 1:
            sys.exit(f"docs/benchmarks.md has {len(found)} rows of '{what}' against '{against}'")
        lines.append(f"| {said} | {found[0]} |")
    return "\n".join(lines)


def sizes(text: str) -> str:
    """The README's short table of bytes to each level: the least and the most of real weights."""
    (rows,) = (table.rows for table in tables(text) if table.section == "Bytes to each level")
    real = [row for row in rows if "trained" not in row["network"]]
    others = re.findall(r"[A-Za-z]+", real[0]["others, whole"])
    lines = [f"| | level 1 | level 2 | level 3 | whole | {' / '.join(others)}, all or nothing |"]
    lines.append("| --- |" + " --- |" * 5)
    for dtype in ("F32", "BF16"):
        mine = [row for row in real if row[""] == dtype]
        columns = [
            between([row[name] for row in mine], ".1f") + " %"
            for name in ("level 1", "level 2", "3 … last", "whole")
        ]
        told = [re.findall(r"[\d.]+ %", row["others, whole"]) for row in mine]
        columns.append(" / ".join(between(list(c), ".0f") for c in zip(*told, strict=True)) + " %")
        megabytes = between([row["ELSA file"] for row in mine], ".1f", " to ")
        label = f"{len(mine)} ONNX models of {megabytes} MB, {dtype}"
        lines.append(f"| {label if dtype == 'F32' else 'the same in BF16'} | ")
        lines[-1] += " | ".join(columns) + " |"
    return "\n".join(lines)


def between(cells: list[str], form: str, to: str = "–") -> str:
    """The least and the most of the numbers in some cells."""
    numbers = [float(NUMBER.findall(cell)[0]) for cell in cells]
    return f"{min(numbers):{form}}{to}{max(numbers):{form}}"


def example(text: str) -> str:
    """The commands of docs/fast.md with what they printed."""
    return re.findall(r"\*\*example\*\*.*?(```text\n.*?\n```)", text, re.DOTALL)[0]


def calibrated(text: str) -> str:
    """The README's short table of a pretrained network: levels by magnitude, and calibrated."""
    every = (table for table in tables(text) if table.section == "Results")
    first = next(table for table in every if "level" in table.rows[0])
    rows = {row["level"].partition(",")[0]: row for row in reversed(first.rows)}
    levels = ("90 %", "80 %", "70 %", "50 %", "dense")
    (original,) = re.findall(
        r"^PP-OCRv4.*characters right, %; original (\S+)\.$", text, re.MULTILINE
    )
    lines = ["| | " + " | ".join(levels) + " |", "| --- |" + " --- |" * len(levels)]
    for label, method in (("by magnitude", "magnitude"), ("calibrated", "nested")):
        (column,) = (name for name in first.rows[0] if re.fullmatch(rf"{method} \(\d\)", name))
        found = [rows[level][column].partition(" ")[0] for level in levels]
        lines.append(f"| {label} | {' | '.join(found)} |")
    return "\n".join([*lines, "", f"The original reads {original} %."])


COPIES: dict[str, tuple[str, str, Callable[[str], str]]] = {
    "ratios": ("docs/benchmarks.md", "README.md", ratios),
    "sizes": ("docs/benchmarks.md", "README.md", sizes),
    "example": ("docs/benchmarks.md", "docs/fast.md", example),
    "calibrated": ("docs/calibrate.md", "README.md", calibrated),
    "one-shot": ("docs/calibrate.md", "docs/pack.md", calibrated),
}
"""What is repeated: from which page, and on which."""


def repeat(root: Path) -> None:
    """Fill the places of the pages below a folder, the repository's or a copy of it."""
    for name, (source, page, made) in COPIES.items():
        put(root / page, f"{source}: {name}", made((root / source).read_text("utf-8")))


def put(page: Path, name: str, content: str) -> None:
    """Replace what stands between the marks of a page."""
    begin, end = f"<!-- {name} -->\n", "<!-- end -->"
    before, found, rest = page.read_text("utf-8").partition(begin)
    _, also, after = rest.partition(end)
    if not found or not also:
        sys.exit(f"{page} has no place for {name}")
    page.write_text(f"{before}{begin}{content}\n{end}{after}", "utf-8")


if __name__ == "__main__":
    repeat(Path())
