"""Networks split over devices and processes give the file that an unsplit one gives."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import environment

WORKER = Path(__file__).with_name("sharded_worker.py")
TARGET = "net.safetensors.index.json"


def start(folder, process, processes, port):
    return subprocess.Popen(
        [sys.executable, WORKER, *map(str, (folder, process, processes, port))],
        env=environment(8 // processes),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def run(folder, processes):
    port = free_port()
    workers = [start(folder, process, processes, port) for process in range(processes)]
    said = [worker.communicate(timeout=300)[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [0] * processes, said
    return [json.loads((folder / f"found-{n}.json").read_text()) for n in range(processes)]


@pytest.fixture(scope="module")
def eight(tmp_path_factory):
    """One process with eight devices; the networks that are not split are the reference."""
    ((found, _),) = run(tmp_path_factory.mktemp("eight"), 1)
    return found


@pytest.fixture(scope="module")
def two_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("two")


@pytest.fixture(scope="module")
def two(two_folder):
    """Two processes with four devices each."""
    return run(two_folder, 2)


def test_a_split_network_selects_freezes_and_writes_what_an_unsplit_one_does(eight):
    assert len(eight) == 9
    for key, found in eight.items():
        assert found == eight[f"{key.split()[0]} unsplit"], key


def test_two_processes_write_the_same_network_in_shards(eight, two, two_folder):
    """Each process has read the whole index, and found the same."""
    (first, _), (second, _) = two
    assert first == second
    assert len(first) == 4
    for key, found in first.items():
        assert found == eight[f"{key.split()[0]} unsplit"], key
    shards = sorted(path.name for path in two_folder.glob("uniform-crossed-*"))
    assert shards == [f"uniform-crossed-0000{n}-of-00002.safetensors" for n in (1, 2)]


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ("folder", "give a folder that all hosts share"),
        ("tree", "process 1 has another network than process 0: 'params/other/kernel'"),
        ("devices", "'params/first/bias' are on different devices; put the network on one mesh"),
        ("exists", "exists already; force=True replaces it"),
    ],
)
def test_what_cannot_be_shared_is_refused_by_all_before_training(two, case, why):
    for _, refused in two:
        assert why in refused[case]


def test_what_stops_one_process_stops_all_and_leaves_nothing(two, two_folder):
    (_, first), (_, second) = two
    assert "process 1 failed: tensor" in first["failed"]
    assert "is nan" in second["failed"]
    assert not list((two_folder / "failed").iterdir())
    assert not list(two_folder.glob("**/.elsa*"))
