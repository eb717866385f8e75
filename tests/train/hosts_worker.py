"""What test_hosts runs in two processes: runs that hosts can't share, and one that never comes."""

import json
import os
import sys
import time
from pathlib import Path

import jax
from click.testing import CliRunner
from conftest import TINY
from internals import _hosts, train

WORDS = ["digits", "--plot", "none", "--checkpoint-every", "1"]
WORDS += [
    word for key, value in TINY.items() for word in (f"--{key.replace('_', '-')}", str(value))
]


def main(folder, process, port):
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, process)
    (folder / f"host-{process}").mkdir()
    os.chdir(folder / f"host-{process}")  # no folder that both see, unless it is said
    shared = str(folder / "shared")
    cases = {
        "folder": ["-o", "run"],
        "settings": ["-o", shared, "--momentum", f"0.{process + 1}"],
        "data": ["-o", shared, "--dataset", "mnist" if process else "digits"],
    }
    found = {}
    for name, words in cases.items():
        said = CliRunner().invoke(train, [*WORDS, *words])
        found[name] = [said.exit_code, said.output]
    Path(f"../found-{process}.json").write_text(json.dumps(found))
    if process:
        time.sleep(60)  # never comes; process 0, which is lost, ends this one
    _hosts.LIMIT = 1.0
    train([*WORDS, "-o", shared])


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
