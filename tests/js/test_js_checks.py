"""JavaScript refuses what Python refuses, by each of its ways to a level (ELSA-R-104)."""

import hashlib
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Judge
from kinds import networks
from kinds.faults import FAULTS
from kinds.files import ELSA, KINDS, Kind
from kinds.operations import OPERATIONS
from kinds.shelf import Shelf
from kinds.test_faults import REFUSED, RIGHT, VALID, copied, outcome

import elsa_format

sys.path.insert(0, str(ROOT / "tests" / "conformance"))

from vector_files import COMMITTED, read_manifest

LAYOUT_NAMES = ("dense", "bitmask", "csr")
LEVEL = 1
UNCHECKED = [
    vector.path
    for vector in read_manifest(COMMITTED)
    if vector["kind"] == "elsa" and vector.entry.get("error") in ("NonFinite", "CounterOutOfRange")
]
"""What only a Validator looks for."""


@pytest.fixture(scope="module")
def shelves(tmp_path_factory: pytest.TempPathFactory) -> list[Shelf]:
    """A network in every kind of file, and another like it."""
    folders = [tmp_path_factory.mktemp(str(seed)) for seed in (0, 1)]
    return [Shelf(networks.plain(seed), folder) for seed, folder in enumerate(folders)]


def hashes(tensors: Any) -> dict[str, str]:
    """The hash of each tensor's bytes."""
    return {name: hashlib.sha256(array.tobytes()).hexdigest() for name, array in tensors.items()}


def read(judge: Judge, kind: Kind, path: Path, out: Path) -> dict[str, str]:
    """What each way to level 1 makes of a file."""
    expected = hashes(networks.plain().level(LEVEL))
    question = {"path": path, "kind": kind.group.lower(), "level": LEVEL, "output": out}
    answers = {"load": judge.answer("load", **question)}
    if tensors := answers["load"].get("value"):
        assert {name: digest for name, (_, _, digest) in tensors.items()} == expected
    if kind.group != "level" and not kind.sharded:
        answers["image"] = judge.answer("image", **question)
    if kind is ELSA:
        for layout in LAYOUT_NAMES:
            answers[layout] = judge.answer("extract", layout=layout, **question)
            if "error" not in answers[layout]:
                assert hashes(elsa_format.load_level(out)) == expected
    return {way: REFUSED if "error" in answer else RIGHT for way, answer in answers.items()}


@pytest.mark.parametrize("kind", KINDS, ids=repr)
def test_faults_are_refused_as_in_python(
    judge: Judge, kind: Kind, shelves: list[Shelf], tmp_path: Path
) -> None:
    """The table of SECURITY.md holds in JavaScript, too."""
    ours, theirs = shelves
    for fault, spoil in FAULTS.items():
        with copied(ours, kind) as path:
            if not spoil(path, theirs.path(kind)):
                continue
            expected = outcome(ours, kind, "path", OPERATIONS["load"], path)
            found = read(judge, kind, path, tmp_path / "out.safetensors")
            assert set(found.values()) == {expected}, (fault, found)
            valid = "error" not in judge.answer("validate", path=path, kind=kind.group.lower())
            verified = outcome(ours, kind, "path", OPERATIONS["verify"], path)
            assert valid == (verified == VALID), fault


@pytest.mark.parametrize("path", UNCHECKED, ids=lambda path: path.stem)
def test_sparse_extracts_check_what_others_do(judge: Judge, path: Path, tmp_path: Path) -> None:
    """What is Inf, or has a counter without a level, is no reason to refuse one layout alone."""
    question = {"path": path, "level": 1, "output": tmp_path / "out.safetensors"}
    expected = judge.answer("load", kind="elsa", **question).get("error")
    for layout in LAYOUT_NAMES:
        assert judge.answer("extract", layout=layout, **question).get("error") == expected, layout
