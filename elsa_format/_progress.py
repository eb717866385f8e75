"""The progress line: how much is done, how fast, and how long it will take, as people read it."""

import contextlib
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from typing import TextIO

UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
PERIOD = 0.1
"""Seconds between two lines."""
FIRST, SURE = 1.0, 3.0
"""Seconds after which there is a line, and after which it says how long it will take."""
MEMORY = 4.0
"""Seconds over which the speed is averaged: what is done first may be quicker than what follows."""
LONGEST_BAR, SHORTEST_BAR = 30, 8
MOST = 100 * 3600
"""Seconds left that are still worth telling."""


class Bar:
    """A progress line on a terminal, from the first second on."""

    def __init__(self, verb: str, stream: TextIO, unit: str | None = "") -> None:
        self.verb, self.stream, self.unit = verb, stream, unit
        self.started = self.drawn = time.monotonic()
        self.done, self.speed, self.length = 0, 0.0, 0
        self.full, self.empty = ("█", "░") if _can_print("█░", stream) else ("#", "-")

    def __call__(self, done: int, total: int) -> None:
        """Draw, if it is time to."""
        now = time.monotonic()
        if done < self.done:  # something else is counted: it is made, and now sent to a store
            self.started = self.drawn = now
            self.done, self.speed = done, 0.0
        passed = now - self.drawn
        if now - self.started < FIRST or passed < PERIOD:
            return
        speed = (done - self.done) / passed
        new = 1 - math.exp(-passed / MEMORY) if self.speed else 1
        self.speed += new * (speed - self.speed)
        self.drawn, self.done = now, done
        left = (total - done) / self.speed if self.speed > 0 else MOST
        sure = now - self.started >= SURE and left < MOST
        self.show(done / total if total else 1.0, f"{clock(left)} left" if sure else "")

    def doing(self, what: str, unit: str | None = None) -> None:
        """Name what is under way from now on; without a unit, no speed is shown."""
        self.verb, self.unit = what, unit

    def show(self, part: float, left: str) -> None:
        """Write the line anew; as much of it as fits."""
        width = columns(self.stream) - 1  # in the last column, terminals break the line
        done = f"{self.speed:.3g} {self.unit}" if self.unit else show_size(self.speed)
        percent, speed = f"{math.floor(100 * part):3d}%", "" if self.unit is None else f"{done}/s"
        for words in ((percent, speed, left), (percent, left), (percent,)):
            line = "  ".join(word for word in words if word)
            room = min(width - len(self.verb) - len(line) - 2, LONGEST_BAR)
            if room >= SHORTEST_BAR:
                filled = int(room * part)
                bar = self.full * filled + self.empty * (room - filled)
                line = f"{self.verb} {bar} {line}"
                break
            if len(self.verb) + 1 + len(line) <= width:
                line = f"{self.verb} {line}"
                break
            if len(line) <= width:
                break
        self._write(line[:width], width)

    def clear(self) -> None:
        """Take the line away."""
        if self.length:
            self._write("", columns(self.stream) - 1)
            self._write("", 0)

    def _write(self, line: str, width: int) -> None:
        rest = " " * max(min(self.length, width) - len(line), 0)  # no escapes: any terminal can
        with contextlib.suppress(OSError):  # the terminal went away, which is no reason to stop
            self.stream.write(f"\r{line}{rest}")
            self.stream.flush()
        self.length = len(line)


def columns(stream: TextIO) -> int:
    """The width of a terminal, now."""
    with contextlib.suppress(OSError):
        if found := os.get_terminal_size(stream.fileno()).columns:
            return found
    return shutil.get_terminal_size().columns


def clock(seconds: float) -> str:
    """A time as people read it.

    >>> clock(75), clock(3723)
    ('1:15', '1:02:03')
    """
    minutes, rest = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def show_size(size: float) -> str:
    """A size as people read it.

    >>> show_size(46_200_000), show_size(999_999_999)
    ('46.2 MB', '1 GB')
    """
    for unit, scale in reversed(list(UNITS.items())):
        number = size / scale
        if number >= 0.9995 and unit:
            digits = f"{number:.3g}" if number < 999.5 else f"{number:.0f}"
            return f"{digits} {unit.replace('K', 'k')}B"
    return f"{size:.0f} B"


def _can_print(text: str, stream: TextIO) -> bool:
    try:
        text.encode(stream.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True


@contextlib.contextmanager
def progress(
    verb: str, *, quiet: bool = False, unit: str = ""
) -> Iterator[Callable[[int, int], object]]:
    """A progress callback that draws if stderr is a terminal, and cleans up after itself.

    What is counted are bytes, or else what the unit says.
    """
    if quiet or sys.stderr is None or not sys.stderr.isatty():
        yield lambda done, total: None
        return
    bar = Bar(verb, sys.stderr, unit)
    try:
        yield bar
    finally:
        bar.clear()
