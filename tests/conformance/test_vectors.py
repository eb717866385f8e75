"""elsa_format on the vectors, and nothing but the manifest says what to expect."""

import io
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from vector_files import (
    COMMITTED,
    WORDS,
    Vector,
    as_bytes,
    each,
    level_bytes,
    levels_of,
    stored_tensors,
)

import elsa_format


def loadable(vector: Vector) -> bool:
    """Whether the manifest says what to expect, and numpy has all the dtypes (ELSA-R-024)."""
    return "counts" in vector and not vector["file"].endswith("sub_byte.safetensors")


@each("valid", "elsa")
def test_valid_file_passes(vector: Vector) -> None:
    elsa_format.verify(vector.path)
    with vector.path.open("rb") as stream:
        elsa_format.verify(stream)


@each("valid", "elsa", loadable)
def test_valid_file_gives_its_levels(vector: Vector) -> None:
    stored = stored_tensors(vector.path)
    with elsa_format.open(vector.path) as file:
        assert file.bits == vector["bits"]
        assert len(file.levels) == vector["levels"]
        assert {name: list(c) for name, c in file.nested.items()} == vector["counts"]
        for name, info in file.tensors.items():
            assert (info.dtype.name, list(info.shape)) == (
                stored[name]["dtype"],
                stored[name]["shape"],
            )
        for level in levels_of(vector):
            expected = level_bytes(stored, vector, level)
            assert as_bytes(file.load(level)) == expected
            assert as_bytes({name: file.tensor(name, level) for name in expected}) == expected


@each("valid", "elsa", loadable)
def test_level_streams_bit_for_bit(vector: Vector) -> None:
    """One byte a read, no seeking (ELSA-R-003)."""

    class OneByte(io.RawIOBase):
        def __init__(self, data: bytes) -> None:
            self.data = io.BytesIO(data)

        def readable(self) -> bool:
            return True

        def readinto(self, buffer: Any) -> int:
            piece = self.data.read(1)
            buffer[: len(piece)] = piece
            return len(piece)

    stored = stored_tensors(vector.path)
    level = vector["levels"]
    source = OneByte(vector.path.read_bytes())
    streamed = dict(elsa_format.stream(source, level=level))
    assert as_bytes(streamed) == level_bytes(stored, vector, level)


@each("valid", "elsa", lambda vector: loadable(vector) and "digests" in vector)
@pytest.mark.parametrize("layout", ["dense", "bitmask", "csr"])
def test_extracted_level_has_its_digest(vector: Vector, layout: str, tmp_path: Path) -> None:
    """Every layout decodes to the same bits and digest (ELSA-R-058, ELSA-R-059, ELSA-R-068)."""
    stored = stored_tensors(vector.path)
    for level, digest in vector["digests"].items():
        target = tmp_path / f"{level}.safetensors"
        elsa_format.extract(vector.path, target, level=int(level), layout=layout)
        expected = level_bytes(stored, vector, int(level))
        if layout == "dense":
            assert {n: bytes(t["data"]) for n, t in stored_tensors(target).items()} == expected
        loaded = elsa_format.load_level(target)
        assert as_bytes(loaded) == expected
        assert elsa_format.level_digest(loaded, vector["counts"]) == digest


def test_extraction_copies_what_numpy_cannot_hold(tmp_path: Path) -> None:
    """ELSA-R-024, ELSA-R-057."""
    source = COMMITTED / "valid" / "sub_byte.safetensors"
    shared = {n: t["data"] for n, t in stored_tensors(source).items() if n.startswith("shared")}
    for layout in ("dense", "bitmask", "csr"):
        elsa_format.extract(source, tmp_path / layout, level=1, layout=layout)
        found = {name: t["data"] for name, t in stored_tensors(tmp_path / layout).items()}
        assert shared.items() <= found.items()


def check_level(vector: Vector) -> None:
    """A level file, or the index of one, holds a level of its source."""
    source = vector.beside(vector["source"])
    expected = level_bytes(stored_tensors(source.path), source, vector["level"])
    loaded = elsa_format.load_level(vector.path)
    assert as_bytes(loaded) == expected
    assert (
        elsa_format.level_digest(loaded, source["counts"])
        == (vector["digests"][str(vector["level"])])
    )


@each("valid", "level", lambda vector: "source" in vector)
def test_valid_level_file_decodes(vector: Vector) -> None:
    check_level(vector)


@each("valid", "level", lambda vector: "source" not in vector)
def test_valid_shard_is_a_level_file(vector: Vector) -> None:
    """ELSA-R-099."""
    assert elsa_format.load_level(vector.path)


@each("valid", "level_index")
def test_valid_level_in_shards_decodes(vector: Vector) -> None:
    check_level(vector)


