"""Threads: that they do their work, and survive Ctrl-C, forks and the end of the interpreter."""

import _thread
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from internals import Meter, Stopped, _threads, import_line, run, start

import elsa_format as elsa


def test_results_come_in_the_order_of_the_items() -> None:
    def work(item: int) -> int:
        time.sleep(0.01 * (item % 3))
        return item * item

    for jobs in (1, 2, 20):
        assert run(work, range(10), jobs) == [item * item for item in range(10)]


def test_the_first_error_stops_the_others() -> None:
    meter, ticks = Meter(lambda done, total: None, 0), []

    def work(item: int) -> None:
        if item == 1:
            raise OSError("disk on fire")
        for _ in range(1000):
            time.sleep(0.01)
            ticks.append(item)
            meter.tick(1)

    with pytest.raises(OSError, match="disk on fire"):
        meter.run(work, range(5), 2)
    assert len(ticks) < 100
    with pytest.raises(Stopped):
        meter.tick(1)


def test_jobs_may_start_what_they_wait_for() -> None:
    """However many jobs there are: what they start has threads of its own."""

    def work(item: int) -> int:
        found: list[int] = []
        for task in [start(found.append, part) for part in range(3)]:
            task.wait()
        return len(found)

    assert run(work, range(40), 20) == [3] * 40


def test_an_error_in_the_background_is_raised_by_who_waits() -> None:
    with pytest.raises(ZeroDivisionError):
        start(lambda: 1 // 0).wait()


def test_without_threads_the_caller_does_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(_thread, "start_new_thread", refuse)
    monkeypatch.setattr(_threads, "_pool", _threads._Pool())
    assert run(lambda item: threading.current_thread(), range(3), 2) == 3 * [
        threading.current_thread()
    ]
    found: list[int] = []
    start(found.append, 1).wait()
    assert found == [1]


INTERRUPTED = (
    import_line("_threads")
    + """
import dis, signal, sys, threading, time

_threads.CORES = 2
CHECKED = [dis.opmap[name] for name in ("CALL", "RESUME", "JUMP_BACKWARD") if name in dis.opmap]
def work(item):
    tasks = [_threads.start(time.sleep, 0.001) for _ in range(3)]
    for task in tasks:
        task.wait()
    return item

def whole():
    for task in [_threads.start(time.sleep, 0.001) for _ in range(3)]:
        task.wait()
    return _threads.run(work, range(4), 2)

def at_step(wanted):
    seen, before = 0, {}
    def trace(frame, event, argument):
        nonlocal seen
        if not frame.f_code.co_filename.endswith(("_threads.py", "threading.py", "thread.py")):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":  # Python looks for signals only after some of them
            seen += before.get(frame) in CHECKED
            before[frame] = frame.f_code.co_code[frame.f_lasti]
            if seen == wanted:
                raise KeyboardInterrupt
        return trace
    sys._getframe().f_trace_opcodes = True  # 3.12 sees none unless a frame asked for them before
    sys.settrace(trace)
    try:
        whole()
        return seen < wanted
    except KeyboardInterrupt:
        return False
    finally:
        sys.settrace(None)

step = 1
while not at_step(step):
    signal.alarm(10)  # a hang is a failure
    assert whole() == [0, 1, 2, 3], step
    _threads._renew()  # threads that have to be started
    step += 1
print(step)
"""
)


def test_ctrl_c_at_any_step_leaves_the_threads_usable() -> None:
    """After each instruction of the calling thread after which Python looks for signals."""
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 50


ENDED = (
    import_line("_threads")
    + """
import hashlib, sys

data = bytes(1 << 22)
for _ in range(50):
    _threads.start(lambda: hashlib.sha256(data).digest())
sys.exit(7)
"""
)


def test_the_interpreter_ends_while_threads_are_at_work() -> None:
    done = subprocess.run([sys.executable, "-c", ENDED], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (7, b"")


FORK = f"""
{import_line("_file")}
{import_line("_threads")}
import os, signal, sys
import elsa_format as elsa

_threads.CORES = _file.CORES = 2
_file.PARALLEL_FROM = 0

def use():
    with elsa.open(sys.argv[1]) as file:
        file.load(1)
    elsa.verify(sys.argv[1])
    elsa.extract(sys.argv[1], sys.argv[1] + ".out", level=1, force=True)

use()
pid = os.fork()
if pid == 0:
    signal.alarm(60)
    use()
    os._exit(0)
print(os.waitpid(pid, 0)[1])
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system cannot fork")
def test_a_fork_has_threads_of_its_own(tmp_path: Path) -> None:
    layer = np.random.default_rng(0).standard_normal((300, 300)).astype(np.float32)
    elsa.pack({"a": layer, "b": layer * 2}, tmp_path / "net.safetensors", sparsities=[90])
    done = subprocess.run(
        [sys.executable, "-c", FORK, tmp_path / "net.safetensors"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == "0", done.stderr
