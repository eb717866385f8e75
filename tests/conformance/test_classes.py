"""What the specification asks of programs rather than of files."""

import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vector_files import COMMITTED, ROOT, metadata, stored_tensors

import elsa_format

NETWORK = COMMITTED / "valid" / "per_level.safetensors"


def rewrite(path: Path) -> None:
    """Write the network of the vector `per_level` anew."""
    with elsa_format.open(NETWORK) as file:
        levels = [elsa_format.LevelSpec(level.name) for level in file.levels]
        loaded = [file.load(t) for t in range(1, len(levels) + 1)]
        elsa_format.write(
            path,
            file.load("dense"),
            bits=file.bits,
            levels=levels,
            nested=file.nested,
            per_level={name: [level[name] for level in loaded] for name in file.per_level},
            metadata=dict(file.metadata),
        )


def test_writer_gives_the_vector(tmp_path: Path) -> None:
    """Two implementations write the same bytes (ELSA-R-028 to ELSA-R-031)."""
    rewrite(tmp_path / "first.safetensors")
    rewrite(tmp_path / "second.safetensors")
    first = (tmp_path / "first.safetensors").read_bytes()
    assert first == (tmp_path / "second.safetensors").read_bytes()
    assert first == NETWORK.read_bytes()


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
