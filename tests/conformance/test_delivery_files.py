"""Delivery files: the package on the vectors, their prefixes and their damage."""

import hashlib
import io
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vector_files import COMMITTED, Vector, each

import elsa_format
from elsa_format import ElsaError, extract, verify

EXAMPLE = COMMITTED / "valid" / "delivery" / "example.ship.safetensors"


def error_of(action: Callable[[], object]) -> str | None:
    """The name of the error that an action raises; any other exception goes through."""
    try:
        action()
    except ElsaError as error:
        return type(error).__name__
    return None


def of_whole(vector: Vector) -> bool:
    """Whether an entry describes a file, rather than a shard that an index names."""
    return "ends" in vector


def prefix_of(file: elsa_format.File) -> Any:
    """What was read of a delivery file."""
    return file.network.prefix


def whole(source: Path | io.BytesIO) -> bytes:
    """The ELSA file back."""
    out = io.BytesIO()
    extract(source, out, restore=True)
    return out.getvalue()


@each("valid", "delivery", of_whole)
def test_whole_file_gives_its_source(vector: Vector) -> None:
    """ELSA-D-003, ELSA-D-004, ELSA-D-006."""
    assert hashlib.sha256(whole(vector.path)).hexdigest() == vector["whole"]
    report = verify(vector.path)
    assert (report.available, report.levels) == ("dense", vector["levels"])


def has_numpy_dtypes(vector: Vector) -> bool:
    """Whether numpy has arrays for all tensors."""
    return of_whole(vector) and vector.path.stem not in ("streams.ship", "sub_byte.ship")


@each("valid", "delivery", has_numpy_dtypes)
def test_each_level_from_its_own_bytes(vector: Vector) -> None:
    """By its digest, loaded at once and grown from level 1 in the same arrays (ELSA-D-040)."""
    raw, ends = vector.path.read_bytes(), vector["ends"]
    for level, wanted in list(vector.entry.get("digests", {}).items())[:4]:
        t = int(level)
        with elsa_format.open_delivery(io.BytesIO(raw[: ends[t + 1]])) as delivery:
            parts = sum(end <= ends[t + 1] for end in ends[2:])  # one may have no bytes
            assert len(delivery.available) == parts
            nested = delivery.profile.nested
            assert elsa_format.level_digest(delivery.load(t), nested) == wanted
            streamed = dict(delivery.stream(t))
            assert elsa_format.level_digest(streamed, nested) == wanted
            arrays = delivery.load(1)
            before = {name: array.ctypes.data for name, array in arrays.items()}
            for step in range(2, t + 1):
                assert delivery.upgrade(step) is arrays
            assert elsa_format.level_digest(arrays, nested) == wanted
            assert before == {name: array.ctypes.data for name, array in arrays.items()}
            if parts == t:
                above = t + 1 if t < vector["levels"] else "dense"
                assert error_of(lambda: delivery.load(above)) == "Incomplete"  # noqa: B023


@each("valid", "delivery", lambda vector: "writer" in vector)
def test_writer_gives_the_parts(vector: Vector, tmp_path: Path) -> None:
    """Two implementations give the same bytes (ELSA-D-001, ELSA-D-002)."""
    source, target = tmp_path / "source.safetensors", tmp_path / "again.ship.safetensors"
    source.write_bytes(whole(vector.path))
    elsa_format.ship(source, target, block=vector["block"])
    made, wanted = target.read_bytes(), vector.path.read_bytes()
    with (
        elsa_format.open_delivery(target) as one,
        elsa_format.open_delivery(vector.path) as other,
    ):
        starts = [prefix_of(file).document.ends[1] for file in (one, other)]
    assert made[starts[0] :] == wanted[starts[1] :]


@each("valid", "elsa")
def test_every_elsa_file_comes_back(vector: Vector, tmp_path: Path) -> None:
    """Canonical or not (ELSA-D-001, ELSA-D-004)."""
    target = tmp_path / "net.ship.safetensors"
    report = elsa_format.ship(vector.path, target)
    raw = vector.path.read_bytes()
    assert whole(target) == raw
    assert report.source == len(raw)
    assert report.sizes["dense"] == target.stat().st_size <= 1.005 * len(raw) + 2000
    for size in report.sizes.values():
        prefix = verify(io.BytesIO(target.read_bytes()[:size]))
        assert report.sizes[prefix.available] == size


@each("invalid", "elsa")
def test_no_invalid_file_is_shipped(vector: Vector, tmp_path: Path) -> None:
    """Refused with the error of ELSA §11, and nothing is left behind (ELSA-D-001)."""
    target = tmp_path / "net.ship.safetensors"
    assert error_of(lambda: elsa_format.ship(vector.path, target)) == vector["error"]
    assert not list(tmp_path.iterdir())


def read(path: Path, level: int | str | None) -> None:
    with elsa_format.open_delivery(path) as delivery:
        if level is not None:
            delivery.load(level)


@each("invalid", "delivery")
def test_invalid_file_is_rejected(vector: Vector) -> None:
    """On opening, on reading a level, or by a Validator (ELSA-D-043, ELSA-D-044)."""
    assert error_of(lambda: verify(vector.path)) == vector["error"]
    if vector["checked_by"] == "reader":
        assert error_of(lambda: read(vector.path, None)) == vector["error"]
    elif vector["checked_by"] == "level":
        assert error_of(lambda: read(vector.path, vector["level"])) == vector["error"]


