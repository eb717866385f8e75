"""Networks in several files with an index (ELSA-R-074 to ELSA-R-077)."""

from pathlib import Path

import pytest
from vector_files import COMMITTED, Vector, as_bytes, level_bytes, levels_of, stored_tensors

import elsa_format


def test_sharded_network_gives_its_levels(valid_index: Vector) -> None:
    elsa_format.verify(valid_index.path)
    stored = stored_tensors(*sorted(valid_index.path.parent.glob("model-*.safetensors")))
    with elsa_format.open(valid_index.path) as file:
        for level in levels_of(valid_index):
            assert as_bytes(file.load(level)) == level_bytes(stored, valid_index, level)


def test_invalid_index_is_rejected(invalid_index: Vector) -> None:
    expected = getattr(elsa_format, invalid_index["error"])
    with pytest.raises(expected) as error:
        elsa_format.verify(invalid_index.path)
    assert type(error.value).__name__ == invalid_index["error"]
    assert str(error.value).isprintable()
    if invalid_index["checked_by"] == "reader":
        with pytest.raises(expected):
            elsa_format.open(invalid_index.path)


def test_shard_that_is_a_link_out_of_the_directory(tmp_path: Path) -> None:
    """ELSA-R-077; a vector cannot hold a symbolic link."""
    shards = COMMITTED / "valid" / "sharded"
    for path in shards.iterdir():
        (tmp_path / path.name).symlink_to(path)
    index = tmp_path / "copy.safetensors.index.json"
    index.write_bytes((shards / "model.safetensors.index.json").read_bytes())
    with pytest.raises(elsa_format.UnsafePath):
        elsa_format.open(index)
