"""Calibrate a graph: its layers, the stretches between them, the columns that layers multiply."""
