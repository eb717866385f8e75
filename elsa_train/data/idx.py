"""IDX files, as of MNIST and Fashion-MNIST, plain or gzipped."""

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elsa_train._errors import BadData, MissingData
from elsa_train.data.protocol import ArrayData


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
    """Read the four files of an MNIST-like data set, with its usual names."""

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
