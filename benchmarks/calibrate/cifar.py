"""A small ResNet with batch norm on CIFAR-10; `python -m benchmarks.calibrate.networks cifar`."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from elsa_converters.torch import calibration, load_level
from numpy.random import default_rng

from benchmarks.calibrate import scores
from benchmarks.calibrate.networks import ResNet, images, trained
from benchmarks.calibrate.scores import Measure, Scores
from elsa_format.plugins import Calibration, CalibrationOptions
from elsa_train.data import load

CALIBRATION, BATCH = 1024, 128


class Cifar:
    """The network, calibrated with images it was trained on, tested on all others."""

    name, title = "cifar", "CIFAR-10 ResNet, 1,024 images"
    measures: Mapping[str, Measure] = {"right": Measure("test images right, %", 100, 2)}
    template = False

    def __init__(self, data: Path | None = None) -> None:
        """`data` is the folder of the images."""
        self.data = load("cifar10", data or "cifar-10-batches-bin")
        self.model = trained(self.name, ResNet())
        self.source = self.model.state_dict()

    def calibration(self, draw: int, options: CalibrationOptions) -> Calibration:
        """Calibrate with the images of a draw."""
        chosen = default_rng([1, draw]).choice(self.data.size("train"), CALIBRATION, replace=False)
        batches = [images(self.data, some)[0] for some in np.split(chosen, CALIBRATION // BATCH)]
        return calibration(self.model, batches, options, classes="logits")

    @torch.inference_mode()
    def scores(self, packed: Path | None, level: int | str) -> dict[str, Scores]:
        """Classify the test images; without a file, with the original."""
        model = trained(self.name, ResNet())
        if packed is not None:
            load_level(model, packed, level)
        right = []
        for some in np.split(np.arange(self.data.size("test")), 20):
            x, y = images(self.data, some, "test")
            right.append((model(x).argmax(1) == y).numpy())
        return {"right": scores.of(np.concatenate(right))}
