"""Memory does not grow with the file: at most 64 MiB, and the header, over the interpreter."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from internals import DTYPES, import_line, lay_out, serialize

import elsa_format as elsa
from elsa_format import TensorInfo

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

BOUND = 64 << 20
SIZE = 256 << 20
PEAK = "print([n for n in open('/proc/self/status') if 'VmHWM' in n][0].split()[1])"
"""The child's own peak: its ru_maxrss would start at this process's."""

RUN = f"""
import sys
{import_line("main")}
try:
    main(sys.argv[1:])
except SystemExit as end:
    assert not end.code, end.code
{PEAK}
"""


def peak(script: str, *words: object) -> int:
    """Bytes of memory that a script takes at most."""
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, words)], capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    return int(done.stdout.split()[-1]) << 10


@pytest.fixture(scope="module")
def interpreter() -> int:
    """What Python takes by itself."""
    return peak(PEAK)


def make(path: Path, size: int) -> Path:
    """A checkpoint of one tensor, of which every MiB is the same."""
    block = np.random.default_rng(0).standard_normal(1 << 18).astype(np.float32)
    info = TensorInfo("w", DTYPES["F32"], (size >> 20, block.size))
    with open(path, "wb") as file:
        file.write(serialize(lay_out([info]), {}))
        for _ in range(size >> 20):
            file.write(block)
    return path


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 256 MiB."""
    return make(tmp_path_factory.mktemp("dense") / "dense.safetensors", SIZE)


@pytest.fixture(scope="module")
def net(dense: Path) -> Path:
    """The same, packed."""
    path = dense.with_name("net.safetensors")
    elsa.pack(dense, path, sparsities=[95, 90, 80], digests=False)
    return path


@pytest.mark.parametrize("options", [["95,90,80"], ["95,90,80", "--scope", "uniform"]])
def test_pack(dense: Path, interpreter: int, options: list[str]) -> None:
    out = dense.with_name("out.safetensors")
    words = ("pack", dense, "-o", out, "--no-digests", "--force", "--sparsities", *options)
    assert peak(RUN, *words) - interpreter <= BOUND
    out.unlink()


def test_pack_patterns(tmp_path: Path, interpreter: int) -> None:
    small = make(tmp_path / "small.safetensors", 3 * BOUND // 2)  # N:M takes longer
    words = ("pack", small, "-o", tmp_path / "out.safetensors", "--sparsities", "1:8,1:4,2:4")
    assert peak(RUN, *words) - interpreter <= BOUND


@pytest.mark.parametrize("layout", ["dense", "bitmask", "csr"])
def test_extract(net: Path, interpreter: int, layout: str) -> None:
    out = net.with_name("level.safetensors")
    words = ("extract", net, "-l", 3, "--layout", layout, "-o", out, "--force")
    assert peak(RUN, *words) - interpreter <= BOUND
    out.unlink()


def test_verify(net: Path, interpreter: int) -> None:
    assert peak(RUN, "verify", net) - interpreter <= BOUND


def test_255_levels(tmp_path: Path, interpreter: int) -> None:
    """Whatever the number of levels, digests included."""
    weights = np.random.default_rng(0).standard_normal((512, 1024)).astype(np.float32)
    elsa.pack({"w": weights}, tmp_path / "plain.safetensors", sparsities=[50])
    elsa.extract(tmp_path / "plain.safetensors", tmp_path / "w.safetensors", level="dense")
    out = tmp_path / "net.safetensors"
    levels = ",".join(f"{99.9 - 0.3 * t:.1f}" for t in range(255))
    words = ("pack", tmp_path / "w.safetensors", "--sparsities", levels, "-o", out)
    assert peak(RUN, *words) - interpreter <= BOUND
    assert peak(RUN, "verify", out) - interpreter <= BOUND
