"""Write a template, a level, or all levels in one graph."""
