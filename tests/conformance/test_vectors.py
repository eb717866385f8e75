"""elsa_format on the vectors, and nothing but the manifest says what to expect."""

import hashlib
import io
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from vector_files import COMMITTED, WORDS, Vector, as_bytes, level_bytes, levels_of, stored_tensors

import elsa_format


def test_vectors_are_what_the_manifest_says(valid_vector: Vector) -> None:
    found = hashlib.sha256(valid_vector.path.read_bytes()).hexdigest()
    assert found == valid_vector["sha256"]


def test_valid_file_passes(valid_elsa: Vector) -> None:
    elsa_format.verify(valid_elsa.path)
    with valid_elsa.path.open("rb") as stream:
        elsa_format.verify(stream)


def test_valid_file_gives_its_levels(valid_elsa: Vector) -> None:
    if "counts" not in valid_elsa:
        pytest.skip("a shard that is beside a broken index")
    stored = stored_tensors(valid_elsa.path)
    with elsa_format.open(valid_elsa.path) as file:
        assert file.bits == valid_elsa["bits"]
        assert len(file.levels) == valid_elsa["levels"]
        assert {name: list(c) for name, c in file.nested.items()} == valid_elsa["counts"]
        for name, info in file.tensors.items():
            assert (info.dtype.name, list(info.shape)) == (
                stored[name]["dtype"],
                stored[name]["shape"],
            )
        for level in levels_of(valid_elsa):
            expected = level_bytes(stored, valid_elsa, level)
            assert as_bytes(file.load(level)) == expected
            assert as_bytes({name: file.tensor(name, level) for name in expected}) == expected


def test_level_streams_bit_for_bit(valid_elsa: Vector) -> None:
    """One byte a read, no seeking (ELSA-R-003)."""
    if "counts" not in valid_elsa:
        pytest.skip("a shard that is beside a broken index")

    class OneByte(io.RawIOBase):
        def __init__(self, data: bytes) -> None:
            self.data = io.BytesIO(data)

        def readable(self) -> bool:
            return True

        def readinto(self, buffer: Any) -> int:
            piece = self.data.read(1)
            buffer[: len(piece)] = piece
            return len(piece)

    stored = stored_tensors(valid_elsa.path)
    level = valid_elsa["levels"]
    source = OneByte(valid_elsa.path.read_bytes())
    streamed = dict(elsa_format.stream(source, level=level))
    assert as_bytes(streamed) == level_bytes(stored, valid_elsa, level)


@pytest.mark.parametrize("layout", ["dense", "bitmask", "csr"])
def test_extracted_level_has_its_digest(valid_elsa: Vector, layout: str, tmp_path: Path) -> None:
    """Every layout decodes to the same bits and digest (ELSA-R-058, ELSA-R-059, ELSA-R-068)."""
    if "digests" not in valid_elsa:
        pytest.skip("the digests of a shard are its network's")
    stored = stored_tensors(valid_elsa.path)
    for level, digest in valid_elsa["digests"].items():
        target = tmp_path / f"{level}.safetensors"
        elsa_format.extract(valid_elsa.path, target, level=int(level), layout=layout)
        expected = level_bytes(stored, valid_elsa, int(level))
        if layout == "dense":
            assert {n: bytes(t["data"]) for n, t in stored_tensors(target).items()} == expected
        loaded = elsa_format.load_level(target)
        assert as_bytes(loaded) == expected
        assert elsa_format.level_digest(loaded, valid_elsa["counts"]) == digest


def test_valid_level_file_decodes(valid_level: Vector) -> None:
    source = valid_level.beside(valid_level["source"])
    expected = level_bytes(stored_tensors(source.path), source, valid_level["level"])
    loaded = elsa_format.load_level(valid_level.path)
    assert as_bytes(loaded) == expected
    assert (
        elsa_format.level_digest(loaded, source["counts"])
        == (valid_level["digests"][str(valid_level["level"])])
    )


def check_message(error: pytest.ExceptionInfo[BaseException], vector: Vector) -> None:
    """The error of the manifest, no other, in one line that names the file (ELSA-R-078)."""
    assert type(error.value).__name__ == vector["error"]
    message = str(error.value)
    assert message.isprintable()
    assert vector.path.name.split(".")[0] in message


def test_invalid_file_is_rejected(invalid_elsa: Vector) -> None:
    expected = getattr(elsa_format, invalid_elsa["error"])
    with pytest.raises(expected) as error:
        elsa_format.verify(invalid_elsa.path)
    check_message(error, invalid_elsa)
    if invalid_elsa["checked_by"] == "reader":
        with pytest.raises(expected) as error:
            elsa_format.open(invalid_elsa.path)
        check_message(error, invalid_elsa)


def test_extraction_of_invalid_file_leaves_nothing(invalid_elsa: Vector, tmp_path: Path) -> None:
    """What a Reader sees, or a checksum, stops the extractor (ELSA-R-005, ELSA-R-062)."""
    if invalid_elsa["checked_by"] == "full" and invalid_elsa["error"] != "ChecksumMismatch":
        pytest.skip("for a Validator to find")
    expected = getattr(elsa_format, invalid_elsa["error"])
    target = tmp_path / "out.safetensors"
    with pytest.raises(expected):
        elsa_format.extract(invalid_elsa.path, target, level=1)
    assert list(tmp_path.iterdir()) == []


def test_invalid_stream_is_rejected(invalid_elsa: Vector) -> None:
    """A pipe shows missing and trailing bytes last, and the same error all the same."""
    with pytest.raises(getattr(elsa_format, invalid_elsa["error"])) as error:
        elsa_format.verify(io.BytesIO(invalid_elsa.path.read_bytes()))
    assert type(error.value).__name__ == invalid_elsa["error"]


def test_invalid_level_file_is_rejected(invalid_level: Vector) -> None:
    with pytest.raises(getattr(elsa_format, invalid_level["error"])) as error:
        elsa_format.load_level(invalid_level.path)
    check_message(error, invalid_level)


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
