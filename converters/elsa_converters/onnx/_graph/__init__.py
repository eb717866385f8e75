"""Walk and simplify graphs, and find the weights that multiply activations."""
