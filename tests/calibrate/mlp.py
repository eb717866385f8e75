"""Files of perceptrons (`.mlp`), as a package of its own would register their calibration."""

from pathlib import Path
from typing import Any

import numpy as np
from calibrate.perceptron import Perceptron, perceptron
from elsa_converters.calibrate import Nested
from internals import ArrayCheckpoint

from elsa_format.plugins import CalibrationOptions

ENTRY_POINTS = """[elsa.calibrations]
mlp = calibrate.mlp:calibrate
lost = calibrate.mlp_that_is_not_there:calibrate [onnx]
"""


class MlpCheckpoint(ArrayCheckpoint):
    """Weights as they are stored, and whether they were given back."""

    closed = 0

    def close(self) -> None:
        MlpCheckpoint.closed += 1


def register(folder: Path) -> None:
    """Make a folder one that Python finds the entry points in, if it is on the path."""
    (folder / "mlp-1.0.dist-info").mkdir()
    (folder / "mlp-1.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: mlp\n")
    (folder / "mlp-1.0.dist-info/entry_points.txt").write_text(ENTRY_POINTS)


def save(path: Path, sizes: list[int], samples: np.ndarray) -> None:
    """Write a random network and samples of its inputs, `samples.npy`, beside it."""
    model = perceptron(sizes, samples)
    arrays = {name: weight[0] for name, (weight, _) in model.weights.items()}
    arrays |= {f"{name}.bias": bias for name, (_, bias) in model.weights.items()}
    with open(path, "wb") as file:
        np.savez(file, **arrays, steps=np.arange(3))
    np.save(path.with_name("samples.npy"), samples)


def model_of(source: Any, samples: Any, most: int | None = None) -> Perceptron:
    """The network in a file, as a classifier, and at most so many of the samples."""
    with np.load(source) as arrays:
        names = [name for name in arrays if name.startswith("w") and "." not in name]
        weights = {name: (arrays[name][None], arrays[f"{name}.bias"]) for name in names}
    inputs = np.load(samples) if isinstance(samples, str | Path) else samples
    return Perceptron(weights, inputs[:most], 16, classes="logits")


def calibrate(source: Any, samples: Any, options: CalibrationOptions) -> Nested:
    """What the entry point names."""
    model = model_of(source, samples, options.samples)
    arrays = {"steps": np.arange(3)}
    for (layer,) in model.stages:
        own = model.original(layer)
        arrays |= {layer.name: own.weight[0], **model.varying(layer, own)}
    return Nested(MlpCheckpoint(arrays), model, options)
