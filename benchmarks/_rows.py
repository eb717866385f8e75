"""Rows of the table: a registry, and how a row is measured.

A row is a function that prepares its input and gives a `Race` (two ways to do the same thing), a
`Rate` (one way, against a stated speed) or a `Peak` (the memory of a child process). Subject and
peer of a race run in turn in one process, and the shortest time of each counts: noise only ever
adds.
"""

import contextlib
import ctypes
import gc
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from benchmarks._files import Files, no_fsync

MIB = 1 << 20


def always_fresh_memory() -> None:
    """Let every large array be new memory, as in a process that loads once.

    Else glibc would give a repeat the memory of the one before, and pages cost more than kernels.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, MIB)


_M_MMAP_THRESHOLD = -3


class Unavailable(Exception):
    """What a row compares with is not installed."""


def nothing() -> None:
    """Leave everything as it is."""


@dataclass(frozen=True)
class Race:
    """Two ways to do the same thing."""

    subject: Callable[[], object]
    peer: Callable[[], object]
    nbytes: int
    peer_nbytes: int | None = None
    """If given, times are compared per byte."""
    contains_peer: bool = False
    """The subject does all that the peer does, in one thread: it cannot be faster."""
    after: Callable[[], object] = nothing
    """Clears up after each run, outside the measurement."""
    clock: Callable[[], float] = time.perf_counter
    """`time.thread_time` for what runs in one thread, whatever else the machine does."""


@dataclass(frozen=True)
class Rate:
    """The processor time of one thread, against the time that a stated speed allows."""

    subject: Callable[[], object]
    nbytes: int
    moved: int
    """Bytes that are counted by the speed."""
    speed: float
    """Bytes a second."""


@dataclass(frozen=True)
class Peak:
    """The most memory that a Python program takes, above that of a bare interpreter."""

    program: str
    arguments: tuple[object, ...]
    nbytes: int
    limit: int
    """Bytes it is compared with."""
    beyond: str = ""
    """What is imported before, and not counted."""


Prepare = Callable[[Files], Race | Rate | Peak]


@dataclass(frozen=True)
class Row:
    """One row to be measured."""

    key: str
    what: str
    peer: str
    target: str
    prepare: Prepare
    why: str = ""
    """The reason, should the target not be reached."""


@dataclass(frozen=True)
class Result:
    """One row measured."""

    row: Row
    nbytes: int
    subject: str
    peer: str
    ratio: float
    suspect: bool = False
    """The ratio is impossible: the peer was hindered, and nothing follows from it."""

    @property
    def reached(self) -> bool | None:
        """Whether the target is reached; None if there is none, or it cannot be told."""
        if not self.row.target or self.suspect:
            return None
        sign, number, *_ = self.row.target.split()
        return self.ratio <= float(number) if sign == "≤" else self.ratio >= float(number)


ROWS: list[Row] = []


def row(what: str, peer: str, target: str = "", why: str = "") -> Callable[[Prepare], Prepare]:
    """Register a row; the target reads "≤ 1.5 ×" or "≥ 5 × faster"."""

    def register(prepare: Prepare) -> Prepare:
        area = prepare.__module__.rpartition(".")[2]
        ROWS.append(Row(f"{area}.{prepare.__name__}", what, peer, target, prepare, why))
        return prepare

    return register


def chosen(patterns: list[str]) -> list[Row]:
    """The rows whose key matches one of the patterns; all if there is none."""
    return [r for r in ROWS if not patterns or any(fnmatchcase(r.key, p) for p in patterns)]


def measure(row: Row, files: Files, seconds: float) -> Result:
    """Measure one row, giving its repeats about this many seconds."""
    prepared = row.prepare(files)
    if isinstance(prepared, Peak):
        peak = peak_memory(prepared)
        return Result(row, prepared.nbytes, _mib(peak), _mib(prepared.limit), peak / prepared.limit)
    if isinstance(prepared, Rate):
        took, allowed = _best_rate(prepared, seconds), prepared.moved / prepared.speed
        times = _milliseconds(took), _milliseconds(allowed)
        return Result(row, prepared.nbytes, *times, allowed / took)
    subject, peer = _best_times(prepared, seconds)
    per_byte = (prepared.peer_nbytes or prepared.nbytes) / prepared.nbytes
    ratio = subject / peer * per_byte
    if row.target.startswith("≥"):
        ratio = 1 / ratio
    suspect = prepared.contains_peer and ratio < 0.9
    return Result(row, prepared.nbytes, _milliseconds(subject), _milliseconds(peer), ratio, suspect)


def _best_times(race: Race, seconds: float) -> tuple[float, float]:
    best = [float("inf")] * 2
    gc.collect()
    began, repeats = time.perf_counter(), 0
    while repeats < 3 or time.perf_counter() - began < seconds:
        for i, action in enumerate((race.subject, race.peer)):
            start = race.clock()
            result = action()
            took = race.clock() - start
            del result  # gives its memory back outside the measurement
            race.after()
            best[i] = min(best[i], took)
        repeats += 1
    return best[0], best[1]


def _best_rate(rate: Rate, seconds: float) -> float:
    race = Race(rate.subject, nothing, rate.nbytes, clock=time.thread_time)
    return _best_times(race, seconds)[0]


def peak_memory(peak: Peak) -> int:
    """Bytes of memory a program takes above a bare interpreter, or above its first imports."""
    whole = _high_water(f"{peak.beyond}\n{peak.program}", peak.arguments)
    return whole - _high_water(peak.beyond, ())


@cache
def _high_water(program: str, arguments: tuple[object, ...]) -> int:
    # Not ru_maxrss: across fork and exec Linux passes on the parent's, which is larger.
    program += (
        "\nfor line in open('/proc/self/status'):\n    if 'VmHWM' in line: print(line.split()[1])"
    )
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    return int(done.stdout.split()[-1]) * 1024


def unsynced(function: Callable[[], Any]) -> Callable[[], Any]:
    """The function, without waiting for the disk."""

    def call() -> Any:
        with no_fsync():
            return function()

    return call


def _mib(nbytes: int) -> str:
    return f"{nbytes / MIB:.1f} MiB"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.4g} ms"
