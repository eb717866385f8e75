"""Images that are decoded for each batch, and those in folders: train/<class>/*, val/<class>/*."""

import hashlib
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from elsa_train._errors import BadData, MissingData
from elsa_train.data.protocol import SPLITS, Split

SUFFIXES = (".jpeg", ".jpg", ".png")
MARGIN = 32
"""Pixels that evaluation leaves out of 256, all around together."""
AREA, ASPECT, COVERED, ATTEMPTS = (0.08, 1.0), (3 / 4, 4 / 3), 0.1, 10
"""Of the boxes drawn to train on: those of flax's ImageNet example."""
SIZES = 4096
"""Files of each split whose sizes are looked at to know the folder again: a million take long."""

Box = tuple[int, int, int, int]


class Encoded(NamedTuple):
    """An image as it is stored, or where, its class, and what to call it in an error."""

    content: bytes | str
    label: int
    name: str


class Examples(Protocol):
    """Encoded images by index."""

    def __len__(self) -> int:
        """Return the number of images."""
        ...

    def __getitem__(self, index: int) -> Encoded:
        """Return an image."""
        ...


class EncodedImages:
    """Decodes, crops and resizes images, in threads; sent to a worker process, in one thread.

    Each image is a function of the seed and its index alone, whoever decodes it.
    """

    mean = (0.485 * 255, 0.456 * 255, 0.406 * 255)
    std = (0.229 * 255, 0.224 * 255, 0.225 * 255)
    concurrent = decoded = True

    def __init__(
        self,
        examples: dict[Split, Examples],
        num_classes: int,
        identity: dict[str, Any],
        image_size: int = 224,
    ) -> None:
        """Take both splits; `identity` is what tells them from others."""
        self.num_classes, self.identity = num_classes, identity
        self._examples, self._image_size = examples, image_size
        self._threads = os.cpu_count() or 1

    def __getstate__(self) -> dict[str, Any]:
        """Leave the threads behind: other processes do what they would."""
        state = {name: value for name, value in vars(self).items() if name != "_pool"}
        return {**state, "_threads": 1}

    def size(self, split: Split) -> int:
        """Return the number of images."""
        return len(self._examples[split])

    def shape(self) -> tuple[int, int, int]:
        """Return height, width, channels."""
        return self._image_size, self._image_size, 3

    def batch(
        self, split: Split, indices: NDArray[np.int64], seed: int
    ) -> tuple[NDArray[Any], NDArray[np.int32]]:
        """Decode the images at these indices."""
        images = np.empty((len(indices), *self.shape()), np.uint8)
        labels = np.empty(len(indices), np.int32)

        def fill(place: int) -> None:
            index = int(indices[place])
            encoded = self._examples[split][index]
            rng = np.random.default_rng([seed, index]) if split == "train" else None
            images[place] = decode(encoded, self._image_size, rng)
            labels[place] = encoded.label

        if self._threads == 1:
            for place in range(len(indices)):
                fill(place)
        else:
            list(self._pool.map(fill, range(len(indices))))
        return images, labels

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self._threads)


def decode(
    encoded: Encoded, size: int, rng: np.random.Generator | None = None
) -> NDArray[np.uint8]:
    """Decode an image, cut a box out of it (drawn, or the centre), and resize it."""
    from PIL import Image

    content = encoded.content
    try:
        with Image.open(content if isinstance(content, str) else BytesIO(content)) as image:
            # Nearly all are RGB, and converting those only copies them: a third of the time.
            rgb = image if image.mode == "RGB" else image.convert("RGB")
            box = center_crop(*rgb.size, size) if rng is None else random_crop(*rgb.size, rng, size)
            return np.asarray(rgb.resize((size, size), Image.Resampling.BICUBIC, box=box))
    except Exception as error:  # each of its decoders has errors of its own
        raise BadData(f"{encoded.name}: {error}") from None


def center_crop(width: int, height: int, size: int = 224) -> Box:
    """Return the central square that leaves a margin of 32 in 256.

    >>> center_crop(256, 257)
    (16, 17, 240, 241)
    """
    side = max(1, int(size / (size + MARGIN) * min(width, height)))
    left, top = (width - side + 1) // 2, (height - side + 1) // 2
    return left, top, left + side, top + side


