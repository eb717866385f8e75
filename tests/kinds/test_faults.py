"""Every kind of file × every fault × every operation: refused, or the right bits (ELSA-R-104)."""

import contextlib
import io
import os
import random
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from bits import same_bits

import elsa_format as elsa
from kinds.faults import FAULTS, files, flip, flip_weight, header
from kinds.files import KINDS, ONE, Kind
from kinds.operations import EVERY, OPERATIONS, Operation, Work
from kinds.places import PLACES, Pipe
from kinds.shelf import Shelf
from kinds.test_operations import is_one

SECURITY = Path(__file__).resolve().parents[2] / "SECURITY.md"
REFUSED, RIGHT, VALID = "refused", "right bits", "valid"
Outcomes = dict[Operation, str]

each_kind = pytest.mark.parametrize("kind", KINDS, ids=repr)


@contextlib.contextmanager
def copied(shelf: Shelf, kind: Kind) -> Iterator[Path]:
    """A kind of file, to spoil; what reads it does not change it."""
    with tempfile.TemporaryDirectory() as folder:
        path = shelf.path(kind)
        yield Path(shutil.copytree(path.parent, Path(folder) / "net")) / path.name


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.parent.iterdir()}


def readers(kind: Kind, shelf: Shelf) -> list[Operation]:
    """The operations that read data of a kind of file."""
    return [
        operation
        for operation in OPERATIONS.values()
        if operation.takes(kind) and operation.levels(kind, shelf) and operation.reads
    ]


def outcome(shelf: Shelf, kind: Kind, place: str, operation: Operation, path: Path) -> str:
    """What an operation makes of a spoiled file: a level, or a refusal that leaves nothing."""
    level = shelf.available(kind)[0]
    with tempfile.TemporaryDirectory() as folder, PLACES[place](path) as source:
        try:
            found = operation.run(source, level, Work(kind, shelf, Path(folder)))
        except elsa.ElsaError:
            assert operation.grows or os.listdir(folder) == []
            return REFUSED
    if found is None:
        return VALID
    assert same_bits(dict(found), shelf.network.level(level)), (kind, operation)
    return RIGHT


def outcomes(shelf: Shelf, kind: Kind, path: Path) -> Outcomes:
    """What all operations that read a spoiled file make of it."""
    before = contents(path)
    found = {
        operation: outcome(shelf, kind, "path", operation, path)
        for operation in readers(kind, shelf)
    }
    assert contents(path) == before
    return found


def agree(found: Outcomes) -> str:
    """What all operations that read no more than a level make of it.

    Those that read more refuse what these refuse; what they alone read, they may refuse.
    """
    reading = {it for operation, it in found.items() if not operation.all}
    assert len(reading) == 1, found
    if reading == {REFUSED}:
        assert RIGHT not in found.values()
    return reading.pop()


@each_kind
@pytest.mark.parametrize("fault", FAULTS)
def test_what_one_operation_refuses_all_refuse(
    plain: Shelf, other: Shelf, kind: Kind, fault: str
) -> None:
    """Only what a level does not need may be spoiled, and then its bits are right.

    SECURITY.md says which it is.
    """
    said = told().get((fault, kind.name))
    with copied(plain, kind) as path:
        before = contents(path)
        if not FAULTS[fault](path, other.path(kind)):
            assert said is None
            return
        assert contents(path) != before
        found = outcomes(plain, kind, path)
        reading = agree(found)
        assert reading == REFUSED or kind.group == "delivery"
        if any(kind.name in group for group in GROUPS.values()):
            assert said == (reading, found[OPERATIONS["verify"]])


@each_kind
@pytest.mark.parametrize("place", PLACES)
def test_a_flipped_bit_is_refused(plain: Shelf, kind: Kind, place: str) -> None:
    with copied(plain, kind) as path:
        assert flip_weight(path, path)
        for operation in readers(kind, plain):
            if operation.reaches(kind, place):
                assert outcome(plain, kind, place, operation, path) == REFUSED, operation


