"""`python -m benchmarks.plots`: pictures of the tables in docs/benchmarks.md, beside it in images/.

Each table that has a target becomes bars, as long as what was measured is of what was allowed; the
table of bytes to each level becomes bars of its own, that of speed-ups dots on a logarithmic axis.
"""

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

NUMBER = re.compile(r"\d+(?:\.\d+)?")
LINE, LEFT, WIDTH = 20, 430, 280
"""Pixels: height of a line, where bars begin, what stands for 1 or 100 %."""
MOST = 1.2
"""Longer bars are cut."""
RIGHT = int(LEFT + MOST * WIDTH) + 8
STYLE = """\
  <style>
    text { font: 12px system-ui, sans-serif; fill: #57606a }
    .title { font-weight: 600 } .end { text-anchor: end } .middle { text-anchor: middle }
    .axis { stroke: #8c959f } .grid { stroke: #8c959f; stroke-dasharray: 2 3 }
    .c1 { fill: #0969da } .c2 { fill: #54aeff } .c3 { fill: #b6e3ff } .c0 { fill: #d8dee4 }
    .missed { fill: #bf5b00 }
    .s0 { fill: #b6d4f5 } .s1 { fill: #6cacf0 } .s2 { fill: #2a7de1 } .s3 { fill: #0b4fa8 }
    .s4 { fill: #07264f }
    @media (prefers-color-scheme: dark) {
      text { fill: #9aa4ae } .c0 { fill: #444c56 }
      .s0 { fill: #1d4675 } .s1 { fill: #2c6cb3 } .s2 { fill: #4c99e6 } .s3 { fill: #8fc5fb }
      .s4 { fill: #dff0ff }
    }
  </style>
"""


SHADES = ("s0", "s1", "s2", "s3", "s4")
"""From few zeros to many."""


class Table(NamedTuple):
    """One table of the page: the heading above it, and a dictionary a row."""

    section: str
    rows: list[dict[str, str]]


def tables(text: str) -> Iterator[Table]:
    """The tables of a Markdown page."""
    section, head, rows = "", None, []
    for line in [*text.splitlines(), ""]:
        if line.startswith("## "):
            section = line[3:]
        if line.startswith("|"):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if head is None:
                head = cells
            elif not set("".join(cells)) <= set("-: "):
                rows.append(dict(zip(head, cells, strict=False)))
        elif head is not None:
            yield Table(section, rows)
            head, rows = None, []


class Picture:
    """Lines of bars with their labels."""

    def __init__(self, about: str) -> None:
        self.about, self.y, self.parts = about, 8, list[str]()

    def title(self, text: str) -> None:
        """A line that says what follows."""
        self.y += LINE + 4
        self.parts.append(f'<text class="title" x="8" y="{self.y - 6}">{escape(text)}</text>')

    def bars(self, label: str, parts: list[tuple[str, float]], value: str) -> None:
        """A line of bars, one behind the other, each with its class and its share of the width."""
        self.y += LINE
        middle, x = self.y - 6, float(LEFT)
        short = label if len(label) < 68 else label[:66] + "…"
        self.parts.append(
            f'<text class="end" x="{LEFT - 8}" y="{middle}"><title>{escape(label)}</title>'
            f"{escape(short)}</text>"
        )
        for kind, share in parts:
            width = share * WIDTH
            self.parts.append(
                f'<rect class="{kind}" x="{x:.1f}" y="{self.y - 16}" width="{width:.1f}" '
                f'height="12"/>'
            )
            x += width
        self.parts.append(f'<text x="{RIGHT}" y="{middle}">{escape(value)}</text>')

    def svg(self, grid: bool = False) -> str:
        """The picture; a grid has a line where bars have their full width."""
        height, right = self.y + 12, RIGHT + 200
        lines = [f'<line class="axis" x1="{LEFT}" x2="{LEFT}" y1="8" y2="{height - 8}"/>']
        if grid:
            end = LEFT + WIDTH
            lines.append(f'<line class="grid" x1="{end}" x2="{end}" y1="8" y2="{height - 8}"/>')
        body = "\n".join(f"  {part}" for part in [*lines, *self.parts])
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {right} {height}" role="img" '
            f'aria-label="{escape(self.about)}">\n{STYLE}{body}\n</svg>\n'
        )


def against_targets(found: list[Table]) -> Picture:
    """What was measured, of what was allowed."""
    picture = Picture("Each row of the tables that has a target, as a share of it")
    picture.title("of what the target allows (dashed line): shorter is better")
    for section, rows in found:
        titled = False
        for row in rows:
            target = row.get("target") or row.get("limit") or ""
            measured = next((v for k, v in row.items() if re.match("ratio|measured", k)), "")
            if not NUMBER.search(target) or not NUMBER.search(measured):
                continue
            if not titled:
                picture.title(section)
                titled = True
            aim, value = (float(NUMBER.findall(text)[0]) for text in (target, measured))
            share = aim / value if target.startswith("≥") else value / aim
            label = " · ".join(filter(None, (row.get("what"), row.get("against"))))
            kind = "c1" if share <= 1 else "missed"
            said = f"{NUMBER.findall(measured)[0]} ×, target {target}"
            picture.bars(label.replace("`", ""), [(kind, min(share, MOST))], said)
    return picture


