"""The signal to stop a run: heard once, and agreed on by all hosts."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

import jax
import numpy as np

from elsa_train._errors import Cancelled, Interrupted
from elsa_train._sharded.hosts import limited


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
        """Tell whether to stop."""
        return self.asked(step, lambda: False)[0]

    def asked(self, step: int, due: Callable[[], bool]) -> tuple[bool, bool]:
        """Tell whether to stop, and whether to save; several hosts agree, every ten steps."""
        if jax.process_count() == 1:
            return bool(self.seen), due()
        if step % 10:
            return False, False
        from jax.experimental import multihost_utils

        with limited(f"step {step}"):
            own = np.array([bool(self.seen), due()])
            stop, save = np.any(multihost_utils.process_allgather(own).reshape(-1, 2), axis=0)
            return bool(stop), bool(save)

    def interrupted(self, what: str) -> Interrupted:
        """Make the error that ends the command as its signal asks."""
        kind = Cancelled if self.seen == signal.SIGINT else Interrupted
        return kind(f"{what}; run the same command to resume")
