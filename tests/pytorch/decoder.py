"""A second decoder, which shares nothing with elsa_format: safetensors by hand, levels in numpy."""

import json
import struct
from pathlib import Path

import numpy as np
import torch

WORDS = {"F64": np.uint64, "F32": np.uint32, "F16": np.uint16, "BF16": np.uint16}


def decode(path: Path, level: int | None) -> dict[str, bytes]:
    """The bytes of every tensor of a level, from a file or a shard index."""
    if path.suffix == ".json":
        files = set(json.loads(path.read_text())["weight_map"].values())
        return {
            k: v for file in sorted(files) for k, v in decode(path.parent / file, level).items()
        }
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    profile = json.loads(header.pop("__metadata__")["elsa"])
    found = {}
    for name, entry in header.items():
        if name.startswith("__elsa__."):
            continue
        if level and name in profile.get("per_level", []):
            entry = header[f"__elsa__.{level}.{name}"]
        start, stop = (8 + length + at for at in entry["data_offsets"])
        data = raw[start:stop]
        if level and name in profile["nested"]:
            words = np.frombuffer(data, WORDS[entry["dtype"]])
            counters = words & ((1 << profile["bits"]) - 1)
            data = np.where((counters > 0) & (counters <= level), words, 0).tobytes()
        found[name] = data
    return found


def content(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def miscount(path: Path, level: int, more: str, less: str) -> None:
    """Let the file state one weight more of a tensor at a level, and one less of another."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    profile = json.loads(header["__metadata__"]["elsa"])
    profile.pop("header", None)  # optional, and no longer right
    profile["nested"][more][level - 1] += 1
    profile["nested"][less][level - 1] -= 1
    header["__metadata__"]["elsa"] = json.dumps(profile)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])
