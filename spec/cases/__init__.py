"""The cases that the vectors are made of."""
