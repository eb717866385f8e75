"""Files with two faults: Python, JavaScript and the plain implementation name the same one."""

import itertools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Judge

import elsa_format

sys.path.insert(0, str(ROOT))

from spec import plain_delivery, plain_elsa
from spec.cases import delivery_order
from spec.cases.build import dump_sorted, elsa_file
from spec.cases.delivery import Draft
from spec.cases.shards import make_index, make_shards, shard_name


def error_of(action: Callable[[], object]) -> str | None:
    """The error that Python names."""
    try:
        action()
    except plain_elsa.Bad as bad:
        return bad.error
    except elsa_format.ElsaError as error:
        return type(error).__name__
    return None


def test_the_first_of_two_faults_is_told(judge: Judge, tmp_path: Path) -> None:
    """ELSA-D-044, for every two faults that a file can have."""
    path = tmp_path / "net.ship.safetensors"
    for first, second, error in delivery_order.pairs():
        raw = delivery_order.build(first, second)
        path.write_bytes(raw)
        found = {
            "plain": error_of(lambda raw=raw: plain_delivery.validate(raw)),  # type: ignore[misc]
            "Python": error_of(lambda: elsa_format.verify(path)),
            "JavaScript": judge.answer("validate", bytes=raw, kind="delivery").get("error"),
        }
        assert set(found.values()) == {error}, (first, second, found)


def write_shards(folder: Path, shards: Sequence[Any], files: Sequence[bytes]) -> Path:
    """Delivery files and their index."""
    folder.mkdir()
    names = {shard_name(i): f"{i}.ship.safetensors" for i in (1, 2)}
    for name, raw in zip(names.values(), files, strict=True):
        (folder / name).write_bytes(raw)
    index = make_index(shards)
    index["weight_map"] = {key: names[file] for key, file in index["weight_map"].items()}
    path = folder / "net.ship.safetensors.index.json"
    path.write_text(dump_sorted(index), "utf-8")
    return path


def ends_of(raw: bytes) -> list[int]:
    """Where the head and the parts of a delivery file end."""
    ends = plain_delivery.Delivery(raw).ends
    return [len(raw) - ends[-1] + end for end in ends]


@pytest.mark.parametrize("fault", ["", "sum", "counts"])
def test_a_shard_that_has_more_is_checked(judge: Judge, tmp_path: Path, fault: str) -> None:
    """ELSA-D-006: all parts that are complete, also where another shard has fewer."""
    shards = make_shards()
    if fault == "sum":
        shards[0][1]["checksums"]["a"] = delivery_order.WRONG
    if fault == "counts":
        shards[0][1]["nested"]["a"][1] += 1
        for _, profile in shards:
            profile["levels"][1]["nonzero"] += 1
    whole = [Draft(elsa_file(*shard)).build() for shard in shards]
    for number, parts in enumerate(itertools.product(range(4), repeat=2)):
        files = [raw[: ends_of(raw)[part]] for raw, part in zip(whole, parts, strict=True)]
        path = write_shards(tmp_path / f"{number}", shards, files)
        error = None  # digests of levels that both have are compared, and are right
        if (fault == "sum" and parts[0] == 3) or (fault == "counts" and parts[0] >= 2):
            error = "ChecksumMismatch" if fault == "sum" else "CountMismatch"
        found = {
            "plain": error_of(lambda path=path: plain_delivery.validate_index(path)),  # type: ignore[misc]
            "Python": error_of(lambda path=path: elsa_format.verify(path)),  # type: ignore[misc]
            "JavaScript": judge.answer("validate", path=path, kind="delivery").get("error"),
        }
        assert set(found.values()) == {error}, (parts, found)


def test_a_missing_level_comes_before_a_broken_payload(judge: Judge, tmp_path: Path) -> None:
    """ELSA-D-044, lines 9 and 10, in a file and over shards."""
    raw = delivery_order.build("payload")
    path = tmp_path / "net.ship.safetensors"
    path.write_bytes(raw[: ends_of(raw)[1]])
    for level, error in ((1, "InvalidDelivery"), (2, "Incomplete")):
        with elsa_format.open_delivery(path) as file:
            assert error_of(lambda level=level: file.load(level)) == error  # type: ignore[misc]
        assert judge.answer("load", kind="delivery", path=path, level=level)["error"] == error
    shards = make_shards()
    drafts = [Draft(elsa_file(*shard)) for shard in shards]
    drafts[0].payloads[0][-1] += b"\0"
    first, second = (draft.build() for draft in drafts)
    path = write_shards(tmp_path / "shards", shards, [first, second[: ends_of(second)[1]]])
    for level, error in ((1, "InvalidDelivery"), (2, "Incomplete")):
        with elsa_format.open(path) as network:
            assert error_of(lambda level=level: network.load(level)) == error  # type: ignore[misc]
        assert judge.answer("load", kind="delivery", path=path, level=level)["error"] == error
