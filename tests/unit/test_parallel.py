"""Threads, and processes that are forked while they exist."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import elsa_format as elsa

FORK = """
import os, signal, sys
import elsa_format as elsa
from elsa_format import _parallel, _reader

_parallel.CORES, _reader.PARALLEL_FROM = 2, 0

def use():
    with elsa.open(sys.argv[1]) as file:
        file.load(1)
    elsa.verify(sys.argv[1])

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
