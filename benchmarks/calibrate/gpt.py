"""A small transformer over bytes of text; `python -m benchmarks.calibrate.networks gpt`."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from elsa_converters.torch import calibration, load_level
from numpy.random import default_rng
from torch.nn.functional import cross_entropy

from benchmarks.calibrate import scores
from benchmarks.calibrate.networks import GPT, trained
from benchmarks.calibrate.scores import Measure, Scores
from elsa_format.plugins import Calibration, CalibrationOptions
from elsa_train.data import load

CALIBRATION, BATCH = 256, 32


class Gpt:
    """The network, calibrated with text it was trained on, tested on the last tenth."""

    name, title = "gpt", "byte GPT, 256 sequences"
    measures: Mapping[str, Measure] = {"loss": Measure("nats a byte", 1, 3)}
    template = False

    def __init__(self, data: Path | None = None) -> None:
        """`data` is a text of your own."""
        self.data = load("text", data or "")
        self.model = trained(self.name, GPT())
        self.source = self.model.state_dict()

    def calibration(self, draw: int, options: CalibrationOptions) -> Calibration:
        """Calibrate with the sequences of a draw."""
        chosen = default_rng([1, draw]).choice(self.data.size("train"), CALIBRATION, replace=False)
        batches = [
            torch.from_numpy(self.data.batch("train", some, 0)[0]).long()
            for some in np.split(chosen, CALIBRATION // BATCH)
        ]
        return calibration(self.model, batches, options, classes="logits")

    @torch.inference_mode()
    def scores(self, packed: Path | None, level: int | str) -> dict[str, Scores]:
        """Predict each byte of the test text; without a file, with the original."""
        model = trained(self.name, GPT())
        if packed is not None:
            load_level(model, packed, level)
        losses = []
        for some in np.array_split(np.arange(self.data.size("test")), 20):
            x, y = (torch.from_numpy(part).long() for part in self.data.batch("test", some, 0))
            found = cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="none")
            losses.append(found.view(y.shape).mean(1).double().numpy())
        return {"loss": scores.of(np.concatenate(losses))}
