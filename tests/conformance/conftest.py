"""Runs the tests on the vectors in spec/vectors, and on the larger set the same script makes."""

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from vector_files import COMMITTED, SPEC, Vector, read_manifest

VECTORS = pytest.StashKey[list[Vector]]()


def pytest_configure(config: pytest.Config) -> None:
    """Make the larger set; it is a second's work."""
    directory = tempfile.TemporaryDirectory(prefix="elsa-vectors-")
    config.add_cleanup(directory.cleanup)
    command = [sys.executable, str(SPEC / "make_vectors.py"), "--extended", directory.name]
    subprocess.run(command, check=True)
    committed = read_manifest(COMMITTED)
    names = {vector["file"] for vector in committed}
    extended = read_manifest(Path(directory.name))
    config.stash[VECTORS] = committed + [v for v in extended if v["file"] not in names]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that asks for `valid_elsa`, `invalid_level`, … runs once for each such vector."""
    for name in metafunc.fixturenames:
        verdict, _, kind = name.partition("_")
        if verdict in ("valid", "invalid"):
            chosen = [
                vector
                for vector in metafunc.config.stash[VECTORS]
                if vector["verdict"] == verdict and kind in (vector["kind"], "vector")
            ]
            metafunc.parametrize(name, chosen, ids=[vector["file"] for vector in chosen])
