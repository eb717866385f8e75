"""What can be wrong with a file: one function a fault, False where there is nothing to spoil."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import elsa_format as elsa

NESTED, SHARED = "a/kernel", "b/bias"
"""Tensors of the plain network."""


def files(path: Path) -> list[Path]:
    """The files that hold weights."""
    return sorted(path.parent.glob("*.safetensors"))


def header(path: Path) -> tuple[int, dict[str, Any]]:
    """Where the data begins, and what the header says."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return 8 + length, json.loads(content[8 : 8 + length])


def flip(path: Path, position: int, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1 << bit
    path.write_bytes(content)


def flip_in_tensor(path: Path, *names: str) -> bool:
    """Change one bit, not of a counter, of the first weight that is not zero."""
    for file in files(path):
        start, tensors = header(file)
        for name in names:
            if name in tensors:
                first, last = (start + at for at in tensors[name]["data_offsets"])
                data = file.read_bytes()[first:last]
                word = next(at for at in range(0, len(data), 4) if any(data[at : at + 4]))
                flip(file, first + word + 1, 6)
                return True
    return False


def flip_delivered(path: Path, level: Any) -> bool:
    """Change a bit of the last byte that a level needs of a delivery file."""
    file = files(path)[0]
    with elsa.open_delivery(file) as delivery:
        end = delivery.downloads[level]
    if end > file.stat().st_size:
        return False
    flip(file, end - 1, 3)
    return True


def flip_weight(path: Path, other: Path) -> bool:
    if flip_in_tensor(path, NESTED, f"__elsa__.values.{NESTED}"):
        return True
    return flip_delivered(path, 1)


def flip_shared(path: Path, other: Path) -> bool:
    return flip_in_tensor(path, SHARED)


def flip_dense(path: Path, other: Path) -> bool:
    return "__elsa__.delivery" in header(files(path)[0])[1] and flip_delivered(path, "dense")


def flip_name(path: Path, other: Path) -> bool:
    """Change a letter of a tensor's name, or of its only one."""
    file = files(path)[0]
    start, tensors = header(file)
    name = next(name for name in tensors if name != "__metadata__")
    at = file.read_bytes()[:start].index(f'"{name}":'.encode())
    flip(file, at + len(name), 0)
    return True


def shorten(path: Path, other: Path) -> bool:
    file = files(path)[-1]
    os.truncate(file, file.stat().st_size - 1)
    return True


def lengthen(path: Path, other: Path) -> bool:
    with files(path)[-1].open("ab") as file:
        file.write(b"\0")
    return True


def mix(path: Path, other: Path) -> bool:
    """Put in place of a shard that of the other network."""
    if not path.name.endswith(".json"):
        return False
    shutil.copy(files(other)[0], files(path)[0])
    return True


def lose(path: Path, other: Path) -> bool:
    if not path.name.endswith(".json"):
        return False
    files(path)[-1].unlink()
    return True


FAULTS: dict[str, Callable[[Path, Path], bool]] = {
    "a bit of a nested weight": flip_weight,
    "a bit of another tensor": flip_shared,
    "a bit of the dense part": flip_dense,
    "a bit of a name in the header": flip_name,
    "the last byte missing": shorten,
    "a byte too many": lengthen,
    "a shard of another network": mix,
    "a shard missing": lose,
}
