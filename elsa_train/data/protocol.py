"""What the trainer asks of a data set, and the check that it gets it."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from elsa_train._errors import BadData, TrainError
from elsa_train._own import blaming

Split = Literal["train", "test"]
SPLITS: tuple[Split, ...] = ("train", "test")
SAMPLE = 64
"""Examples of each split that stand for all of them, where nothing better is known."""


class Data(Protocol):
    """Images and labels by index.

    Images are uint8 or float arrays [batch, height, width, channels] of one shape; the trainer
    subtracts `mean` and divides by `std` (in the images' own units) on the device. `seed` makes
    what is random about a training image (decoding crops) a function of run, epoch and index.
    With an attribute `concurrent` that is true, batches are asked from several threads at a time.
    """

    @property
    def num_classes(self) -> int:
        """Return the number of classes."""
        ...

    @property
    def mean(self) -> tuple[float, ...]:
        """Return the mean of each channel."""
        ...

    @property
    def std(self) -> tuple[float, ...]:
        """Return the standard deviation of each channel."""
        ...

    def size(self, split: Split) -> int:
        """Return the number of images."""
        ...

    def shape(self) -> tuple[int, ...]:
        """Return height, width, channels."""
        ...

    def batch(
        self, split: Split, indices: NDArray[np.int64], seed: int
    ) -> tuple[NDArray[Any], NDArray[np.int32]]:
        """Return the images and labels at these indices."""
        ...


@dataclass(frozen=True)
class ArrayData:
    """Data that is in memory."""

    concurrent: ClassVar[bool] = True

    train: tuple[NDArray[Any], NDArray[np.int32]]
    test: tuple[NDArray[Any], NDArray[np.int32]]
    num_classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def size(self, split: Split) -> int:
        """Return the number of images."""
        return len(self._arrays(split)[1])

    def shape(self) -> tuple[int, int, int]:
        """Return height, width, channels."""
        height, width, channels = self.train[0].shape[1:]
        return height, width, channels

    def batch(
        self, split: Split, indices: NDArray[np.int64], seed: int
    ) -> tuple[NDArray[Any], NDArray[np.int32]]:
        """Return the images and labels at these indices."""
        del seed
        images, labels = self._arrays(split)
        return images[indices], labels[indices]

    @property
    def identity(self) -> dict[str, Any]:
        """Return what tells these arrays from others."""
        return _identity(self, [*self.train, *self.test])

    def _arrays(self, split: Split) -> tuple[NDArray[Any], NDArray[np.int32]]:
        return self.train if split == "train" else self.test


def identity_of(data: Data) -> dict[str, Any]:
    """Return what tells data from others, as JSON: its own `identity`, or a look at some of it.

    >>> arrays = np.zeros((2, 8, 8, 1), np.uint8), np.zeros(2, np.int32)
    >>> data = ArrayData(arrays, arrays, 10, (0.0,), (1.0,))
    >>> identity_of(data)["data_examples"]
    [2, 2]
    """
    own = getattr(data, "identity", None)
    if own is not None:
        return dict(own)
    seen: list[NDArray[Any]] = []
    for split in SPLITS:
        size = data.size(split)
        indices = np.linspace(0, size - 1, min(size, SAMPLE)).astype(np.int64)
        seen += take_batch(data, split, indices, 0)
    return _identity(data, seen)


def _identity(data: Data, arrays: Sequence[NDArray[Any]]) -> dict[str, Any]:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).view(np.uint8).reshape(-1).data)
    sizes = [int(data.size(split)) for split in SPLITS]
    return {"data_examples": sizes, "data_sha256": digest.hexdigest()}


def check_data(name: str, data: Any) -> Data:
    """Refuse what is no `Data`, by asking it everything once, before training starts."""
    lacking = [
        member
        for member in ("num_classes", "mean", "std", "size", "shape", "batch")
        if not hasattr(data, member)
    ]
    if lacking:
        what = f"{type(data).__name__} has no {lacking[0]!r}"
        raise BadData(f"dataset {name!r}: {what}; expected an elsa_train.data.Data")
    try:
        shape, mean, std = tuple(data.shape()), tuple(data.mean), tuple(data.std)
        sizes = {split: data.size(split) for split in ("train", "test")}
        channels = shape[-1] if shape else 0
        wrong = {
            f"num_classes is {data.num_classes!r}": not _is_count(data.num_classes),
            f"shape() is {shape}, expected height, width, channels": len(shape) != 3
            or not all(map(_is_count, shape)),
            **{f"size({split!r}) is {n!r}": not _is_count(n) for split, n in sizes.items()},
            f"mean {mean} and std {std} are not a finite number for each channel": not (
                len(mean) == len(std) == channels and all(map(math.isfinite, (*mean, *std)))
            ),
            f"std is {std}, expected above 0": not all(deviation > 0 for deviation in std),
        }
    except TrainError:
        raise
    except Exception as error:
        raise BadData(f"dataset {name!r}: {blaming(error)}") from None
    for problem, found in wrong.items():
        if found:
            raise BadData(f"dataset {name!r}: {problem}")
    for split in ("train", "test"):
        take_batch(data, split, np.zeros(1, np.int64), 0)
    checked: Data = data
    return checked


def _is_count(value: Any) -> bool:
    return isinstance(value, int | np.integer) and bool(value > 0) and value is not True


def take_batch(
    data: Data, split: Split, indices: NDArray[np.int64], seed: int
) -> tuple[NDArray[Any], NDArray[np.int32]]:
    """Return a batch, refusing one that breaks the protocol."""
    try:
        images, labels = data.batch(split, indices, seed)
        images, labels = np.asarray(images), np.asarray(labels)
    except (TrainError, OSError):
        raise
    except Exception as error:
        raise BadData(f"{split} images of {type(data).__name__}: {blaming(error)}") from None
    expected = (len(indices), *data.shape())
    if images.shape != expected or images.dtype.kind not in "uif":
        raise BadData(
            f"{split} images are {images.dtype} {list(images.shape)}, expected numbers "
            f"{list(expected)}"
        )
    # Text has a label for each byte.
    expected = (len(indices), *getattr(data, "label_shape", ()))
    if labels.shape != expected or labels.dtype.kind not in "ui":
        raise BadData(
            f"{split} labels are {labels.dtype} {list(labels.shape)}, expected integers "
            f"{list(expected)}"
        )
    if labels.size and not 0 <= labels.min() <= labels.max() < data.num_classes:
        raise BadData(
            f"{split} labels from {labels.min()} to {labels.max()}, expected 0 to "
            f"{data.num_classes - 1}"
        )
    return images, labels.astype(np.int32, copy=False)
