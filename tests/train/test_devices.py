"""Data parallel over four forced devices, and over two processes."""

import json
import socket
import subprocess

import pytest
from click.testing import CliRunner
from conftest import environment
from internals import Checkpoints, train
from test_resume import command

import elsa_format

SHORTER = ["--epochs", "1", "--sparsify-epochs", "0.5", "--densify-epochs", "0.2", "--levels", "80"]


def accuracies(folder):
    rows = json.loads((folder / "seed-0" / "results.json").read_text())["rows"]
    return {row["level"]: row["elsa"] for row in rows}


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    folder = tmp_path_factory.mktemp("four")
    run = subprocess.run(
        command(folder, *SHORTER), env=environment(4), capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr
    return folder


def test_four_devices_train_and_reproduce_their_file(four):
    """The run itself compares every level of its file with its freeze, bits and accuracy."""
    elsa_format.verify(four / "seed-0" / "model.safetensors")
    assert accuracies(four).keys() == {"80%", "dense"}


def test_a_run_stopped_after_a_level_ends_on_other_devices(tmp_path, monkeypatch):
    """The bits are equal, the loss of them is not: its sums are taken in another order."""
    save = Checkpoints.save

    def die(self, progress, phase=None):
        save(self, progress, phase)
        if progress.done == 1 and phase is None:
            raise KeyboardInterrupt

    monkeypatch.setattr(Checkpoints, "save", die)
    monkeypatch.chdir(tmp_path)
    words = command(tmp_path, *SHORTER)[3:]
    assert CliRunner().invoke(train, words).exit_code == 130
    run = subprocess.run(
        command(tmp_path, *SHORTER), env=environment(8), capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr
    assert "resumed after" in run.stderr


def test_two_processes_write_one_file(four, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    runs = []
    for process in (0, 1):
        words = [
            "--coordinator",
            f"127.0.0.1:{port}",
            "--processes",
            "2",
            "--process",
            str(process),
        ]
        runs.append(
            subprocess.Popen(
                command(tmp_path, *SHORTER, *words),
                env=environment(2),
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        )
    results = [run.communicate(timeout=300) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], results
    assert "| dense |" in results[0][0]
    assert "| dense |" not in results[1][0]
    elsa_format.verify(tmp_path / "seed-0" / "model.safetensors")
    # The same devices in all, so the same sums up to their order.
    for level, accuracy in accuracies(four).items():
        assert accuracies(tmp_path)[level] == pytest.approx(accuracy, abs=0.1)
