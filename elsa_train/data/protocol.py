"""What the trainer asks of a data set."""

from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

Split = Literal["train", "test"]


class Data(Protocol):
    """Images and labels by index.

    Images are uint8 or float arrays [batch, height, width, channels] of one shape; the trainer
    subtracts `mean` and divides by `std` (in the images' own units) on the device. `seed` makes
    what is random about a training image (decoding crops) a function of run, epoch and index.
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

    def shape(self) -> tuple[int, int, int]:
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

    def _arrays(self, split: Split) -> tuple[NDArray[Any], NDArray[np.int32]]:
        return self.train if split == "train" else self.test