@each_kind
@pytest.mark.parametrize("seed", range(3))
def test_a_bit_flipped_anywhere(plain: Shelf, kind: Kind, seed: int) -> None:
    """In headers, documents, padding or data: all refuse it, or all give the right bits."""
    rng = random.Random(seed)
    with copied(plain, kind) as path:
        file = rng.choice(files(path))
        flip(file, rng.randrange(file.stat().st_size), rng.randrange(8))
        if agree(outcomes(plain, kind, path)) == REFUSED:
            assert outcome(plain, kind, "path", OPERATIONS["verify"], path) == REFUSED


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.sharded], ids=repr)
def test_any_flipped_or_missing_byte_is_noticed(tiny: Shelf, kind: Kind) -> None:
    """Even of what can be read but once."""
    content = tiny.path(kind).read_bytes()
    start, _ = header(tiny.path(kind))
    level = tiny.available(kind)[0]
    reads: list[Callable[[Pipe], object]] = [
        elsa.verify,
        lambda pipe: dict(elsa.stream(pipe, level=level)),
        lambda pipe: elsa.extract(pipe, io.BytesIO(), level=level),
    ]
    reads += [elsa.load_level] * (kind.group == "level")
    needed = len(content)
    if kind.group == "delivery":
        with elsa.open_delivery(tiny.path(kind)) as delivery:
            needed = delivery.downloads[level]
    for at in range(start, len(content)):
        spoiled = bytearray(content)
        spoiled[at] ^= 1 << (at % 8)
        for read in reads:
            if at < needed or read is elsa.verify:
                with pytest.raises(elsa.FormatError, match="<stream>"):
                    read(Pipe(bytes(spoiled)))
            else:
                found = read(Pipe(bytes(spoiled)))
                assert not isinstance(found, dict) or same_bits(found, tiny.network.level(level))
    if kind.group != "delivery":  # whose first bytes are a file, too
        for end in range(start, len(content)):
            with pytest.raises(elsa.Truncated):
                elsa.verify(Pipe(content[:end]))


DOCUMENTS = {"ELSA": b'"elsa"', "level": b'"elsa_level"', "delivery": b'"elsa_delivery"'}


@pytest.mark.parametrize(
    "kind",
    [k for k in KINDS if not k.sharded and k.name != "dense level file"],
    ids=repr,
)
def test_a_lost_document_is_refused(plain: Shelf, tmp_path: Path, kind: Kind) -> None:
    """With one bit of its key changed, what the document described must not pass for tensors."""
    path, out, key = tmp_path / ONE, tmp_path / "out.safetensors", DOCUMENTS[kind.group]
    content = plain.path(kind).read_bytes()
    assert content.count(key) == 1
    path.write_bytes(content.replace(key, key[:-2] + bytes([key[-2] ^ 1]) + b'"'))
    level, work = plain.available(kind)[0], Work(kind, plain, tmp_path / "none")
    routes: list[Callable[[], object]] = [
        *(
            lambda operation=operation: operation.run(str(path), level, work)
            for operation in OPERATIONS.values()
            if operation.groups == EVERY or operation.name in ("load_level", "ship")
        ),
        lambda: elsa.load_level(io.BytesIO(path.read_bytes())),
        lambda: elsa.load_level(path, verify=False),
        lambda: elsa.pack(path, out, sparsities=[90]),
        lambda: elsa.pack({"w": np.eye(3)}, out, levels=[path]),
    ]
    for route in routes:
        with pytest.raises(elsa.ElsaError) as caught:
            route()
        assert is_one(caught.value, elsa.NotElsa, "reserved name|profile"), caught.value
    assert os.listdir(tmp_path) == [ONE]


GROUPS = {
    "ELSA files": [kind.name for kind in KINDS if kind.group == "ELSA"],
    "level files": [kind.name for kind in KINDS if kind.group == "level"],
    "delivery files": ["delivery file", "delivery prefix", "delivery shards"],
    "shards": [kind.name for kind in KINDS if kind.sharded and kind.name[0] != "u"],
}
"""Names of kinds in the table; the delivery files that are cut at other places are not in it."""

ROW = re.compile(r"\| ([^|]+) \| ([^|]+) \| (refused|right bits) \| (refused|valid) \|")


def told() -> dict[tuple[str, str], tuple[str, str]]:
    """What SECURITY.md's table says of a fault and a kind: what reading does, and verify."""
    elsa_files, levels, delivered, _ = GROUPS.values()
    groups = GROUPS | {"every kind": [*elsa_files, *levels, *delivered]}
    return {
        (fault, kind): (reading, verified)
        for fault, names, reading, verified in ROW.findall(SECURITY.read_text())
        for name in names.split(", ")
        for kind in groups.get(name, [name])
    }
