"""From a checkpoint to an ELSA file: what is read, which counter each weight gets, the packing."""
