"""The vectors and their manifest, as the conformance tests use them."""

import atexit
import functools
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors

ROOT = Path(__file__).resolve().parents[2]
SPEC = ROOT / "spec"
COMMITTED = SPEC / "vectors"
WORDS = {"F64": "<u8", "F32": "<u4", "F16": "<u2", "BF16": "<u2"}

Stored = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Vector:
    """One entry of a manifest, and where its file is."""

    root: Path
    entry: dict[str, Any]

    @property
    def path(self) -> Path:
        """The file."""
        return self.root / self.entry["file"]

    def __getitem__(self, key: str) -> Any:
        return self.entry[key]

    def __contains__(self, key: str) -> bool:
        return key in self.entry

    def beside(self, file: str) -> "Vector":
        """The vector that another entry describes."""
        return next(vector for vector in read_manifest(self.root) if vector["file"] == file)


def read_manifest(root: Path) -> list[Vector]:
    """All vectors below a directory."""
    manifest = json.loads((root / "manifest.json").read_text(encoding="utf-8"))
    return [Vector(root, entry) for entry in manifest["vectors"]]


@functools.cache
def all_vectors() -> list[Vector]:
    """The vectors in spec/vectors, and those only in the larger set that the same script makes."""
    directory = tempfile.TemporaryDirectory(prefix="elsa-vectors-")
    atexit.register(directory.cleanup)
    command = [sys.executable, str(SPEC / "make_vectors.py"), "--extended", directory.name]
    subprocess.run(command, check=True)
    committed = read_manifest(COMMITTED)
    names = {vector["file"] for vector in committed}
    return committed + [v for v in read_manifest(Path(directory.name)) if v["file"] not in names]


def each(
    verdict: str, kind: str, where: Callable[[Vector], bool] = lambda _: True
) -> pytest.MarkDecorator:
    """Run a test on each `vector` with this verdict and kind."""
    chosen = [v for v in all_vectors() if (v["verdict"], v["kind"]) == (verdict, kind) and where(v)]
    return pytest.mark.parametrize("vector", chosen, ids=[v["file"] for v in chosen])


def stored_tensors(path: Path) -> Stored:
    """Name → dtype, shape and data of a file or an index, by the safetensors library."""
    files = {path}
    if path.name.endswith(".index.json"):
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        files = {path.parent / file for file in weight_map.values()}
    return {name: t for file in files for name, t in safetensors.deserialize(file.read_bytes())}


def metadata(path: Path) -> dict[str, str]:
    """The metadata of a file whose header is valid."""
    raw = path.read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    found: dict[str, str] = header.get("__metadata__", {})
    return found


def level_bytes(stored: Stored, vector: Vector, level: int | str) -> dict[str, bytes]:
    """What a level has to be, computed with numpy alone (ELSA-R-034, ELSA-R-035, ELSA-R-057)."""
    expected = {}
    for name, tensor in stored.items():
        if name.startswith("__elsa__."):
            continue
        data = bytes(stored.get(f"__elsa__.{level}.{name}", tensor)["data"])
        if name in vector["counts"] and level != "dense":
            words = np.frombuffer(data, WORDS[tensor["dtype"]])
            counters = words & words.dtype.type(2 ** vector["bits"] - 1)
            data = np.where((counters > 0) & (counters <= level), words, 0).tobytes()
        expected[name] = data
    return expected


def as_bytes(loaded: dict[str, Any]) -> dict[str, bytes]:
    """Loaded arrays as the bytes they would be stored as."""
    return {name: np.ascontiguousarray(array).tobytes() for name, array in loaded.items()}


def levels_of(vector: Vector) -> list[int | str]:
    """The levels to compare: few of many."""
    few = sorted(
        {1, 2, vector["levels"] // 2, vector["levels"]} & {*range(1, vector["levels"] + 1)}
    )
    return [*few, "dense"]
