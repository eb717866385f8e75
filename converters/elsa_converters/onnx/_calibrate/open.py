"""An ONNX model and samples of its inputs, ready to be nested by calibration."""

import os
from itertools import islice

from elsa_converters._errors import UnsupportedOnnx
from elsa_converters.calibrate import Nested
from elsa_converters.onnx._calibrate.layers import random_kinds
from elsa_converters.onnx._calibrate.model import OnnxModel
from elsa_converters.onnx._calibrate.rewrite import prepare
from elsa_converters.onnx._calibrate.samples import SamplesLike, read_batches
from elsa_converters.onnx._write.template import OnnxCheckpoint
from elsa_format.plugins import CalibrationOptions

FEW = 3
"""Weights that a message names."""


def calibration(
    source: str | os.PathLike[str], samples: SamplesLike, options: CalibrationOptions
) -> Nested:
    """A network that `elsa_format.pack` can nest by calibration.

    Its graph is the model's with a bias and a scale for each layer, and batch norm folded into
    convolutions.

    >>> import elsa_format, numpy as np
    >>> samples = {"x": np.random.default_rng(0).standard_normal((64, 100)).astype(np.float32)}
    >>> options = elsa_format.PackOptions(sparsities=[90, 50], calibrate=samples)
    >>> network = calibration("model.onnx", samples, options.calibration)
    >>> elsa_format.pack(network, "calibrated.safetensors").nested
    ('layer',)

    Args:
        source: The ONNX model.
        samples: Inputs of the graph, an array for each, samples along the first axis: a file that
            `numpy.savez` wrote, a directory of such or with an .npy file for each input, arrays by
            name, or any iterable of such.
        options: What is asked.

    Raises:
        InvalidData: The samples do not fit the graph, or are too few.
        UnsupportedOnnx: ONNX Runtime cannot run the graph, or there is nothing to nest.
    """
    original = OnnxCheckpoint(source)
    batches = read_batches(samples, original.model.path, options.samples)
    prepared = prepare(original.model, options.left_out(original.tensors), options.levels)
    if not any(site.layer.nested for site in prepared.sites):
        few = islice(prepared.left.items(), FEW)
        left = "; ".join(f"{name!r}: {why}" for name, why in few)
        left += ", …" if len(prepared.left) > FEW else ""
        raise UnsupportedOnnx(f"{original.path}: no layer can be nested ({left or 'it has none'})")
    checkpoint = OnnxCheckpoint(prepared.model)
    model = OnnxModel(prepared, batches, max_memory=options.max_memory, threads=options.threads)
    kinds = ", ".join(random_kinds(prepared.model))
    notes = [f"the graph draws random numbers ({kinds}), others in every run: no two runs agree"]
    return Nested(checkpoint, model, options, left=prepared.left, notes=notes if kinds else [])
