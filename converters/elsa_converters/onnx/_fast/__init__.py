"""Let sparse operators compute the layers that are faster with them."""
