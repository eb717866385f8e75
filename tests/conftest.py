"""Networks to test with."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors

import elsa_format as elsa

FLOATS = {
    "F32": np.dtype("float32"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype("float16"),
    "F64": np.dtype("float64"),
}


def level_by_definition(weights: np.ndarray, bits: int, level: int) -> np.ndarray:
    """The specification's formula, written as the paper writes it."""
    words = np.atleast_1d(weights).view(f"u{weights.itemsize}")
    counters = words & ((1 << bits) - 1)
    kept = np.where((counters > 0) & (counters <= level), words, 0).astype(words.dtype)
    return kept.view(weights.dtype).reshape(weights.shape)


def same_bits(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    """Whether two networks are equal to the bit, names, dtypes and shapes included."""
    return {k: (v.dtype, v.shape, v.tobytes()) for k, v in one.items()} == {
        k: (v.dtype, v.shape, v.tobytes()) for k, v in other.items()
    }


def by_safetensors(content: bytes) -> dict[str, np.ndarray]:
    """A file's tensors as the safetensors library reads them (its numpy half lacks BF16)."""
    types = dict(FLOATS)
    types |= {"U8": np.dtype("u1"), "I32": np.dtype("i4"), "I64": np.dtype("i8")}
    return {
        name: np.frombuffer(view["data"], types[view["dtype"]]).reshape(view["shape"])
        for name, view in safetensors.deserialize(content)
    }


@pytest.fixture
def network() -> dict[str, np.ndarray]:
    """A dense network: two layers, a bias, a step count, batch-norm statistics."""
    rng = np.random.default_rng(7)
    return {
        "conv/kernel": rng.standard_normal((3, 3, 4, 8)).astype(np.float32),
        "dense/kernel": rng.standard_normal((32, 10)).astype(np.float32),
        "dense/bias": rng.standard_normal(10).astype(np.float32),
        "bn/mean": rng.standard_normal(8).astype(np.float32),
        "step": np.array(1234, np.int64),
    }


@pytest.fixture
def packed(network: dict[str, np.ndarray], tmp_path: Path) -> Path:
    """The network with three one-shot levels."""
    path = tmp_path / "net.safetensors"
    elsa.pack(network, path, sparsities=[95, 90, 80])
    return path


@pytest.fixture
def rich(network: dict[str, np.ndarray], tmp_path: Path) -> Path:
    """The network with three levels and statistics per level."""
    path = tmp_path / "rich.safetensors"
    rng = np.random.default_rng(8)
    tensors = dict(network)
    nested = ["conv/kernel", "dense/kernel"]
    for name in nested:
        counters = rng.integers(0, 4, tensors[name].shape)
        tensors[name] = elsa.embed_counters(tensors[name], counters, bits=2)
    elsa.write(
        path,
        tensors,
        levels=[
            elsa.LevelSpec("95%", target=0.95, metrics={"accuracy": 0.9}),
            elsa.LevelSpec("90%", target=0.9, metrics={"accuracy": 0.93}),
            elsa.LevelSpec("80%", target=0.8, metrics={"accuracy": 0.95}),
        ],
        nested=nested,
        per_level={"bn/mean": [np.full(8, t, np.float32) for t in range(3)]},
        dense_metrics={"accuracy": 0.96},
        metadata={"format": "pt"},
    )
    return path


@pytest.fixture
def to_file(tmp_path: Path) -> Callable[[bytes], Path]:
    """Store bytes as a file."""

    def store(content: bytes) -> Path:
        path = tmp_path / "stored.safetensors"
        path.write_bytes(content)
        return path

    return store


class OneByteReader(io.RawIOBase):
    """A pipe at its slowest: one byte a read, no seeking."""

    def __init__(self, content: bytes) -> None:
        self.content, self.position = content, 0

    def read(self, size: int = -1) -> bytes:
        self.position += 1
        return self.content[self.position - 1 : self.position] if size else b""

    def readinto(self, buffer: Any) -> int:
        data = self.read(1)
        buffer[: len(data)] = data
        return len(data)

    def seekable(self) -> bool:
        return False
