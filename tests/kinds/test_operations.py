"""Whatever the kind of file, and wherever it is, an operation gives the same bits."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bits import same_bits

import elsa_format as elsa
from kinds.files import ELSA, KINDS, ONE, Kind
from kinds.operations import OPERATIONS, Operation, Work
from kinds.places import PLACES
from kinds.shelf import Shelf

CASES = [
    pytest.param(kind, place, operation, id=f"{kind}-{place}-{operation}")
    for kind in KINDS
    for place in PLACES
    for operation in OPERATIONS.values()
    if operation.reaches(kind, place)
]


@pytest.mark.parametrize(("kind", "place", "operation"), CASES)
def test_a_level_is_the_same(
    shelf: Shelf, tmp_path: Path, kind: Kind, place: str, operation: Operation
) -> None:
    levels = operation.levels(kind, shelf)
    for level in levels if place == "path" else levels[-1:]:
        work = Work(kind, shelf, tmp_path / str(level))
        work.folder.mkdir()
        with PLACES[place](shelf.path(kind)) as source:
            found = operation.run(source, level, work)
        assert found is None or same_bits(dict(found), shelf.network.level(level))


def ways(which: Callable[[Operation, Kind], object]) -> Any:
    """Every operation with every kind for which something holds."""
    return pytest.mark.parametrize(
        ("kind", "operation"),
        [
            pytest.param(kind, operation, id=f"{kind}-{operation}")
            for kind in KINDS
            for operation in OPERATIONS.values()
            if which(operation, kind)
        ],
    )


def refused(shelf: Shelf, folder: Path, kind: Kind, operation: Operation, level: Any) -> Exception:
    """How an operation refuses a level: with one line, and it leaves nothing."""
    with pytest.raises(elsa.ElsaError) as caught:
        operation.run(str(shelf.path(kind)), level, Work(kind, shelf, folder))
    assert os.listdir(folder) == []
    assert "\n" not in str(caught.value)
    return caught.value


def is_one(error: Exception, expected: Any, words: str) -> bool:
    """Whether an error is of a class, which commands do not tell, and says some words."""
    known = type(error) is elsa.ElsaError or isinstance(error, expected)
    return known and re.search(words, str(error)) is not None


@pytest.mark.parametrize("kind", KINDS, ids=repr)
def test_verify_says_what_is_available(shelf: Shelf, kind: Kind) -> None:
    report, available = elsa.verify(shelf.path(kind), jobs=2), shelf.available(kind)
    assert report.digests == len([level for level in available if level != "dense"])
    assert vars(report).get("available", available[-1]) == available[-1]


@ways(lambda operation, kind: operation.chooses and operation.takes(kind))
def test_other_levels_are_refused(
    shelf: Shelf, tmp_path: Path, kind: Kind, operation: Operation
) -> None:
    """Those that a file does not have, or not yet, and those that no file has."""
    for level in (*shelf.missing(kind), 9, "no such"):
        error = refused(shelf, tmp_path, kind, operation, level)
        if level == "dense" and not operation.dense and kind.group != "level":
            words = "the dense network has no (layout|levels)"
            assert is_one(error, elsa.NoSuchLevel, words)
            continue
        unknown = level in (9, "no such") and kind.group != "level"
        expected, words = ELSA.lacks if unknown else kind.lacks
        assert is_one(error, expected, words)


@ways(lambda operation, kind: not operation.takes(kind))
def test_other_kinds_are_refused(
    shelf: Shelf, tmp_path: Path, kind: Kind, operation: Operation
) -> None:
    """With what they are, or with what they are not."""
    error = refused(shelf, tmp_path, kind, operation, shelf.available(kind)[0])
    expected, words = operation.refusal
    assert is_one(error, expected, words)


@pytest.mark.parametrize("kind", KINDS, ids=repr)
def test_the_whole_needs_all_of_it(shelf: Shelf, tmp_path: Path, kind: Kind) -> None:
    for operation in OPERATIONS.values():
        if operation.takes(kind) and not operation.levels(kind, shelf):
            error = refused(shelf, tmp_path, kind, operation, 1)
            assert operation.whole
            assert isinstance(error, elsa.Incomplete)


@pytest.mark.parametrize("kind", KINDS, ids=repr)
def test_only_dense_networks_are_packed(shelf: Shelf, tmp_path: Path, kind: Kind) -> None:
    """Of level files, those that are as dense networks are."""
    out, source = tmp_path / ONE, shelf.path(kind)
    if kind.name.startswith("dense level"):
        assert elsa.pack(source, out, sparsities=[99]).profile.levels
        return
    error, words = {
        "ELSA": (elsa.AlreadyPacked, "is an ELSA file already"),
        "level": (elsa.FormatError, "elsa_format.extract|make it dense"),
        "delivery": (elsa.InvalidLayout, "is a delivery file"),
    }[kind.group]
    with pytest.raises(error, match=words):
        elsa.pack(source, out, sparsities=[99])
    assert os.listdir(tmp_path) == []