def random_crop(width: int, height: int, rng: np.random.Generator, size: int = 224) -> Box:
    """Draw a box as TensorFlow's `sample_distorted_bounding_box` does for flax's example.

    Its aspect ratio is uniform, then its height, from that of 8 % of the area to the largest that
    fits; a box below 10 % of the area is drawn again. After ten failures, or where the box is the
    whole image, it is the one of evaluation.
    """
    area = width * height
    for _ in range(ATTEMPTS):
        aspect = rng.uniform(*ASPECT)
        least, most = (round((part * area / aspect) ** 0.5) for part in AREA)
        most = min(most, height, _highest(width, aspect))
        h = min(least, most)
        h += int(rng.integers(most - h + 1))
        w = round(h * aspect)
        if 0 < w <= width and h > 0 and COVERED * area <= w * h <= area:
            if (w, h) == (width, height):
                break
            # The last place is never drawn, as there.
            top = int(rng.integers(height - h)) if h < height else 0
            left = int(rng.integers(width - w)) if w < width else 0
            return left, top, left + w, top + h
    return center_crop(width, height, size)


def _highest(width: int, aspect: float) -> int:
    """Return the height of the largest box of this aspect ratio that is not too wide."""
    height = int((width + 0.5) / aspect)
    return height if round(height * aspect) <= width else height - 1


class ImageFolder(EncodedImages):
    """Images in folders: train/<class>/*, val/<class>/*; classes are the sorted names in train/."""

    def __init__(self, root: Path, image_size: int = 224) -> None:
        """List the files."""
        try:
            classes = sorted(p.name for p in (root / "train").iterdir() if p.is_dir())
            folders: dict[Split, Files] = {
                "train": Files(root / "train", _listed(root / "train", classes)),
                "test": Files(root / "val", _listed(root / "val", classes)),
            }
        except FileNotFoundError as error:
            raise MissingData(f"{error.filename}: no such folder") from None
        if not all(map(len, folders.values())):
            raise MissingData(f"{root}: train/ or val/ holds no images")
        super().__init__({**folders}, len(classes), _identity(folders), image_size)


class Files:
    """Names and classes of the files of a split: a million of them in 50 MB, sent to workers."""

    def __init__(self, folder: Path, listed: Iterable[tuple[str, int]]) -> None:
        """Take the names, within the folder."""
        names, labels = [], []
        for name, label in listed:
            names.append(os.fsencode(name))
            labels.append(label)
        self._folder, self._names = str(folder), b"".join(names)
        self._ends = np.cumsum([0, *map(len, names)])
        self._labels = np.array(labels, np.int32)

    def __len__(self) -> int:
        """Return the number of files."""
        return len(self._labels)

    def __getitem__(self, index: int) -> Encoded:
        """Return where a file is, and its class."""
        path = os.path.join(self._folder, self.name(index))
        return Encoded(path, int(self._labels[index]), path)

    def name(self, index: int) -> str:
        """Return a file's name within the folder."""
        return os.fsdecode(self._names[self._ends[index] : self._ends[index + 1]])


def _listed(folder: Path, classes: list[str]) -> Iterator[tuple[str, int]]:
    if not folder.is_dir():
        raise FileNotFoundError(2, "no such folder", str(folder))
    for label, name in enumerate(classes):
        if (folder / name).is_dir():
            for file in sorted(os.listdir(folder / name)):
                if file.lower().endswith(SUFFIXES):
                    yield f"{name}/{file}", label


def _identity(folders: dict[Split, Files]) -> dict[str, Any]:
    """Return what tells these folders from others: all names, and the sizes of some files."""
    digest = hashlib.sha256()
    for split in SPLITS:
        files = folders[split]
        every = -(-len(files) // SIZES)
        for index in range(len(files)):
            size = os.stat(files[index].content).st_size if index % every == 0 else ""
            digest.update(f"{split}/{files.name(index)} {size}\n".encode())
    examples = [len(files) for files in folders.values()]
    return {"data_examples": examples, "data_sha256": digest.hexdigest()}
