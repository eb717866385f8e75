"""Networks: tensors that are read by name, whatever holds them; one kind a module."""

from elsa_format._network.base import Network, PlannedTensor, TensorBytes
from elsa_format._network.open import join_shards, open_level, open_network

__all__ = ["Network", "PlannedTensor", "TensorBytes", "join_shards", "open_level", "open_network"]
