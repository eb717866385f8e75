"""Graphs of operators: walk them, simplify them, and see what reaches weights."""
