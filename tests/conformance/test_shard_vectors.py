"""Networks in several files with an index (ELSA-R-074 to ELSA-R-077, ELSA-R-095 to ELSA-R-102)."""

import os
import sys
from pathlib import Path

import pytest
from vector_files import (
    COMMITTED,
    ROOT,
    Vector,
    as_bytes,
    each,
    level_bytes,
    levels_of,
    metadata,
    stored_tensors,
)

import elsa_format

sys.path.insert(0, str(ROOT))

from spec import plain_elsa


@each("valid", "index")
def test_sharded_network_gives_its_levels(vector: Vector) -> None:
    elsa_format.verify(vector.path)
    stored = stored_tensors(vector.path)
    with elsa_format.open(vector.path) as file:
        assert {name: list(c) for name, c in file.nested.items()} == vector["counts"]
        for level in levels_of(vector):
            assert as_bytes(file.load(level)) == level_bytes(stored, vector, level)


@each("valid", "index")
def test_joined_metadata(vector: Vector, tmp_path: Path) -> None:
    """Of two shards the one with the lower number counts (ELSA-R-096)."""
    with elsa_format.open(vector.path) as file:
        assert file.metadata == vector["metadata"]
    elsa_format.extract(vector.path, tmp_path / "level", level=1)
    found = metadata(tmp_path / "level")
    assert {k: v for k, v in found.items() if k != "elsa_level"} == vector["metadata"]


def test_dense_metrics_are_those_of_the_first_shard() -> None:
    """ELSA-R-096."""
    with elsa_format.open(COMMITTED / "valid/shards_differ/model.safetensors.index.json") as file:
        assert file.profile.dense_metrics == {"accuracy": 1}


@each("invalid", "index")
def test_invalid_index_is_rejected(vector: Vector) -> None:
    expected = getattr(elsa_format, vector["error"])
    with pytest.raises(expected) as error:
        elsa_format.verify(vector.path)
    assert type(error.value).__name__ == vector["error"]
    assert str(error.value).isprintable()
    if vector["checked_by"] == "reader":
        with pytest.raises(expected):
            elsa_format.open(vector.path)


def test_an_index_may_be_too_long(tmp_path: Path) -> None:
    """ELSA-R-095; a vector of this size would be no small file."""
    index = tmp_path / "long.safetensors.index.json"
    index.write_bytes(b"{")
    os.truncate(index, 100_000_001)
    for read in (elsa_format.open, elsa_format.verify, elsa_format.load_level):
        with pytest.raises(elsa_format.InvalidIndex, match="100000000"):
            read(index)
    with pytest.raises(plain_elsa.Bad, match="InvalidIndex"):
        plain_elsa.read_index(index)


def test_shard_that_is_a_link_out_of_the_directory(tmp_path: Path) -> None:
    """ELSA-R-077; a vector cannot hold a symbolic link."""
    shards = COMMITTED / "valid" / "sharded"
    for path in shards.iterdir():
        (tmp_path / path.name).symlink_to(path)
    index = tmp_path / "copy.safetensors.index.json"
    index.write_bytes((shards / "model.safetensors.index.json").read_bytes())
    with pytest.raises(elsa_format.UnsafePath):
        elsa_format.open(index)