def test_every_cut_of_a_file() -> None:
    """The complete parts load, and nothing else does (ELSA-D-040, ELSA-D-041)."""
    raw = EXAMPLE.read_bytes()
    with elsa_format.open_delivery(EXAMPLE) as delivery:
        ends = prefix_of(delivery).document.ends
        levels = {t: {n: a.copy() for n, a in delivery.load(t).items()} for t in (1, 2, "dense")}
    for length in range(len(raw) + 1):
        source = io.BytesIO(raw[:length])
        if length < ends[1]:
            expected = "Truncated" if length < ends[0] else "Incomplete"
            assert error_of(lambda: elsa_format.open_delivery(source)) == expected  # noqa: B023
            continue
        with elsa_format.open_delivery(source) as delivery:
            there = sum(end <= length for end in ends[2:])
            assert delivery.available == (1, 2, "dense")[:there]
            for part, (level, arrays) in enumerate(levels.items(), 1):
                if part > there:
                    assert error_of(lambda: delivery.load(level)) == "Incomplete"  # noqa: B023
                    continue
                found = delivery.load(level)
                assert all(np.array_equal(found[n], a) for n, a in arrays.items())
    longer = io.BytesIO(raw + b"\0")
    assert error_of(lambda: elsa_format.open_delivery(longer)) == "TrailingData"


def test_every_cut_of_a_pipe() -> None:
    """The same from a stream that cannot seek, of which no more is read than a level needs."""
    raw = EXAMPLE.read_bytes()
    with elsa_format.open_delivery(EXAMPLE) as delivery:
        ends = prefix_of(delivery).document.ends

    class Pipe(io.BytesIO):
        def seekable(self) -> bool:
            return False

    for length in range(ends[1], len(raw) + 1):
        with elsa_format.open_delivery(Pipe(raw[:length])) as delivery:
            assert (error_of(lambda: delivery.load(1)) is None) == (length >= ends[2])
    pipe = Pipe(raw)
    with elsa_format.open_delivery(pipe) as delivery:
        delivery.load(1)
        assert pipe.tell() == ends[2]
        delivery.upgrade(2)
        assert pipe.tell() == ends[3]
    longer = Pipe(raw + b"x")
    assert error_of(lambda: extract(longer, io.BytesIO(), restore=True)) == "TrailingData"


def test_every_byte_changed(tmp_path: Path) -> None:
    """All bytes of a file are under a checksum: no change of one goes unnoticed."""
    raw, path = EXAMPLE.read_bytes(), tmp_path / "changed"
    for at in range(len(raw)):
        changed = bytearray(raw)
        changed[at] ^= 1 << at % 8
        path.write_bytes(changed)
        assert error_of(lambda: verify(path)), at


@pytest.mark.parametrize("case", ["example", "choices", "gaps", "per_level"])
def test_payloads_changed_with_their_checksums(case: str) -> None:
    """Where the checksum is right, a payload is refused by name or gives some words."""
    import xxhash

    raw = (COMMITTED / "valid" / "delivery" / f"{case}.ship.safetensors").read_bytes()
    choose, verdicts = random.Random(1), Counter[str | None]()
    with elsa_format.open_delivery(io.BytesIO(raw)) as delivery:
        prefix = prefix_of(delivery)
        document, parts = prefix.document, prefix.parts
        seed = xxhash.xxh3_64_intdigest(prefix.head)
        indexes = [prefix.payloads(part) for part in range(1, parts + 1)]
    for part, payloads in enumerate(indexes, 1):
        for number in range(payloads.count):
            position, size = _payload(raw, document.ends[part], payloads.count, number)
            for _ in range(min(size, 25)):
                changed = bytearray(raw)
                changed[position + choose.randrange(size)] ^= 1 << choose.randrange(8)
                checksum = xxhash.xxh3_64_intdigest(changed[position : position + size], seed=seed)
                changed[position - 8 : position] = checksum.to_bytes(8, "little")
                source = io.BytesIO(bytes(changed))
                verdicts[error_of(lambda: verify(source))] += 1  # noqa: B023
    assert verdicts["InvalidDelivery"]
    assert set(verdicts) <= {
        *(None, "InvalidDelivery", "CountMismatch", "NonFinite"),
        *("ChecksumMismatch", "DigestMismatch"),
    }


def _payload(raw: bytes, start: int, count: int, number: int) -> tuple[int, int]:
    """Where a payload begins behind its checksum, and how long it is."""
    sizes = [int.from_bytes(raw[start + 3 * i :][:3], "little") for i in range(number + 1)]
    before = sum(size + 8 for size in sizes[:-1] if size)
    return start + 3 * count + before + 8, sizes[-1]


@each("valid", "delivery_index")
def test_vectors_of_shards(vector: Vector) -> None:
    """ELSA-D-042."""
    assert elsa_format.verify(vector.path).available == "dense"
    with elsa_format.open(vector.path) as file:
        for t in range(1, vector["levels"] + 1):
            digest = elsa_format.level_digest(file.load(t), file.nested)
            assert digest == vector["digests"][str(t)]


@each("invalid", "delivery_index")
def test_invalid_vectors_of_shards(vector: Vector) -> None:
    """ELSA-D-042."""
    with pytest.raises(elsa_format.ElsaError) as error:
        elsa_format.verify(vector.path)
    assert type(error.value).__name__ == vector["error"]
