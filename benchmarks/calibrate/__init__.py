"""What calibrated levels of real networks are worth: `python -m benchmarks.calibrate`."""
