"""Fit an ELSA file to a template, and read a level of it."""
