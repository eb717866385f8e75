"""What tests compare bits with."""

import io
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors

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


def by_index(index: Path) -> dict[str, np.ndarray]:
    """All tensors of shards, by their index and the safetensors library."""
    weight_map = json.loads(index.read_text())["weight_map"]
    loaded = {}
    for file in sorted(set(weight_map.values())):
        for name, array in by_safetensors((index.parent / file).read_bytes()).items():
            assert weight_map[name] == file
            loaded[name] = array
    assert loaded.keys() == weight_map.keys()
    return loaded


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
