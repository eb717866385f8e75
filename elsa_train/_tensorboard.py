"""Scalars as TensorBoard reads them: records of protobuf events, without TensorFlow."""

import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_POLYNOMIAL = 0x82F63B78
_TABLE = []
for _number in range(256):
    for _ in range(8):
        _number = _number >> 1 ^ (_POLYNOMIAL if _number & 1 else 0)
    _TABLE.append(_number)


class TensorBoard:
    """A hook that appends what a run tells to an event file."""

    def __init__(self, folder: Path) -> None:
        """Begin an event file: each process that resumes a run has its own."""
        folder.mkdir(parents=True, exist_ok=True)
        now = time.time()
        path = folder / f"events.out.tfevents.{int(now)}.{os.getpid()}"
        self._file = path.open("ab")
        self._append(_double(1, now) + _bytes(3, b"brain.Event:2"))

    def __call__(self, step: int, entry: dict[str, Any]) -> None:
        """Append the numbers of an entry."""
        values = b"".join(
            _bytes(1, _bytes(1, tag.encode()) + _float(2, value)) for tag, value in scalars(entry)
        )
        event = _double(1, time.time()) + _varint(2 << 3) + _varint(step) + _bytes(5, values)
        self._append(event)

    def _append(self, event: bytes) -> None:
        length = struct.pack("<Q", len(event))
        record = length + _checksum(length) + event + _checksum(event)
        self._file.write(record)
        self._file.flush()


def scalars(entry: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Name the numbers of an entry: by what they are of, then by what they are.

    >>> dict(scalars({"phase": "dense", "step": 3, "loss": 0.5}))
    {'dense/loss': 0.5}
    >>> dict(scalars({"frozen": "90%", "sparsity": 0.9, "accuracy": 0.98}))
    {'level 90%/sparsity': 0.9, 'level 90%/accuracy': 0.98}
    """
    part = entry.get("phase") or entry.get("measured") or f"level {entry.get('frozen')}"
    for name, value in entry.items():
        if name in ("step", "steps", "advanced", "labels"):
            continue
        found = value if isinstance(value, dict) else {"": value}
        for level, number in found.items():
            if isinstance(number, int | float) and not isinstance(number, bool):
                yield f"{part}/{name}" + (f" {level}" if level else ""), float(number)


def _checksum(content: bytes) -> bytes:
    """CRC-32C, rotated and offset as the format of records has it."""
    crc = 0xFFFFFFFF
    for byte in content:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*found, number])


def _bytes(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _double(field: int, value: float) -> bytes:
    return _varint(field << 3 | 1) + struct.pack("<d", value)


def _float(field: int, value: float) -> bytes:
    return _varint(field << 3 | 5) + struct.pack("<f", value)
