"""Networks in several files with an index (ELSA-R-074 to ELSA-R-077)."""

from pathlib import Path

import pytest
from vector_files import COMMITTED, Vector, as_bytes, each, level_bytes, levels_of, stored_tensors

import elsa_format


@each("valid", "index")
def test_sharded_network_gives_its_levels(vector: Vector) -> None:
    elsa_format.verify(vector.path)
    stored = stored_tensors(*sorted(vector.path.parent.glob("model-*.safetensors")))
    with elsa_format.open(vector.path) as file:
        for level in levels_of(vector):
            assert as_bytes(file.load(level)) == level_bytes(stored, vector, level)


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


def test_shard_that_is_a_link_out_of_the_directory(tmp_path: Path) -> None:
    """ELSA-R-077; a vector cannot hold a symbolic link."""
    shards = COMMITTED / "valid" / "sharded"
    for path in shards.iterdir():
        (tmp_path / path.name).symlink_to(path)
    index = tmp_path / "copy.safetensors.index.json"
    index.write_bytes((shards / "model.safetensors.index.json").read_bytes())
    with pytest.raises(elsa_format.UnsafePath):
        elsa_format.open(index)
