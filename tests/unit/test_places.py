"""Where a tensor is stored as it is, for who points or maps there."""

import io
from pathlib import Path

import numpy as np
import pytest

import elsa_format
from elsa_format import InvalidOption
from elsa_format.plugins import open_network

RNG = np.random.default_rng(4)
ARRAYS = {
    "a.weight": RNG.standard_normal((40, 30)).astype(np.float32),
    "b.weight": RNG.standard_normal((20, 40)).astype(np.float32),
    "bias": RNG.standard_normal(20).astype(np.float32),
}


@pytest.fixture
def elsa(tmp_path: Path) -> Path:
    elsa_format.pack(ARRAYS, tmp_path / "net.safetensors", sparsities=[90, 50])
    return tmp_path / "net.safetensors"


def changed(elsa: Path, kind: str) -> Path:
    """The same network, or a level of it, as another kind of file."""
    out = elsa.with_name("out.safetensors")
    if kind == "file":
        return elsa
    if kind == "shards":
        index = elsa.with_name("model.safetensors.index.json")
        elsa_format.pack(ARRAYS, index, sparsities=[90, 50], max_shard_size=4000)
        return index
    if kind == "delivery":
        elsa_format.ship(elsa, out)
    else:
        elsa_format.extract(elsa, out, level=1, layout=kind)
    return out


@pytest.mark.parametrize("kind", ["file", "shards", "dense", "bitmask", "csr"])
def test_stored_tensors_are_where_they_are_said_to_be(elsa: Path, kind: str) -> None:
    path = changed(elsa, kind)
    level = "dense" if kind in ("file", "shards") else 1
    with open_network(path) as network, elsa_format.open(path) as file:
        for name, info in network.tensors.items():
            if kind in ("bitmask", "csr") and name != "bias":
                continue
            expected = np.asarray(file.tensor(name, level)).tobytes()
            holder, start = network.place(name)
            assert Path(holder).read_bytes()[start : start + info.nbytes] == expected
            mapped = network.mapped(name)
            assert mapped is not None
            assert mapped.tobytes() == expected


@pytest.mark.parametrize("kind", ["delivery", "bitmask", "csr"])
def test_tensors_in_another_form_have_no_place(elsa: Path, kind: str) -> None:
    with open_network(changed(elsa, kind)) as network:
        assert network.mapped("a.weight") is None
        with pytest.raises(InvalidOption, match="elsa-extract"):
            network.place("a.weight")


def test_what_is_mapped_is_a_copy_that_outlives_the_file(elsa: Path) -> None:
    before = elsa.read_bytes()
    with open_network(elsa) as network:
        mapped = network.mapped("bias")
    assert mapped is not None
    assert mapped.tobytes() == ARRAYS["bias"].tobytes()
    mapped[:] = 0
    assert elsa.read_bytes() == before


def test_a_stream_is_not_mapped(elsa: Path) -> None:
    with open_network(io.BytesIO(elsa.read_bytes())) as network:
        assert network.mapped("bias") is None
