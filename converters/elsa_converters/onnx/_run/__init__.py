"""What is run on this machine: sessions of a level, and how much each level costs."""