@each("valid", "plain")
def test_a_plain_checkpoint_loads(vector: Vector) -> None:
    """ELSA-R-064: a file with neither document."""
    stored = {name: bytes(t["data"]) for name, t in stored_tensors(vector.path).items()}
    assert as_bytes(elsa_format.load_level(vector.path)) == stored
    with pytest.raises(elsa_format.NotElsa):
        elsa_format.open(vector.path)


def check_message(error: pytest.ExceptionInfo[BaseException], vector: Vector) -> None:
    """The error of the manifest, no other, in one line that names the file (ELSA-R-078)."""
    assert type(error.value).__name__ == vector["error"]
    message = str(error.value)
    assert message.isprintable()
    assert vector.path.name.split(".")[0] in message


@each("invalid", "elsa")
def test_invalid_file_is_rejected(vector: Vector) -> None:
    expected = getattr(elsa_format, vector["error"])
    with pytest.raises(expected) as error:
        elsa_format.verify(vector.path)
    check_message(error, vector)
    if vector["checked_by"] == "reader":
        with pytest.raises(expected) as error:
            elsa_format.open(vector.path)
        check_message(error, vector)


def stops_extraction(vector: Vector) -> bool:
    """Whether an extractor has to see the error, or only a Validator."""
    return vector["checked_by"] == "reader" or vector["error"] == "ChecksumMismatch"


@each("invalid", "elsa", stops_extraction)
def test_extraction_of_invalid_file_leaves_nothing(vector: Vector, tmp_path: Path) -> None:
    """What a Reader sees, or a checksum, stops the extractor (ELSA-R-005, ELSA-R-062)."""
    expected = getattr(elsa_format, vector["error"])
    target = tmp_path / "out.safetensors"
    with pytest.raises(expected):
        elsa_format.extract(vector.path, target, level=1)
    assert list(tmp_path.iterdir()) == []


@each("invalid", "elsa")
def test_invalid_stream_is_rejected(vector: Vector) -> None:
    """A pipe shows missing and trailing bytes last, and the same error all the same."""
    with pytest.raises(getattr(elsa_format, vector["error"])) as error:
        elsa_format.verify(io.BytesIO(vector.path.read_bytes()))
    assert type(error.value).__name__ == vector["error"]


@each("invalid", "level")
def test_invalid_level_file_is_rejected(vector: Vector) -> None:
    with pytest.raises(getattr(elsa_format, vector["error"])) as error:
        elsa_format.load_level(vector.path)
    check_message(error, vector)


@each("invalid", "level_index")
def test_invalid_level_in_shards_is_rejected(vector: Vector) -> None:
    with pytest.raises(getattr(elsa_format, vector["error"])) as error:
        elsa_format.load_level(vector.path)
    assert type(error.value).__name__ == vector["error"]
    assert str(error.value).isprintable()


@each("invalid", "elsa", lambda vector: vector["error"] == "CountMismatch")
@pytest.mark.parametrize("layout", ["dense", "bitmask", "csr"])
def test_a_level_is_never_written_by_a_wrong_count(
    vector: Vector, layout: Any, tmp_path: Path
) -> None:
    """At the level whose count is wrong, which is one of two (ELSA-R-080)."""
    verdicts = []
    for level in (1, 2):
        for take in (
            lambda level=level: elsa_format.extract(
                vector.path, tmp_path / "x", level=level, layout=layout, force=True
            ),
            lambda level=level: elsa_format.open(vector.path).load(level, layout),
        ):
            try:
                take()
            except elsa_format.CountMismatch:
                verdicts.append(level)
    assert {verdicts.count(1), verdicts.count(2)} <= {0, 2}
    assert verdicts


ARRAYS = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}


def embed(dtype: str, tau: int, words: list[str], counters: list[int], rounding: Any) -> list[str]:
    """What elsa_format makes of words, in hex."""
    integers = [int(word, 16) for word in words]
    weights = np.array(integers, WORDS[dtype]).view(ARRAYS[dtype])
    steps = np.array(counters, np.uint8)
    result = elsa_format.embed_counters(weights, steps, tau, rounding=rounding)
    width = len(words[0])
    return [f"{word:0{width}x}" for word in result.view(WORDS[dtype]).tolist()]


@pytest.mark.parametrize("rounding", ["nearest", "overwrite"])
def test_embedding(rounding: str) -> None:
    """ELSA-R-037, ELSA-R-038, ELSA-R-039."""
    cases = json.loads((COMMITTED / "embed.json").read_text(encoding="utf-8"))
    column = cases["columns"].index(rounding)
    for group in cases["groups"]:
        words, counters = ([row[i] for row in group["cases"]] for i in (0, 1))
        found = embed(group["dtype"], group["tau"], words, counters, rounding)
        assert found == [row[column] for row in group["cases"]], (group["dtype"], group["tau"])
    for dtype, tau, word, counter, error in cases["refused"]:  # ELSA-R-040
        with pytest.raises(getattr(elsa_format, error)):
            embed(dtype, tau, [word], [counter], rounding)
