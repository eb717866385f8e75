"""Calibration of PyTorch modules: their layers, seen and replaced while they run."""
