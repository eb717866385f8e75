"""What the specification asks of programs rather than of files."""

import io
import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from vector_files import COMMITTED, ROOT, Vector, each, metadata, stored_tensors

import elsa_format

NETWORK = COMMITTED / "valid" / "per_level.safetensors"


def rewrite(path: Path, source: Path = NETWORK) -> None:
    """Write the network of a vector anew."""
    with elsa_format.open(source) as file:
        levels = [
            elsa_format.LevelSpec(
                level.name, level.target, level.pattern, level.metrics, level.errors
            )
            for level in file.levels
        ]
        loaded = [file.load(t) for t in range(1, len(levels) + 1)]
        elsa_format.write(
            path,
            file.load("dense"),
            bits=file.bits,
            levels=levels,
            nested=file.nested,
            per_level={name: [level[name] for level in loaded] for name in file.per_level},
            metadata=dict(file.metadata),
            dense_metrics=file.profile.dense_metrics,
            dense_errors=file.profile.dense_errors,
            metrics=file.profile.metrics,
        )


def written(vector: Vector) -> bool:
    """Whether these are the bytes that every Writer has to give."""
    return "written" in vector


@each("valid", "elsa", lambda vector: written(vector) and "digests" in vector)
def test_writer_gives_the_vector(vector: Vector, tmp_path: Path) -> None:
    """Two implementations write the same bytes (ELSA-R-028 to ELSA-R-031, ELSA-R-084 to -087)."""
    rewrite(tmp_path / "first.safetensors", vector.path)
    rewrite(tmp_path / "second.safetensors", vector.path)
    first = (tmp_path / "first.safetensors").read_bytes()
    assert first == (tmp_path / "second.safetensors").read_bytes()
    assert first == vector.path.read_bytes()


@each("valid", "index", written)
def test_writer_gives_the_shards(vector: Vector, tmp_path: Path) -> None:
    """ELSA-R-084 and ELSA-R-098 in shards."""
    document = json.loads(vector.path.read_text(encoding="utf-8"))
    with elsa_format.open(vector.path) as file:
        dense, levels = file.load("dense"), [file.load(t) for t in (1, 2)]
        names, nested, varying = [level.name for level in file.levels], file.nested, file.per_level
    plain = tmp_path / "plain.safetensors.index.json"
    homes = {name: f"{document['weight_map'][name]}.plain" for name in dense}
    plain.write_text(json.dumps({"weight_map": homes}))
    for home in set(homes.values()):
        save_file({n: a for n, a in dense.items() if homes[n] == home}, tmp_path / home)
    target = tmp_path / vector.path.name
    elsa_format.pack(plain, target, levels=levels, names=names, include=nested, per_level=varying)
    for file_name in {vector.path.name, *document["weight_map"].values()}:
        assert (tmp_path / file_name).read_bytes() == (vector.path.parent / file_name).read_bytes()


@each("valid", "level", lambda vector: written(vector) and "source" in vector)
def test_extractor_gives_the_vector(vector: Vector, tmp_path: Path) -> None:
    """ELSA-R-094 and ELSA-R-084 to ELSA-R-087, from a file and from a pipe."""
    source, target = vector.beside(vector["source"]).path, tmp_path / "level.safetensors"
    options: Any = {"level": vector["level"], "layout": vector["layout"]}
    elsa_format.extract(source, target, **options)
    assert target.read_bytes() == vector.path.read_bytes()
    piped = io.BytesIO()
    elsa_format.extract(io.BytesIO(source.read_bytes()), piped, **options)
    assert piped.getvalue() == vector.path.read_bytes()


@each("valid", "level_index", written)
def test_extractor_gives_the_shards(vector: Vector, tmp_path: Path) -> None:
    """ELSA-R-098 to ELSA-R-102."""
    source, target = vector.beside(vector["source"]).path, tmp_path / vector.path.name
    elsa_format.extract(source, target, level=vector["level"], layout=vector["layout"])
    files = set(json.loads(target.read_text(encoding="utf-8"))["weight_map"].values())
    assert len(files) == 2
    for file in {target.name, *files}:
        assert (tmp_path / file).read_bytes() == (vector.path.parent / file).read_bytes()


