"""Kill, stop, diverge: a run resumes to the same bits, and never keeps a broken state."""

import re
import signal
import subprocess
import sys
import time

import pytest
from click.testing import CliRunner
from conftest import TINY
from internals import RULES, StopSignal, import_line, train
from resumed import check_resumed, run_and_resume

SHORT = {**TINY, "epochs": 1.0, "sparsify_epochs": 1.0, "levels": "90,80"}
ARGUMENTS = [
    word for key, value in SHORT.items() for word in (f"--{key.replace('_', '-')}", str(value))
]


def command(folder, *more):
    code = f"{import_line('train_main')}; train_main()"
    return [
        sys.executable,
        "-c",
        code,
        "digits",
        "--out",
        str(folder),
        "--plot",
        "none",
        "--checkpoint-every",
        "7",
        *ARGUMENTS,
        *more,
    ]


def start(folder, *more):
    """Start a run."""
    return subprocess.Popen(
        command(folder, *more), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(run):
    out, err = run.communicate(timeout=300)
    return run.returncode, out, err


def wait_for(run, folder, count):
    """Wait until so many checkpoints are on disk; return False if the run ended before."""
    checkpoints = folder / "seed-0" / "checkpoints"
    seen = set()
    while run.poll() is None:
        if checkpoints.is_dir():
            seen |= {p.name for p in checkpoints.iterdir() if p.name.isdigit()}
        if len(seen) >= count:
            return True
        time.sleep(0.02)
    return False


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return the file of a run that nothing interrupts."""
    folder = tmp_path_factory.mktemp("whole")
    code, out, err = finish(start(folder))
    assert code == 0, err
    assert "| dense |" in out
    return (folder / "seed-0" / "model.safetensors").read_bytes()


def test_killed_twice_then_resumed_gives_the_same_file(whole, tmp_path):
    for count in (2, 4):
        run = start(tmp_path)
        assert wait_for(run, tmp_path, count)
        run.send_signal(signal.SIGKILL)
        run.communicate()
    code, _, err = finish(start(tmp_path))
    assert code == 0, err
    assert "resumed after" in err
    assert (tmp_path / "seed-0" / "model.safetensors").read_bytes() == whole


def test_a_resumed_run_of_other_rules_gives_the_same_bytes(whole, tmp_path):
    del whole  # whose programs are used again
    found = run_and_resume(tmp_path, [rule for rule in RULES if rule != "gmp"])
    check_resumed(tmp_path, found)


def test_sigterm_saves_and_only_the_same_command_resumes(whole, tmp_path):
    run = start(tmp_path)
    assert wait_for(run, tmp_path, 1)
    run.send_signal(signal.SIGTERM)
    code, _, err = finish(run)
    assert code == 143
    assert "its state is saved" in err
    assert "Traceback" not in err
    words = ["digits", "--out", str(tmp_path), *ARGUMENTS, "--momentum", "0.5"]
    found = CliRunner().invoke(train, words)
    assert found.exit_code == 2
    assert "other settings" in found.output
    code, _, err = finish(start(tmp_path))
    assert code == 0, err
    assert (tmp_path / "seed-0" / "model.safetensors").read_bytes() == whole


def test_ctrl_c_saves_and_the_same_command_resumes_at_that_step(whole, tmp_path):
    every = ("--checkpoint-every", "1000")  # nothing is saved within a phase but by the signal
    run = start(tmp_path, *every)
    metrics = tmp_path / "seed-0" / "metrics.jsonl"
    while run.poll() is None and not (metrics.exists() and metrics.stat().st_size):
        time.sleep(0.01)
    run.send_signal(signal.SIGINT)
    code, _, err = finish(run)
    assert code == 130, err
    assert "Traceback" not in err
    assert "stopping after this step, to save; Ctrl-C again ends at once" in err
    stopped = re.search(r"stopped at step (\d+) of .*saved; run the same command to resume", err)
    assert stopped
    code, _, err = finish(start(tmp_path, *every))
    assert code == 0, err
    assert int(re.search(r"resumed after (\d+) steps", err)[1]) >= int(stopped[1]) > 0
    assert (tmp_path / "seed-0" / "model.safetensors").read_bytes() == whole


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_second_signal_ends_at_once_even_what_hangs_outside_of_python(number):
    code = f"""
import ctypes
{import_line("_start")}
_start.end_on_signals()
{import_line("StopSignal")}
lock, mutex = ctypes.CDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(256)
with StopSignal():
    lock(mutex)
    print("ready", flush=True)
    lock(mutex)  # for ever: no signal breaks it off
"""
    run = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert run.stdout.readline() == "ready\n"
    run.send_signal(number)
    time.sleep(0.2)
    assert run.poll() is None
    run.send_signal(number)
    run.communicate(timeout=30)
    assert run.returncode == 128 + number


def test_signals_are_remembered_once_and_given_back():
    before = signal.getsignal(signal.SIGINT)
    with StopSignal(quiet=True) as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.agreed(1)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
    assert stop.interrupted("stopped").exit_code == 130


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_not_lost_in_a_callback(number):
    code = f"""
import gc, os, time
{import_line("_start")}
_start.end_on_signals()
def called_back(phase, info):
    os.kill(os.getpid(), {int(number)})
    sum(range(1000))
gc.callbacks.append(called_back)
gc.collect()
time.sleep(30)
print("lost")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (128 + number, "", "")


def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_good_checkpoint(tmp_path):
    words = ["digits", "--out", str(tmp_path), *ARGUMENTS, "--checkpoint-every", "1"]
    found = CliRunner().invoke(train, [*words, "--learning-rate", "1e30"])
    assert found.exit_code == 1
    assert "error: " in found.output
    assert "finite" in found.output or "loss is nan" in found.output
    assert not (tmp_path / "seed-0" / "model.safetensors").exists()
    import numpy as np
    import orbax.checkpoint as ocp

    manager = ocp.CheckpointManager((tmp_path / "seed-0" / "checkpoints").absolute())
    saved = manager.latest_step()
    assert saved is not None
    arrays = manager.restore(saved, args=ocp.args.Composite(arrays=ocp.args.StandardRestore()))
    import jax

    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(arrays["arrays"]))
