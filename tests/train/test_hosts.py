"""What hosts can't train together is refused by all, at once; one that does not come is named."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import environment
from test_sharded import free_port

WORKER = Path(__file__).with_name("hosts_worker.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("hosts")


@pytest.fixture(scope="module")
def ended(folder):
    """Return what each process was refused, and how process 0 ended that waited for the other."""
    port = free_port()
    workers = [
        subprocess.Popen(
            [sys.executable, WORKER, *map(str, (folder, process, port))],
            env=environment(1),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in (0, 1)
    ]
    said = workers[0].communicate(timeout=300)[1]
    workers[1].kill()
    workers[1].communicate()
    refused = [json.loads((folder / f"found-{n}.json").read_text()) for n in (0, 1)]
    return refused, workers[0].returncode, said


@pytest.mark.parametrize(
    ("case", "codes", "whys"),
    [
        ("folder", [1, 1], ["give a folder that all hosts share"] * 2),
        ("settings", [2, 2], ["process 1 has other settings or data than process 0: momentum"] * 2),
        # Process 1 lacks an option; process 0 says so, and is itself not wrong.
        ("data", [1, 2], ["process 1 failed: dataset 'mnist' is", "error: dataset 'mnist' is"]),
    ],
)
def test_what_hosts_cannot_train_together_is_refused_before_training(
    ended, folder, case, codes, whys
):
    for refused, code, why in zip(ended[0], codes, whys, strict=True):
        assert refused[case][0] == code
        assert why in refused[case][1]
        assert refused[case][1].count("\n") == 1
    assert not list(folder.rglob("checkpoints"))


def test_waiting_for_a_process_that_does_not_come_ends_with_a_line(ended):
    _, code, said = ended
    assert code == 1
    (line,) = [line for line in said.splitlines() if line.startswith("error: ")]
    assert line.endswith(
        "waited 1 seconds for the other processes; look for an error there, then run the same "
        "command on all hosts to resume"
    )
