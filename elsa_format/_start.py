"""Where every command starts: signals are heard before the imports, which take long."""

import os
import sys
from functools import partial

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


def _run(name: str) -> None:
    """Run as `elsa-name`, or as `elsa`."""
    _occupy_standard_streams()
    end_on_signals()
    from elsa_format._cli import run

    try:
        run(name)
    finally:
        wait_if_ending()


elsa = partial(_run, "")
pack = partial(_run, "pack")
extract = partial(_run, "extract")
inspect = partial(_run, "inspect")
verify = partial(_run, "verify")
ship = partial(_run, "ship")
fetch = partial(_run, "fetch")
record = partial(_run, "record")
export = partial(_run, "export")
bench = partial(_run, "bench")
train = partial(_run, "train")
