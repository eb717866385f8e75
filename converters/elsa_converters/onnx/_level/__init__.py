"""A level of an ELSA file and the graph that it belongs to."""
