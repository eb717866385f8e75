"""Reading at positions, with what the system has for it."""

import io
import os
import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import windows
from bits import same_bits
from internals import FileStorage, _file, fill, import_line

import elsa_format as elsa


@pytest.fixture(params=["as it is", "without preadv", "Windows"])
def system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every way to read at a position."""
    if request.param == "without preadv":
        monkeypatch.delattr(os, "preadv")
    if request.param == "Windows":
        windows.imitate(monkeypatch)


@pytest.mark.usefixtures("system")
def test_threads_read_one_file(tmp_path: Path) -> None:
    content = random.Random(0).randbytes(1 << 20)
    (tmp_path / "file").write_bytes(content)
    storage = FileStorage(tmp_path / "file")
    wrong: list[Any] = []

    def read(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(300):
            start = rng.randrange(len(content))
            stop = min(start + rng.choice((1, 100, 70_000)), len(content))
            found = bytearray(stop - start)
            assert fill(storage.reader(start, stop), memoryview(found)) == 0
            if found != content[start:stop]:
                wrong.append((start, stop))

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    storage.close()


@pytest.mark.usefixtures("system")
def test_errors_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(100))
    storage = FileStorage(path)
    assert fill(storage.reader(90, 120), memoryview(bytearray(30))) == 20
    if sys.platform == "linux":  # address 0 of one's own memory cannot be read
        with pytest.raises(OSError, match=r"Input/output error: '/proc/self/mem'$"):
            FileStorage("/proc/self/mem").read_at(0, memoryview(bytearray(3)))


@pytest.mark.usefixtures("system")
@pytest.mark.parametrize("parallel_from", [0, 1 << 60])
def test_every_way_to_read(
    network: dict[str, np.ndarray],
    tmp_path: Path,
    parallel_from: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tensors, levels, streams, shards and packing, in threads and without."""
    monkeypatch.setattr(_file, "PARALLEL_FROM", parallel_from)
    packed = io.BytesIO()
    elsa.pack(network, packed, sparsities=[95, 80])
    expected = elsa.open(io.BytesIO(packed.getvalue())).load(1)
    path, index = tmp_path / "net.safetensors", tmp_path / "net.safetensors.index.json"
    elsa.extract(io.BytesIO(packed.getvalue()), path, level=2, keep_levels=True)
    elsa.extract(path, index, level=2, keep_levels=True, max_shard_size=1000)
    for source in (path, index):
        with elsa.open(source) as file:
            assert same_bits(file.load(1), expected)
            assert same_bits({n: file.tensor(n, 1) for n in expected}, expected)
            sparse = file.load(1, layout="bitmask")["dense/kernel"]
            assert same_bits({"": sparse.to_dense()}, {"": expected["dense/kernel"]})
        assert same_bits(dict(elsa.stream(source, level=1)), expected)
        assert elsa.verify(source, jobs=2).digests == 2
        for layout in ("dense", "bitmask", "csr"):
            out = tmp_path / "level.safetensors"
            elsa.extract(source, out, level=1, layout=layout, force=True)  # type: ignore[arg-type]
            assert same_bits(elsa.load_level(out), expected)
    dense = tmp_path / "dense.safetensors.index.json"
    elsa.extract(index, dense, level="dense", max_shard_size=1000)
    again = tmp_path / "again.safetensors"
    elsa.pack(dense, again, sparsities=[95, 80], jobs=2)
    with elsa.open(again) as file:
        assert same_bits(file.load(1), expected)


WHOLE = """
import os, sys
for name in {lacking!r}:
    if hasattr(os, name):
        delattr(os, name)
for name in ("fcntl", "resource", "termios", "pwd", "grp"):
    sys.modules[name] = None
{start}
main(sys.argv[1:])
"""


def test_commands_start_where_posix_is_missing(
    network: dict[str, np.ndarray], tmp_path: Path
) -> None:
    """From the first import on."""
    np.savez(tmp_path / "w.npz", **network)

    script = WHOLE.format(lacking=windows.LACKING, start=import_line("main"))

    def run(*words: object) -> str:
        command = [sys.executable, "-c", script, *map(str, words)]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run("pack", "w.npz", "--sparsities", "95,80", "-o", "net.safetensors")
    run("extract", "net.safetensors", "--level", 1, "-o", "level.safetensors")
    run("extract", "net.safetensors", "--level", 2, "-o", "level.safetensors.index.json")
    assert "80%" in run("inspect", "net.safetensors")
    assert "valid" in run("verify", "net.safetensors")
    assert len(elsa.load_level(tmp_path / "level.safetensors")) == len(network)
