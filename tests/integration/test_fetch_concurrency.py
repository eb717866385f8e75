"""Fetches onto one output at the same time: one is refused, and nothing that was there is lost."""

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faulty_server import Request, Server, fine

import elsa_format as elsa

fcntl = pytest.importorskip("fcntl")


@pytest.fixture(scope="module")
def networks(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The delivery files of two networks."""
    folder, found = tmp_path_factory.mktemp("nets"), []
    for seed in (1, 2):
        weights = {"w": np.random.default_rng(seed).standard_normal((400, 300)).astype(np.float32)}
        elsa.pack(weights, folder / f"{seed}", sparsities=[95, 80])
        found.append(folder / f"{seed}.ship.safetensors")
        elsa.ship(folder / f"{seed}", found[-1])
    return found


@contextmanager
def paused(server: Server, url: str, request: int, job: Callable[[], Any]) -> Iterator[Future[Any]]:
    """A fetch that waits in one of its requests, until the block is left."""
    reached, go_on = threading.Event(), threading.Event()

    def wait(_: Request) -> None:
        reached.set()
        assert go_on.wait(60)

    server.files[url.removeprefix(server.url)].faults = [*([fine] * request), wait]
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(job)
        try:
            assert reached.wait(60)
            yield running
        finally:
            go_on.set()


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("which", [0, 1], ids=["same", "other"])
def test_the_slower_one_finds_a_file(
    server: Server, networks: list[Path], tmp_path: Path, which: int, force: bool
) -> None:
    """Nothing was there when it began; what the faster one has finished stays, by force too."""
    out, raw = tmp_path / "out", networks[0].read_bytes()
    url = server.serve(networks[which].read_bytes())
    with paused(server, url, 0, lambda: elsa.fetch(url, out, level=1, force=force)) as slower:
        elsa.fetch(networks[0], out, level="dense")
    with pytest.raises(elsa.OutputExists, match="another process is fetching it"):
        slower.result()
    assert out.read_bytes() == raw
    with pytest.raises(elsa.OutputExists, match="is not a prefix of"):
        elsa.fetch(networks[1], out, level=1)
    assert elsa.fetch(networks[0], out, level=1).available == "dense"
    assert out.read_bytes() == raw


@pytest.mark.parametrize("request_number", [0, 1])
def test_the_faster_one_is_refused(
    server: Server, networks: list[Path], tmp_path: Path, request_number: int
) -> None:
    """While another upgrades a file that was there."""
    out, raw = tmp_path / "out", networks[0].read_bytes()
    begun = elsa.fetch(networks[0], out, level=1)
    url = server.serve(raw)
    with paused(server, url, request_number, lambda: elsa.fetch(url, out, upgrade=2)) as slower:
        for source in networks:
            with pytest.raises(elsa.OutputExists, match="another process is fetching it"):
                elsa.fetch(source, out, level="dense", force=True)
        assert out.read_bytes() == raw[: begun.size]
    assert slower.result().level == 2
    assert out.read_bytes() == raw[: slower.result().size]
    elsa.fetch(networks[0], out, upgrade="dense")
    assert out.read_bytes() == raw


def test_shards_and_side_files_at_once(server: Server, tmp_path: Path) -> None:
    """The one that comes later leaves the directory of the other alone, and none of its own."""
    rng = np.random.default_rng(3)
    found = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        weights = {f"w{i}": rng.standard_normal((200, 60)).astype(np.float32) for i in (0, 1)}
        elsa.pack(
            weights, tmp_path / name / "model.safetensors.index.json", sparsities=[90],
            max_shard_size=60_000,
        )  # fmt: skip
        (tmp_path / name / "config.json").write_text(f'"{name}"')
        elsa.ship(tmp_path / name, tmp_path / f"{name} shipped")
        found.append(tmp_path / f"{name} shipped")
    for path in found[1].iterdir():
        server.serve(path.read_bytes(), f"/{path.name}")
    url, out = f"{server.url}/model.ship.safetensors.index.json", tmp_path / "out"
    with paused(server, url, 0, lambda: elsa.fetch(f"{server.url}/", out, level=1)) as slower:
        elsa.fetch(found[0], out, level="dense")
    with pytest.raises(elsa.OutputExists):
        slower.result()
    for path in out.iterdir():
        assert path.read_bytes() == (found[0] / path.name).read_bytes()
    assert {path.name for path in out.iterdir()} == {path.name for path in found[0].iterdir()}


@pytest.mark.parametrize("force", [False, True])
def test_side_files_are_of_the_network_that_is_there(
    server: Server, tmp_path: Path, force: bool
) -> None:
    """They are downloaded first, but not before the weights, new ones too, are locked."""
    for seed, name in enumerate(("one", "two")):
        (tmp_path / name).mkdir()
        weights = {"w": np.random.default_rng(seed).standard_normal((200, 60)).astype(np.float32)}
        elsa.pack(weights, tmp_path / name / "model.safetensors", sparsities=[90])
        (tmp_path / name / "config.json").write_text(f'"{name}"')
        elsa.ship(tmp_path / name, tmp_path / f"{name} shipped")
    ours, theirs, out = tmp_path / "one shipped", tmp_path / "two shipped", tmp_path / "out"
    for path in ours.iterdir():
        server.serve(path.read_bytes(), f"/{path.name}")
    config = f"{server.url}/config.json"

    def fetch() -> elsa.FetchReport:
        return elsa.fetch(f"{server.url}/", out, level="dense", force=force)

    with (
        paused(server, config, 0, fetch) as slower,
        pytest.raises(elsa.OutputExists, match="another process is fetching it"),
    ):
        elsa.fetch(theirs, out, level=1, force=force)
    assert slower.result().level == "dense"
    for path in (*ours.iterdir(), *out.iterdir()):
        assert (out / path.name).read_bytes() == (ours / path.name).read_bytes()


@pytest.mark.parametrize("gone", [False, True], ids=["replaced", "removed"])
def test_the_lock_is_on_the_file_that_has_the_name(
    networks: list[Path], tmp_path: Path, gone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program replaces or removes the output between its opening and its lock."""
    out, other, raw = tmp_path / "out", tmp_path / "other", networks[0].read_bytes()
    out.write_bytes(raw[:300])
    shutil.copy(networks[0], other)
    old, flock = os.open(out, os.O_RDONLY), fcntl.flock

    def late(*arguments: Any) -> None:
        if other.exists():
            out.unlink() if gone else None
            other.unlink() if gone else other.replace(out)
        flock(*arguments)

    monkeypatch.setattr(fcntl, "flock", late)
    report = elsa.fetch(networks[0], out, level=1)
    assert report.available == (1 if gone else "dense")
    assert out.read_bytes() == (raw[: report.size] if gone else raw)
    assert os.pread(old, 999_999, 0) == raw[:300]
    os.close(old)


def test_processes(networks: list[Path], tmp_path: Path) -> None:
    """Whatever their order: exit 0 means that the level is there, also after all others."""
    raw = networks[0].read_bytes()
    script = (
        "import sys, elsa_format as e\n"
        "sys.stdin.read()\n"
        "try: print(e.fetch(sys.argv[1], sys.argv[2], level=sys.argv[3]).size)\n"
        "except e.OutputExists: print(0)\n"
    )
    for number in range(3):
        out = tmp_path / f"out{number}"
        running = [
            subprocess.Popen(
                [sys.executable, "-c", script, str(networks[0]), str(out), level],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for level in ("1", "dense", "2", "1")
        ]
        for process in running:  # all are ready, and begin
            assert process.stdin is not None
            process.stdin.close()
            process.stdin = None
        sizes = [int(process.communicate()[0]) for process in running]
        assert any(sizes)
        found = out.read_bytes()
        assert raw.startswith(found)
        assert len(found) == max(sizes)
