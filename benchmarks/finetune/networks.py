"""The networks that are fine-tuned: those of `benchmarks.calibrate`, with batches to train on."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.calibrate.cifar import Cifar
from benchmarks.calibrate.gpt import Gpt
from benchmarks.calibrate.networks import images, shifted
from elsa_train.data import Data


@dataclass(frozen=True)
class Batches:
    """Training data without labels, the same each time one goes through it."""

    data: Data
    size: int
    seed: int
    pictures: bool
    held: int = 8

    def _inputs(self, indices: np.ndarray, epoch: int) -> Tensor:
        if self.pictures:
            return images(self.data, indices)[0]
        return torch.from_numpy(self.data.batch("train", indices, epoch)[0]).long()

    def __iter__(self) -> Iterator[Tensor]:
        random, epoch = np.random.default_rng([self.seed, 7]), 0
        count = self.data.size("train") - self.held * self.size
        while True:
            epoch += 1
            order = random.permutation(count)
            for start in range(0, count - self.size + 1, self.size):
                x = self._inputs(order[start : start + self.size], self.seed * 1000 + epoch)
                yield shifted(x, random) if self.pictures else x

    def validation(self) -> list[Tensor]:
        """Batches of the training data that are never trained on."""
        last = np.arange(self.data.size("train"))[-self.held * self.size :]
        return [self._inputs(some, 0) for some in np.split(last, self.held)]


def opened(name: str, data: Path | None) -> Cifar | Gpt:
    """The network of a name."""
    return Cifar(data) if name == "cifar" else Gpt(data)


def batches_of(network: Cifar | Gpt, seed: int) -> Batches:
    """What it is fine-tuned on."""
    pictures = network.name == "cifar"
    return Batches(network.data, 100 if pictures else 16, seed, pictures)
