"""Where every command starts: signals are heard before the imports, which take long."""

import os
import sys

from elsa_format._signals import end_on_signals, wait_if_ending


def _occupy_standard_streams() -> None:
    """Let no file become standard error, say, where that is closed, and get what is said there."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - as long as the process


def _run(name: str = "") -> None:
    _occupy_standard_streams()
    end_on_signals()
    from elsa_format._cli import run

    try:
        run(name)
    finally:
        wait_if_ending()


def elsa() -> None:
    """Run as `elsa`."""
    _run()


def pack() -> None:
    """Run as `elsa-pack`."""
    _run("pack")


def extract() -> None:
    """Run as `elsa-extract`."""
    _run("extract")


def inspect() -> None:
    """Run as `elsa-inspect`."""
    _run("inspect")


def verify() -> None:
    """Run as `elsa-verify`."""
    _run("verify")


def ship() -> None:
    """Run as `elsa-ship`."""
    _run("ship")


def fetch() -> None:
    """Run as `elsa-fetch`."""
    _run("fetch")


def export() -> None:
    """Run as `elsa-export`."""
    _run("export")


def bench() -> None:
    """Run as `elsa-bench`."""
    _run("bench")


def train() -> None:
    """Run as `elsa-train`."""
    _run("train")
