"""Images that fit into memory: digits, IDX files (MNIST and its like), CIFAR-10 and CIFAR-100."""

import gzip
import lzma
import math
import struct
import tarfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elsa_train._errors import BadData, MissingData
from elsa_train.data.protocol import ArrayData

TEST_DIGITS = 360
PIXELS = 3 * 32 * 32
FILES = {
    10: ([f"data_batch_{i}.bin" for i in range(1, 6)], ["test_batch.bin"]),
    100: (["train.bin"], ["test.bin"]),
}
LARGEST_FILE = 50_000 * (2 + PIXELS)
ARCHIVE = {10: "cifar-10-binary.tar.gz", 100: "cifar-100-binary.tar.gz"}
MEAN = {10: (125.3, 123.0, 113.9), 100: (129.3, 124.1, 112.4)}
STD = {10: (63.0, 62.1, 66.7), 100: (68.2, 65.4, 70.4)}


def load_digits() -> ArrayData:
    """Split the 1,797 digits of scikit-learn (8x8, 0 to 16): 1,437 to train on, 360 to test."""
    from sklearn import datasets

    found = datasets.load_digits()
    images = found.images.astype(np.uint8)[..., None]
    labels = found.target.astype(np.int32)
    order = np.random.default_rng(0).permutation(len(labels))
    test, train = order[:TEST_DIGITS], order[TEST_DIGITS:]
    return ArrayData(
        train=(images[train], labels[train]),
        test=(images[test], labels[test]),
        num_classes=10,
        mean=(4.88,),
        std=(6.02,),
    )


def read_idx(path: Path) -> NDArray[np.uint8]:
    """Read an array of unsigned bytes: 0, 0, type 8, rank, big-endian sizes, data."""
    content = path.read_bytes()
    if path.suffix == ".gz":
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise BadData(f"{path}: {error}") from None
    if len(content) < 4 or content[:3] != b"\0\0\x08" or content[3] > 3:
        raise BadData(f"{path}: not an IDX file of unsigned bytes in at most 3 dimensions")
    rank = content[3]
    start = 4 + 4 * rank
    if len(content) < start:
        raise BadData(f"{path}: ends within its header")
    shape = struct.unpack(f">{rank}I", content[4:start])
    if len(content) - start != math.prod(shape):
        raise BadData(
            f"{path}: found {len(content) - start} bytes of data, expected {math.prod(shape)}"
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def load_idx(folder: Path) -> ArrayData:
    """Read the four files of an MNIST-like data set, plain or gzipped, with its usual names."""

    def split(prefix: str) -> tuple[NDArray[Any], NDArray[np.int32]]:
        images = read_idx(_find(folder, f"{prefix}-images-idx3-ubyte"))
        labels = read_idx(_find(folder, f"{prefix}-labels-idx1-ubyte"))
        if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels) or not labels.size:
            raise BadData(f"{folder}: {prefix}: images {images.shape}, labels {labels.shape}")
        return images[..., None], labels.astype(np.int32)

    train, test = split("train"), split("t10k")
    return ArrayData(
        train=train,
        test=test,
        num_classes=int(max(train[1].max(), test[1].max())) + 1,
        mean=(float(train[0].mean()),),
        std=(float(train[0].std()),),
    )


def _find(folder: Path, name: str) -> Path:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    raise MissingData(f"{folder}: {name} is missing (plain or .gz)")


def load_cifar(path: Path, num_classes: int) -> ArrayData:
    """Read the binary version: the .tar.gz archive, or the folder that holds it or its files."""
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
