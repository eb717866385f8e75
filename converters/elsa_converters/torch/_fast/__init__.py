"""Let layers of a module skip the zeros of their weights."""
