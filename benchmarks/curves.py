"""`python -m benchmarks.curves`: the table of fifty levels in docs/results.md as a picture.

Errors over kept weights, both by their logarithms: the sparsest levels differ by tens of points,
the others by tenths.
"""

import re
from collections.abc import Sequence
from math import log
from pathlib import Path
from typing import NamedTuple

from benchmarks.plots import STYLE, tables

WIDTH, HEIGHT, LEFT, TOP = 640, 300, 64, 56
"""Pixels: of the plot itself, and where it begins."""
KEPT = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0)
ERRORS = (0.3, 1.0, 3.0, 10.0, 30.0)
COLUMNS = (
    ("sequential", "#bf5b00"),
    ("pruned from its initial network", "#8c959f"),
    ("joint", "#0969da"),
    ("alone, equal steps", "#1a7f37"),
)
"""How the head of a column begins, and its colour."""


class Point(NamedTuple):
    """A level: percent of the weights that it keeps, and mean error in percent."""

    kept: float
    error: float


def points(rows: Sequence[dict[str, str]], head: str) -> list[Point]:
    """Read the column whose head begins so."""
    (column,) = (name for name in rows[0] if name.startswith(head))
    found = []
    for row in rows:
        if (level := re.fullmatch(r"(\d+)%", row["level"])) and row[column]:
            mean = float(row[column].partition(" ± ")[0])
            found.append(Point(100.0 - int(level[1]), 100 - mean))
    return found


def _x(kept: float) -> float:
    return LEFT + WIDTH * log(kept / KEPT[0]) / log(KEPT[-1] / KEPT[0])


def _y(error: float) -> float:
    low, high = ERRORS[0], ERRORS[-1]
    return TOP + HEIGHT * (1 - log(max(error, low) / low) / log(high / low))


def svg(rows: Sequence[dict[str, str]]) -> str:
    """Draw each column as a line, or dots where few levels were measured."""
    bottom, legend, parts = TOP + HEIGHT, LEFT, list[str]()
    for kept in KEPT:
        x = f"{_x(kept):.1f}"
        parts.append(f'<line class="grid" x1="{x}" x2="{x}" y1="{TOP}" y2="{bottom}"/>')
        parts.append(f'<text class="middle" x="{x}" y="{bottom + 18}">{kept:g} %</text>')
    for error in ERRORS:
        y = f"{_y(error):.1f}"
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text class="end" x="{LEFT - 8}" y="{float(y) + 4:.1f}">{error:g} %</text>')
    for head, colour in COLUMNS:
        places = [f"{_x(kept):.1f},{_y(error):.1f}" for kept, error in points(rows, head)]
        if len(places) > len(rows) // 2:
            line = " ".join(places)
            parts.append(
                f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{line}"/>'
            )
        else:
            for x, y in (place.split(",") for place in places):
                parts.append(f'<circle fill="{colour}" cx="{x}" cy="{y}" r="4"/>')
        parts.append(f'<rect x="{legend}" y="30" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{legend + 18}" y="40">{head}</text>')
        legend += 40 + 7 * len(head)
    about = "Errors on the test images of fifty levels, by the weights they keep"
    parts.append(f'<text class="title" x="{LEFT}" y="16">{about}</text>')
    body = "\n".join(f"  {part}" for part in parts)
    middle = "  <style>.middle { text-anchor: middle }</style>\n"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 24} '
        f'{bottom + 30}" role="img" aria-label="{about}">\n{STYLE}{middle}{body}\n</svg>\n'
    )


def draw(page: Path) -> None:
    """Draw the page's table of fifty levels, if it has one, into images/ beside it."""
    text = page.read_text("utf-8").partition("<!-- digits-50-levels -->")[2]
    for table in tables(text.partition("<!-- end")[0]):
        (page.parent / "images" / "fifty-levels.svg").write_text(svg(table.rows), "utf-8")


if __name__ == "__main__":
    draw(Path("docs/results.md"))
