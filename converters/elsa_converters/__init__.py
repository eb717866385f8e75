"""Other model formats to and from ELSA files; each format is a submodule with its own extra."""
