"""Where every command starts, and how a signal ends it.

Signals are heard before the imports, which take long. A thread waits for Ctrl-C and SIGTERM and
ends the process, whatever the others are doing: no exception comes out of the blue into code that
is not made for it, nothing waits for a thread, and outputs, which have no name before they are
whole, are just not there. As a library, ELSA leaves signals alone.
"""

import _thread
import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from types import FrameType

TYPE_CHECKING = False  # as in typing, which would have to be imported
if TYPE_CHECKING:
    import click

SECONDS = 0.5
"""For which the end waits while an output takes its name."""
STORE_SECONDS = 5.0
"""For which it waits while a store takes back what it was sent."""

OWN = ("pack", "extract", "inspect", "verify", "ship", "fetch", "record")
"""The commands of this package; those of others are entry points of a group."""
GROUP = "elsa.commands"

_ending = False


def end_on_signals() -> None:
    """Let Ctrl-C, SIGTERM and a terminal that goes away end the process at once."""
    if os.name != "posix":
        return
    heard, tell = os.pipe()
    os.set_blocking(tell, False)

    def hear(number: int, frame: FrameType | None) -> None:
        global _ending
        _ending = True
        with contextlib.suppress(OSError):
            os.write(tell, bytes([number]))

    before = {
        number: signal.signal(number, hear)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is not signal.SIG_IGN  # as nohup and shells do with jobs
    }
    # C code may take long to come back to Python, which alone calls `hear`; this is at once.
    signal.set_wakeup_fd(tell, warn_on_full_buffer=False)

    def give_back() -> None:
        signal.set_wakeup_fd(-1)
        for number, handler in before.items():
            if signal.getsignal(number) is hear:
                signal.signal(number, handler)

    os.register_at_fork(after_in_child=give_back)
    try:
        _thread.start_new_thread(_listen, (heard, hear, tuple(before)))
    except RuntimeError:  # a limit of the system: then as Python does by itself
        give_back()


def _listen(
    heard: int, hear: Callable[[int, FrameType | None], None], numbers: tuple[int, ...]
) -> None:
    asked = set()
    while True:
        number = os.read(heard, 1)[0]
        if signal.getsignal(number) is hear or number in asked:
            _end(number)
        # Somebody took it over, as the trainer does, which saves first. A second one ends it.
        asked.update({number} & {*numbers})


def _end(number: int) -> None:
    try:
        for kind, seconds in (("store", STORE_SECONDS), ("atomic", SECONDS)):
            if output := sys.modules.get(f"elsa_format._output.{kind}"):
                output.leave_nothing(seconds)
        if os.isatty(2) and select.select([], [2], [], 0)[1]:
            os.write(2, b"\n")
    finally:
        os._exit(128 + number)


def wait_if_ending() -> None:
    """Say and do no more once a signal was heard, such as that a pipe, too, has come to its end."""
    if _ending:
        time.sleep(2 * (SECONDS + STORE_SECONDS))


def _occupy_standard_streams() -> None:
    """Let no file become standard error, say, where that is closed, and get what is said there."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - as long as the process


def find_command(name: str) -> "click.Command | None":
    """A command by its name, or without one the group of all; None if there is none."""
    if not name:
        return import_module("elsa_format._cli").main  # type: ignore[no-any-return]
    if name in OWN:
        return import_module(f"elsa_format._cli.{name}").command  # type: ignore[no-any-return]
    from importlib.metadata import entry_points  # only here, as it takes long to import

    return next((entry.load() for entry in entry_points(group=GROUP, name=name)), None)


def _run(name: str) -> None:
    """Run as `elsa-name`, or as `elsa`."""
    _occupy_standard_streams()
    end_on_signals()
    from elsa_format.cli import errors_reported

    script = f"elsa-{name}" if name else "elsa"
    try:
        with errors_reported():
            command = find_command(name)
            assert command is not None
            code = command.main(prog_name=script, standalone_mode=False)
            sys.exit(code if isinstance(code, int) else 0)
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
