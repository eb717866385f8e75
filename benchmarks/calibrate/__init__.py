"""What calibrated levels of real networks are worth: `python -m benchmarks.calibrate`."""

from pathlib import Path

RUNS = Path("runs/calibrate")
"""Trained networks, and what was measured."""
