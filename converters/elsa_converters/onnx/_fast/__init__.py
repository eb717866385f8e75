"""Sparse operators in a graph: which layers they can compute, and which of these are faster."""
