"""Calibration of model directories: the model they hold, and samples as it takes them."""
