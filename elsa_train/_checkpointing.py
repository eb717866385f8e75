"""Checkpoints of a run in progress, and the signal to stop."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from types import FrameType, TracebackType
from typing import Any, NamedTuple, Self

import jax
import numpy as np
import orbax.checkpoint as ocp

from elsa_format.levels import Pattern
from elsa_train import _method
from elsa_train._errors import Cancelled, Interrupted, InvalidRun, NonFiniteLoss, TrainError
from elsa_train._folder import Output, check_settings
from elsa_train._hosts import limited
from elsa_train._levels import Level
from elsa_train._multilevel import FrozenLevel, Network, Progress, without_state
from elsa_train._plan import Carry, Phase

PyTree = Any


class Saved(NamedTuple):
    """A run in progress; phase is None between routines."""

    progress: Progress
    phase: Phase | None


class Checkpoints:
    """The last checkpoints of a run, written by orbax while the run goes on."""

    def __init__(self, output: Output, settings: dict[str, Any]) -> None:
        """Open the folder; settings must be those of the checkpoints in it."""
        self._output, self._folder, self._settings = output, output.checkpoints, settings
        with _saying(f"{self._folder}: can't be used", TrainError), limited(self._folder):
            self._manager = ocp.CheckpointManager(
                self._folder.absolute(),
                options=ocp.CheckpointManagerOptions(max_to_keep=2, create=True),
            )

    def save(self, progress: Progress, phase: Phase | None = None) -> None:
        """Save, unless something is not finite: then the last good checkpoint stays the last."""
        if phase is not None and not _method.all_finite(phase.carry):
            raise NonFiniteLoss("weights or optimizer state are not finite; nothing was saved")
        step = 0 if phase is None else phase.step
        # Counted, not made of phase and step: orbax's numbers must fit 32 bits.
        number = (self._manager.latest_step() or 0) + 1
        meta = {
            "settings": self._settings,
            "done": progress.done,
            "step": step if phase is not None else None,
            "frozen": [asdict(without_state(frozen)) for frozen in progress.frozen],
        }
        arrays = _arrays(progress, phase)
        problem = f"{self._folder}: checkpoint {number} can't be written"
        with _saying(problem, TrainError), limited(self._folder):
            self._manager.save(
                number,
                args=ocp.args.Composite(
                    arrays=ocp.args.StandardSave(arrays),
                    meta=ocp.args.JsonSave(meta),
                ),
            )

    def restore(self, start: Progress, phase: Phase) -> Saved | None:
        """Read the last checkpoint, into trees like these."""
        number = self._manager.latest_step()
        if number is None:
            return None
        problem = (
            f"{self._folder}: checkpoint {number} is cut, or not of a run; --force starts over"
        )
        with _saying(problem, InvalidRun):
            return self._restore(number, start, phase)

    def _restore(self, number: int, start: Progress, phase: Phase) -> Saved:
        meta = self._manager.restore(number, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))[
            "meta"
        ]
        check_settings(self._output, meta["settings"], self._settings)
        done, step = meta["done"], meta["step"]
        if type(done) is not int or not (step is None or (type(step) is int and step >= 0)):
            raise ValueError(f"done {done!r}, step {step!r}")
        if len(meta["frozen"]) != (max(done, 0) + 1) // 2:
            raise ValueError(f"{len(meta['frozen'])} frozen levels after {done} routines")
        frozen = tuple(_record(entry, start.network.state) for entry in meta["frozen"])
        within = meta["step"] is not None
        like = _arrays(start._replace(frozen=frozen), phase if within else None)
        arrays = self._manager.restore(
            number,
            args=ocp.args.Composite(
                arrays=ocp.args.StandardRestore(jax.tree.map(ocp.utils.to_shape_dtype_struct, like))
            ),
        )["arrays"]
        states = [jax.tree.map(np.asarray, state) for state in arrays["frozen"]]
        progress = Progress(
            meta["done"],
            Network(arrays["params"], arrays["state"]),
            arrays["counters"],
            tuple(
                _record(entry, state) for entry, state in zip(meta["frozen"], states, strict=True)
            ),
        )
        if not within:
            return Saved(progress, None)
        carry = Carry(*(arrays["phase"][name] for name in Carry._fields))
        return Saved(progress, Phase(meta["step"], carry, arrays["phase"]["kept"]))

    def close(self) -> None:
        """Wait until what was saved is on disk."""
        problem = f"{self._folder}: a checkpoint can't be written"
        with _saying(problem, TrainError), limited(self._folder):
            self._manager.wait_until_finished()
            self._manager.close()


@contextmanager
def _saying(problem: str, kind: type[TrainError], advice: str = "") -> Iterator[None]:
    """Say in one line what orbax and tensorstore say in many, with errors of every class."""
    try:
        yield
    except (TrainError, OSError):
        raise
    except Exception as error:
        first, *_ = str(error).splitlines() or [""]
        raise kind(f"{problem} ({type(error).__name__}: {first}){advice}") from None


def _arrays(progress: Progress, phase: Phase | None) -> PyTree:
    tree = {
        "params": progress.network.params,
        "state": progress.network.state,
        "counters": progress.counters,
        "frozen": [frozen.state for frozen in progress.frozen],
    }
    if phase is not None:
        tree["phase"] = {**phase.carry._asdict(), "kept": phase.kept}
    return tree


def _record(entry: dict[str, Any], state: PyTree) -> FrozenLevel:
    pattern = entry["level"]["pattern"]
    level = Level(**{**entry["level"], "pattern": Pattern(**pattern) if pattern else None})
    return FrozenLevel(**{**entry, "level": level, "state": jax.tree.map(np.asarray, state)})


class StopSignal:
    """Remember the first Ctrl-C or SIGTERM instead of dying of it; the second ends the process."""

    def __init__(self, *, quiet: bool = False) -> None:
        """Nothing is remembered yet."""
        self.seen = 0
        """The signal's number."""
        self._quiet = quiet
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        """Take the signals over, where Python allows it."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup does
                    self._before[number] = signal.signal(number, self._remember)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Give them back."""
        self._give_back()

    def _give_back(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self.seen:
            self._give_back()
            os.kill(os.getpid(), number)
            return
        self.seen = number
        if number == signal.SIGINT and not self._quiet:
            # Past Python's buffer, which may be in use right now.
            with contextlib.suppress(OSError, ValueError, AttributeError):
                error = sys.stderr.fileno()
                text = "stopping after this step, to save; Ctrl-C again ends at once\n"
                os.write(error, f"\r\x1b[K{text}".encode() if os.isatty(error) else text.encode())

    def agreed(self, step: int) -> bool:
        """Tell whether to stop; several hosts ask each other, every ten steps."""
        if jax.process_count() == 1:
            return bool(self.seen)
        if step % 10:
            return False
        from jax.experimental import multihost_utils

        with limited(f"step {step}"):
            return bool(np.any(multihost_utils.process_allgather(np.array(bool(self.seen)))))

    def interrupted(self, what: str) -> Interrupted:
        """Make the error that ends the command as its signal asks."""
        kind = Cancelled if self.seen == signal.SIGINT else Interrupted
        return kind(f"{what}; run the same command to resume")
