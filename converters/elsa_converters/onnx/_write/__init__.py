"""What is written: templates, a level, or all levels in one graph."""
