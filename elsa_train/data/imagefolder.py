"""ImageNet, or any data, as folders of images: train/<class>/*, val/<class>/*."""

import hashlib
import math
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elsa_train._errors import BadData, MissingData
from elsa_train.data.protocol import Split

SUFFIXES = {".jpeg", ".jpg", ".png"}
CENTER = 224 / (224 + 32)
SIZES = 4096
"""Files of each split whose sizes are looked at to know the folder again: a million take long."""


class ImageFolder:
    """Decode images in threads; crops follow flax's ImageNet example."""

    mean = (0.485 * 255, 0.456 * 255, 0.406 * 255)
    std = (0.229 * 255, 0.224 * 255, 0.225 * 255)

    def __init__(self, root: Path, image_size: int = 224) -> None:
        """List the files; classes are the sorted folder names of train/."""
        try:
            classes = sorted(p.name for p in (root / "train").iterdir() if p.is_dir())
            self._files = {
                "train": _list(root / "train", classes),
                "test": _list(root / "val", classes),
            }
        except FileNotFoundError as error:
            raise MissingData(f"{error.filename}: no such folder") from None
        if not self._files["train"] or not self._files["test"]:
            raise MissingData(f"{root}: train/ or val/ holds no images")
        self.num_classes = len(classes)
        self._image_size = image_size
        self._pool = ThreadPoolExecutor(max_workers=os.cpu_count())

    @property
    def identity(self) -> dict[str, Any]:
        """Return what tells this folder from others: all names, and the sizes of some files."""
        digest = hashlib.sha256()
        for split, files in self._files.items():
            every = -(-len(files) // SIZES)
            for number, (path, _) in enumerate(files):
                size = path.stat().st_size if number % every == 0 else ""
                digest.update(f"{split}/{path.parent.name}/{path.name} {size}\n".encode())
        examples = [len(files) for files in self._files.values()]
        return {"data_examples": examples, "data_sha256": digest.hexdigest()}

    def size(self, split: Split) -> int:
        """Return the number of images."""
        return len(self._files[split])

    def shape(self) -> tuple[int, int, int]:
        """Return height, width, channels."""
        return self._image_size, self._image_size, 3

    def batch(
        self, split: Split, indices: NDArray[np.int64], seed: int
    ) -> tuple[NDArray[Any], NDArray[np.int32]]:
        """Decode the images at these indices."""

        def decode(index: int) -> NDArray[np.uint8]:
            rng = np.random.default_rng([seed, index]) if split == "train" else None
            return _decode(self._files[split][index][0], self._image_size, rng)

        images = np.stack(list(self._pool.map(decode, indices.tolist())))
        return images, np.array([self._files[split][i][1] for i in indices], np.int32)


def _list(folder: Path, classes: list[str]) -> list[tuple[Path, int]]:
    return [
        (path, label)
        for label, name in enumerate(classes)
        if (folder / name).is_dir()
        for path in sorted((folder / name).iterdir())
        if path.suffix.lower() in SUFFIXES
    ]


def _decode(path: Path, size: int, rng: np.random.Generator | None) -> NDArray[np.uint8]:
    from PIL import Image

    try:
        with Image.open(path) as image:
            rgb = image.convert("RGB")
    except Exception as error:  # each of its decoders has errors of its own
        raise BadData(f"{path}: {error}") from None
    box = center_crop(*rgb.size) if rng is None else random_crop(*rgb.size, rng)
    return np.asarray(rgb.resize((size, size), Image.Resampling.BICUBIC, box=box))


def center_crop(width: int, height: int) -> tuple[int, int, int, int]:
    """Return the central square that leaves a margin of 32 in 256."""
    side = max(1, int(CENTER * min(width, height)))
    left, top = (width - side) // 2, (height - side) // 2
    return left, top, left + side, top + side


def random_crop(width: int, height: int, rng: np.random.Generator) -> tuple[int, int, int, int]:
    """Draw a box of 8 to 100 % of the area and aspect 3/4 to 4/3; the centre after ten failures."""
    for _ in range(10):
        area = rng.uniform(0.08, 1.0) * width * height
        aspect = rng.uniform(3 / 4, 4 / 3)
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            left = int(rng.integers(0, width - w + 1))
            top = int(rng.integers(0, height - h + 1))
            return left, top, left + w, top + h
    return center_crop(width, height)
