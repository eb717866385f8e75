"""JavaScript refuses what Python refuses, by each of its ways to a level (ELSA-R-104)."""

import hashlib
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Judge

import elsa_format

sys.path.insert(0, str(ROOT / "tests" / "integration"))
sys.path.insert(0, str(ROOT / "tests" / "conformance"))

import test_what_is_checked as table
from vector_files import COMMITTED, read_manifest

LAYOUTS = ("dense", "bitmask", "csr")
UNCHECKED = [
    vector.path
    for vector in read_manifest(COMMITTED)
    if vector["kind"] == "elsa" and vector.entry.get("error") in ("NonFinite", "CounterOutOfRange")
]
"""What only a Validator looks for."""


def hashes(tensors: Any) -> dict[str, str]:
    """The hash of each tensor's bytes."""
    return {name: hashlib.sha256(array.tobytes()).hexdigest() for name, array in tensors.items()}


def read(judge: Judge, kind: str, path: Path, out: Path) -> dict[str, str]:
    """What each way to level 1 makes of a file."""
    which = "elsa" if kind in table.ELSA else "level" if kind in table.LEVELS else "delivery"
    expected = hashes(table.load(table.built() / "ours" / "ELSA file" / table.ONE, table.LEVEL))
    question = {"path": path, "kind": which, "level": table.LEVEL, "output": out}
    answers = {"load": judge.answer("load", **question)}
    if tensors := answers["load"].get("value"):
        assert {name: digest for name, (_, _, digest) in tensors.items()} == expected
    if which != "level" and path.suffix != ".json":
        answers["image"] = judge.answer("image", **question)
    if kind == "ELSA file":
        for layout in LAYOUTS:
            answers[layout] = judge.answer("extract", layout=layout, **question)
            if "error" not in answers[layout]:
                assert hashes(elsa_format.load_level(out)) == expected
    return {
        way: table.REFUSED if "error" in answer else table.RIGHT for way, answer in answers.items()
    }


@pytest.mark.parametrize("kind", table.KINDS)
def test_faults_are_refused_as_in_python(judge: Judge, kind: str, tmp_path: Path) -> None:
    """The table of SECURITY.md holds in JavaScript, too."""
    name = table.KINDS[kind][0]
    which = "elsa" if kind in table.ELSA else "level" if kind in table.LEVELS else "delivery"
    for fault, damage in table.FAULTS.items():
        expected = table.outcome(kind, fault, "load")
        if expected is None:
            continue
        folder = shutil.copytree(table.built() / "ours" / kind, tmp_path / fault)
        path = Path(folder) / name
        damage(path, table.built() / "theirs" / kind / name)
        found = read(judge, kind, path, tmp_path / "out.safetensors")
        assert set(found.values()) == {expected}, (fault, found)
        valid = "error" not in judge.answer("validate", path=path, kind=which)
        assert valid == (table.outcome(kind, fault, "verify") == "valid"), fault


@pytest.mark.parametrize("path", UNCHECKED, ids=lambda path: path.stem)
def test_sparse_extracts_check_what_others_do(judge: Judge, path: Path, tmp_path: Path) -> None:
    """What is Inf, or has a counter without a level, is no reason to refuse one layout alone."""
    question = {"path": path, "level": 1, "output": tmp_path / "out.safetensors"}
    expected = judge.answer("load", kind="elsa", **question).get("error")
    for layout in LAYOUTS:
        assert judge.answer("extract", layout=layout, **question).get("error") == expected, layout
