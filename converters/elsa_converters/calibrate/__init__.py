"""Nest levels into a pretrained network by calibration: from samples of its inputs, no training."""

from elsa_converters.calibrate._model import Layer, Model, Walk, Weights

__all__ = ["Layer", "Model", "Walk", "Weights"]
