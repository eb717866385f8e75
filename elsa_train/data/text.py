"""Text as windows of bytes: a file's, or the documentation that comes with every Python."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elsa_train._errors import BadData, MissingData
from elsa_train.data.protocol import Split

CONTEXT = 128
"""Bytes of a window, and so the most that a prediction looks back on."""
TEST = 0.1
"""Part of the text, its end, that is only tested on."""
SHORTEST = 1 << 14
"""Bytes: less has too few windows to test on."""


class TextData:
    """Windows of two contiguous parts of a text: to train, and, its end, to test.

    The label of a byte is the one after it. Windows don't overlap, so that an epoch is the whole
    part once; those to train on begin at another byte in every epoch.
    """

    num_classes = 256
    mean = std = ()
    concurrent = True

    def __init__(self, text: bytes, name: str = "text") -> None:
        """Cut the text into its parts."""
        if len(text) < SHORTEST:
            raise BadData(f"{name}: found {len(text)} bytes, expected at least {SHORTEST}")
        self.identity = {
            "text_bytes": len(text),
            "text_sha256": hashlib.sha256(text).hexdigest(),
        }
        """What the run's settings say about the text."""
        data, end = np.frombuffer(text, np.uint8), len(text) - round(TEST * len(text))
        self._parts: dict[Split, NDArray[np.uint8]] = {"train": data[:end], "test": data[end:]}
        self.label_shape = (CONTEXT,)

    def size(self, split: Split) -> int:
        """Return the number of windows; the last byte is only a label."""
        spare = CONTEXT if split == "train" else 0  # room to begin anywhere in a window
        return (len(self._parts[split]) - 1 - spare) // CONTEXT

    def shape(self) -> tuple[int, ...]:
        """Return the length of a window."""
        return (CONTEXT,)

    def batch(
        self, split: Split, indices: NDArray[np.int64], seed: int
    ) -> tuple[NDArray[Any], NDArray[np.int32]]:
        """Return the windows at these indices, and the same a byte later."""
        first = np.random.default_rng(seed).integers(CONTEXT) if split == "train" else 0
        places = first + indices[:, None] * CONTEXT + np.arange(CONTEXT)
        part = self._parts[split]
        return part[places], part[places + 1].astype(np.int32)


def load_text(path: Path | None = None) -> TextData:
    """Read a file, or take Python's own documentation of its language, which differs by version."""
    if path is not None:
        if not path.is_file():  # a device would be read for ever
            raise MissingData(f"{path}: no such file")
        return TextData(path.read_bytes(), str(path))
    from pydoc_data.topics import topics

    return TextData("\n".join(topics[name] for name in sorted(topics)).encode(), "Python's topics")
