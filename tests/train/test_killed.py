"""A process that is killed while several write: no index, and the next attempt succeeds."""

import signal
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from conftest import environment
from internals import Hosts, TrainError
from killed_worker import TARGET, train
from test_sharded import free_port

import elsa_format
from elsa_train import write_file

WORKER = Path(__file__).with_name("killed_worker.py")


def start(folder, *killed):
    port = free_port()
    return [
        subprocess.Popen(
            [sys.executable, WORKER, *map(str, (folder, process, port, *killed))],
            env=environment(4),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for process in range(2)
    ]


def names(folder):
    return {path.name for path in folder.iterdir()}


def test_the_next_attempt_to_write_succeeds(tmp_path):
    victims = {"data": 1, "names": 0}
    for moment in victims:
        (tmp_path / moment).mkdir()
    runs = {moment: start(tmp_path, moment, victim) for moment, victim in victims.items()}
    for moment, workers in runs.items():
        said = [worker.communicate(timeout=300)[0] for worker in workers]
        codes = [worker.returncode for worker in workers]
        assert codes[victims[moment]] == -signal.SIGKILL, said
        assert codes[1 - victims[moment]] not in (0, -signal.SIGKILL), said
    assert names(tmp_path / "data") == set()
    left = "net-00001-of-00002.safetensors"
    assert left in names(tmp_path / "names")
    assert TARGET not in names(tmp_path / "names")

    workers = start(tmp_path)
    said = [worker.communicate(timeout=300)[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], said
    # What has a name is replaced only by who says so.
    assert f"{left}: exists already; force=True replaces it" in said[0]
    (level,) = train().levels
    for moment in victims:
        elsa_format.verify(tmp_path / moment / TARGET)
        assert elsa_format.open(tmp_path / moment / TARGET).levels[0].digest == level.digest
        assert len(names(tmp_path / moment)) == 3


def test_a_lost_process_is_named_in_one_line(tmp_path, monkeypatch):
    def fail(self, array, owner, dtype=None):
        raise jax.errors.JaxRuntimeError("UNKNOWN: Connection closed by peer\nand more")

    result = train()
    monkeypatch.setattr(Hosts, "blocks", fail)
    with pytest.raises(TrainError) as found:
        write_file(tmp_path / "net.safetensors", result)
    said = str(found.value)
    assert said.startswith(f"{tmp_path / 'net.safetensors'}: while it was written, a device failed")
    assert said.endswith("(UNKNOWN: Connection closed by peer); start all processes again")
    assert names(tmp_path) == set()
