"""Nest levels into a pretrained network by calibration: from samples of its inputs, no training."""

from elsa_converters.calibrate._model import Layer, Model, Walk, Weights
from elsa_converters.calibrate._pack import Nested
from elsa_converters.calibrate._store import Kept, Store

__all__ = ["Kept", "Layer", "Model", "Nested", "Store", "Walk", "Weights"]