def test_writer_aligns_and_orders(tmp_path: Path) -> None:
    """ELSA-R-028, ELSA-R-029, ELSA-R-030."""
    path = tmp_path / "out.safetensors"
    rewrite(path)
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    assert (8 + length) % 256 == 0
    document = json.loads(raw[8 : 8 + length])
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()
    assert raw[8 : 8 + length].rstrip(b" ") == text
    assert next(iter(document)) == "__metadata__"
    profile = json.loads(document.pop("__metadata__")["elsa"])
    canonical = json.dumps(profile, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
    assert metadata(path)["elsa"] == canonical
    width = {"I64": 8, "F32": 4, "BF16": 2}
    keys = [(not n.startswith("__elsa__."), -width[e["dtype"]]) for n, e in document.items()]
    assert keys == sorted(keys)
    begins = [entry["data_offsets"][0] for entry in document.values()]
    assert begins == sorted(begins)


@pytest.mark.parametrize("layout", ["dense", "bitmask", "csr"])
def test_level_file_keeps_other_metadata(layout: str, tmp_path: Path) -> None:
    """ELSA-R-064."""
    target = tmp_path / "level.safetensors"
    elsa_format.extract(NETWORK, target, level=2, layout=layout)
    assert metadata(target).keys() == {"elsa_level", "format"}
    assert (8 + int.from_bytes(target.read_bytes()[:8], "little")) % 256 == 0
    assert metadata(target)["format"] == metadata(NETWORK)["format"]


def test_extractor_memory_does_not_grow_with_the_data(tmp_path: Path) -> None:
    """ELSA-R-004: 320 MiB of data through 64 MiB and the header."""
    elements = 80 << 20
    profile = {
        "version": "1.0",
        "bits": 2,
        "levels": [{"name": "a", "nonzero": 0}],
        "nested": {"w": [0]},
    }
    entry = {"dtype": "F32", "shape": [1 << 10, elements >> 10], "data_offsets": [0, 4 * elements]}
    header = json.dumps({"__metadata__": {"elsa": json.dumps(profile)}, "w": entry}).encode()
    source = tmp_path / "large.safetensors"
    with source.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + 4 * elements)
    script = """
import os, resource, sys
import elsa_format
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
idle = peak()
with open(sys.argv[1], "rb") as source, open(os.devnull, "wb") as sink:
    elsa_format.extract(source, sink, level=1)
print(peak() - idle)
"""
    result = subprocess.run(
        [sys.executable, "-c", script, str(source)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(result.stdout) <= (64 << 20) + 32 * len(header)


def empty_network(path: Path, shape: list[int]) -> None:
    """A file whose one nested tensor has no elements."""
    profile = {
        "version": "1.0",
        "bits": 2,
        "levels": [{"name": "a", "nonzero": 0}],
        "nested": {"w": [0]},
    }
    entry = {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}
    header = json.dumps({"__metadata__": {"elsa": json.dumps(profile)}, "w": entry}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header)


@pytest.mark.parametrize("layout", ["dense", "bitmask", "csr"])
def test_level_file_cannot_state_every_dimension(layout: Any, tmp_path: Path) -> None:
    """ELSA-R-091."""
    source = tmp_path / "net.safetensors"
    empty_network(source, [0, 2**53 - 1])
    elsa_format.extract(source, tmp_path / "level", level=1, layout=layout)
    assert elsa_format.load_level(tmp_path / "level")["w"].shape == (0, 2**53 - 1)
    empty_network(source, [0, 2**53])
    elsa_format.verify(source)
    assert elsa_format.open(source).size(1, layout) > 0
    with pytest.raises(elsa_format.UnsupportedFeature, match="9007199254740992"):
        elsa_format.extract(source, tmp_path / "more", level=1, layout=layout)
    assert not (tmp_path / "more").exists()


def test_limits_of_the_implementation(tmp_path: Path) -> None:
    """ELSA-R-081: numpy has 64 dimensions; who needs no array is not concerned."""
    source = tmp_path / "net.safetensors"
    empty_network(source, [0] * 65)
    elsa_format.verify(source)
    elsa_format.extract(source, tmp_path / "level", level=1)
    with elsa_format.open(source) as file, pytest.raises(elsa_format.UnsupportedFeature):
        file.load(1)
    with pytest.raises(elsa_format.UnsupportedFeature):
        elsa_format.load_level(tmp_path / "level")


def packable() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The dense network and the levels of the vector, as checkpoints to pack."""
    with elsa_format.open(NETWORK) as file:
        return file.load("dense"), [file.load(t) for t in (1, 2, 3)]


def test_converter_keeps_bits(tmp_path: Path) -> None:
    """Levels packed from checkpoints come out with the bits they had (ELSA-R-007)."""
    dense, levels = packable()
    packed = tmp_path / "packed.safetensors"
    elsa_format.pack(dense, packed, levels=levels, per_level=["bn/*"])
    for t, level in enumerate(levels, 1):
        target = tmp_path / f"{t}.safetensors"
        elsa_format.extract(packed, target, level=t)
        found = {name: bytes(tensor["data"]) for name, tensor in stored_tensors(target).items()}
        assert found == {name: array.tobytes() for name, array in level.items()}


def test_converter_names_the_tensor_it_cannot_place(tmp_path: Path) -> None:
    """ELSA-R-008."""
    dense, levels = packable()
    missing = [{name: a for name, a in level.items() if name != "head/bias"} for level in levels]
    shaped = [level | {"head/bias": np.zeros(2, np.float32)} for level in levels]
    for wrong in (missing, shaped):
        with pytest.raises(elsa_format.TensorMismatch, match="head/bias"):
            elsa_format.pack(dense, tmp_path / "out", levels=wrong, per_level=["bn/*"])
        assert list(tmp_path.iterdir()) == []