class Dots:
    """Lines of dots on one logarithmic axis: a label, its numbers, and the dots below them."""

    WIDTH, LEFT, RIGHT, LINE = 560, 20, 540, 36
    """Pixels. Narrow, so that it can be read on a phone."""

    def __init__(self, about: str, values: list[float]) -> None:
        self.about, self.y, self.parts, self.middles = about, 8, list[str](), list[int]()
        steps = [one * 10.0**power for power in range(-3, 6) for one in (1, 2, 5)]
        low = max(step for step in steps if step <= min([*values, 1]))
        high = min(step for step in steps if step >= max([*values, 2]))
        self.ticks = [step for step in steps if low <= step <= high]

    def x(self, value: float) -> float:
        """Where a value stands."""
        first, last = math.log(self.ticks[0]), math.log(self.ticks[-1])
        return self.LEFT + (self.RIGHT - self.LEFT) * (math.log(value) - first) / (last - first)

    def title(self, text: str, columns: list[str]) -> None:
        """What the picture shows, what each shade stands for, and the axis."""
        self.parts.append(f'<text class="title" x="8" y="20">{escape(text)}</text>')
        for i, (kind, column) in enumerate(zip(SHADES[-len(columns) :], columns, strict=True)):
            x = 16 + 92 * i
            self.parts.append(f'<circle class="{kind}" cx="{x}" cy="36" r="5"/>')
            self.parts.append(f'<text x="{x + 9}" y="40">{escape(column)}</text>')
        self.y = 70

    def dots(self, label: str, values: list[tuple[str, float]], said: str) -> None:
        """A line: dots of a class and a value each."""
        self.y += self.LINE
        top, middle = self.y - 20, self.y - 6
        self.middles.append(middle)
        ends = [self.x(value) for _, value in values]
        self.parts += [
            f'<text x="8" y="{top}">{escape(label)}</text>',
            f'<text class="end" x="{self.WIDTH - 8}" y="{top}">{escape(said)}</text>',
            f'<line class="axis" x1="{min(ends):.1f}" x2="{max(ends):.1f}" y1="{middle}" '
            f'y2="{middle}"/>',
            *(
                f'<circle class="{kind}" cx="{x:.1f}" cy="{middle}" r="5"/>'
                for (kind, _), x in zip(values, ends, strict=True)
            ),
        ]

    def svg(self, grid: bool = False) -> str:
        """The picture; the line at 1 is the dense network."""
        lines = list[str]()
        for tick in self.ticks:
            kind, x = "axis" if tick == 1 else "grid", f"{self.x(tick):.1f}"
            strokes = "".join(f"M{x} {y - 6}v12" for y in self.middles)
            lines.append(f'<text class="middle" x="{x}" y="62">{tick:g} ×</text>')
            lines.append(f'<path class="{kind}" d="{strokes}"/>')
        body = "\n".join(f"  {part}" for part in [*lines, *self.parts])
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.WIDTH} {self.y + 8}" '
            f'width="{self.WIDTH}" role="img" aria-label="{escape(self.about)}">\n'
            f"{STYLE}{body}\n</svg>\n"
        )


def speed_ups(found: list[Table]) -> Dots:
    """How many times faster networks run."""
    about = "How many times faster than the dense network each network runs"
    for _, rows in found:
        columns = [name for name in (rows[0] if rows else ()) if name.endswith("zeros")]
        if not columns or "network" not in rows[0]:
            continue
        lines = [(row, [float(NUMBER.findall(row[c])[0]) for c in columns]) for row in rows]
        picture = Dots(about, [value for _, values in lines for value in values])
        picture.title("times faster than the dense network (1 ×), on a logarithmic axis", columns)
        for row, values in lines:
            threads = row["threads"]
            label = f"{row['network']}, {threads} thread{'s' * (threads != '1')}"
            shades = list(zip(SHADES[-len(columns) :], values, strict=True))
            picture.dots(label, shades, " / ".join(f"{value:.1f}" for value in values))
        return picture
    return Dots(about, [])


def bytes_to_levels(found: list[Table]) -> Picture:
    """Where in a delivery file each level is complete."""
    picture = Picture("Bytes to each level of delivery files, of the ELSA file")
    for _, rows in found:
        if not rows or "whole" not in rows[0]:
            continue
        picture.title(
            "bytes to level 1, 2, 3 and the dense network, of the ELSA file (dashed line)"
        )
        for row in rows:
            names = list(row)
            columns = names[names.index("level 1") : names.index("whole") + 1]
            told_ends = [NUMBER.findall(row[column])[-1:] for column in columns]
            ends = [float(number) / 100 for numbers in told_ends for number in numbers]
            sizes = [b - a for a, b in zip([0.0, *ends], ends, strict=False)]
            kinds = [*("c1", "c2", "c3")[: len(sizes) - 1], "c0"]
            label = " ".join(filter(None, (row["network"], row.get(""))))
            told = " / ".join(f"{100 * end:.1f}" for end in ends) + " %"
            picture.bars(label, list(zip(kinds, sizes, strict=True)), told)
    return picture


def draw(page: Path) -> None:
    """Draw what the page holds, and show it there: below a heading, or above them all."""
    text = page.read_text("utf-8")
    found = list(tables(text))
    for name, heading, picture, grid in (
        ("benchmarks", "## ", against_targets(found), True),
        ("fast", "## Fast levels\n", speed_ups(found), False),
        ("bytes", "## Bytes to each level\n", bytes_to_levels(found), True),
    ):
        if len(picture.parts) < 2 or heading not in text:
            continue
        (page.parent / "images" / f"{name}.svg").write_text(picture.svg(grid), "utf-8")
        shown = f"![{picture.about}](images/{name}.svg)\n"
        if shown not in text:
            before, after = text.split(heading, 1)
            new = f"{shown}\n{heading}" if heading == "## " else f"{heading}\n{shown}"
            text = before + new + after
    page.write_text(text, "utf-8")


if __name__ == "__main__":
    draw(Path("docs/benchmarks.md"))
