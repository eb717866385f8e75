"""Delivery files are written and read in memory that does not grow with them (ELSA-D-005)."""

import sys
from pathlib import Path

import numpy as np
import pytest
from test_memory import BOUND, PEAK, RUN, make, peak

import elsa_format as elsa

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
SIZE = 96 << 20


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An ELSA file of 96 MiB."""
    dense = make(tmp_path_factory.mktemp("net") / "dense.safetensors", SIZE)
    path = dense.with_name("net.safetensors")
    elsa.pack(dense, path, sparsities=[95, 90, 80])
    return path


def test_ship_and_whole(net: Path) -> None:
    interpreter = peak(PEAK)
    shipped = net.with_name("net.ship.safetensors")
    assert peak(RUN, "ship", net, "-o", shipped, "-q") - interpreter <= BOUND
    script = f"""
import sys, elsa_format
elsa_format.extract(sys.argv[1], sys.argv[2], restore=True)
{PEAK}
"""
    back = net.with_name("back.safetensors")
    assert peak(script, shipped, back) - interpreter <= BOUND
    assert back.read_bytes() == net.read_bytes()
    fetched = net.with_name("device.ship.safetensors")
    words = ("fetch", shipped, "-o", fetched, "--level", "dense", "-q")
    assert peak(RUN, *words) - interpreter <= BOUND
    verify = f"""
import sys
from elsa_format import verify
assert verify(sys.argv[1]).digests == 3
{PEAK}
"""
    assert peak(verify, fetched) - interpreter <= BOUND


def test_a_bomb(tmp_path: Path) -> None:
    """Zeros, which take few bytes: they are read in blocks, whatever they become."""
    source, shipped = tmp_path / "net.safetensors", tmp_path / "net.ship.safetensors"
    zeros = {"w": np.zeros(40 << 20, np.float32), "v": np.zeros(40 << 20, np.uint8)}
    elsa.write(source, zeros, levels=[elsa.LevelSpec("1")], nested=["w"], digests=False)
    elsa.ship(source, shipped)
    assert shipped.stat().st_size < source.stat().st_size / 16
    script = f"""
import io, sys, elsa_format
class Nowhere(io.RawIOBase):
    def writable(self): return True
    def write(self, data): return len(data)
elsa_format.extract(sys.argv[1], Nowhere(), restore=True)
{PEAK}
"""
    assert peak(script, shipped) - peak(PEAK) <= BOUND
