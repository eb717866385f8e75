"""CIFAR-10 and CIFAR-100 in their binary version: the .tar.gz archive, or its files in a folder."""

import gzip
import lzma
import tarfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elsa_train._errors import BadData, MissingData
from elsa_train.data.protocol import ArrayData

PIXELS = 3 * 32 * 32
FILES = {
    10: ([f"data_batch_{i}.bin" for i in range(1, 6)], ["test_batch.bin"]),
    100: (["train.bin"], ["test.bin"]),
}
LARGEST_FILE = 50_000 * (2 + PIXELS)
ARCHIVE = {10: "cifar-10-binary.tar.gz", 100: "cifar-100-binary.tar.gz"}
MEAN = {10: (125.3, 123.0, 113.9), 100: (129.3, 124.1, 112.4)}
STD = {10: (63.0, 62.1, 66.7), 100: (68.2, 65.4, 70.4)}


def load_cifar(path: Path, num_classes: int) -> ArrayData:
    """Read the archive, or the folder that holds it or its files."""
    train, test = FILES[num_classes]
    content = _contents(path, [*train, *test], ARCHIVE[num_classes])

    def split(names: list[str]) -> tuple[NDArray[Any], NDArray[np.int32]]:
        parts = [_records(name, content[name], num_classes) for name in names]
        images, labels = zip(*parts, strict=True)
        return np.concatenate(images), np.concatenate(labels)

    return ArrayData(
        split(train), split(test), num_classes, mean=MEAN[num_classes], std=STD[num_classes]
    )


def _records(name: str, content: bytes, num_classes: int) -> tuple[Any, Any]:
    """Split records: label bytes (coarse, fine for CIFAR-100), then three planes of 32x32."""
    label_bytes = 1 if num_classes == 10 else 2
    if not content or len(content) % (label_bytes + PIXELS):
        raise BadData(f"{name}: {len(content)} bytes are no whole number of records")
    records = np.frombuffer(content, np.uint8).reshape(-1, label_bytes + PIXELS)
    labels = records[:, label_bytes - 1].astype(np.int32)
    if labels.max() >= num_classes:
        raise BadData(f"{name}: label {labels.max()}, expected below {num_classes}")
    planes = records[:, label_bytes:].reshape(-1, 3, 32, 32)
    return np.ascontiguousarray(planes.transpose(0, 2, 3, 1)), labels


def _contents(path: Path, names: list[str], archive: str) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    if path.is_dir() and (path / archive).is_file():
        path = path / archive
    if path.is_dir():
        for name in names:
            for file in sorted(path.rglob(name))[:1]:
                found[name] = file.read_bytes()
    elif path.is_file():
        try:
            with tarfile.open(path) as tar:
                for member in tar:
                    name = Path(member.name).name
                    if name in names and (entry := tar.extractfile(member)):
                        if member.size > LARGEST_FILE:
                            raise BadData(f"{path}: {name}: {member.size} bytes are too many")
                        found[name] = entry.read()
        except (tarfile.TarError, EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile) as error:
            raise BadData(f"{path}: {error}") from None
    missing = [name for name in names if name not in found]
    if missing:
        raise MissingData(
            f"{path}: {missing[0]} is missing; expected {archive} (the binary version) or its files"
        )
    return found
