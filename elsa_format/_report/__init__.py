"""A file as one page that people look at."""
