"""Levels in PyTorch: as a state dict, in a module's own memory, switched while it runs.

>>> from elsa_converters import torch as elsa_torch
>>> weights = elsa_torch.state_dict("net.safetensors", level=2)
>>> sorted(weights)
['bias', 'layer']
"""

from elsa_converters._errors import InvalidData
from elsa_converters.torch._calibrate.open import calibrate, calibration
from elsa_converters.torch._checkpoint import TorchCheckpoint
from elsa_converters.torch._evaluate import evaluate
from elsa_converters.torch._fast.sparsify import sparsify
from elsa_converters.torch._levels import Levels, attach
from elsa_converters.torch._load import Unmatched, load_level, state_dict, unwrapped
from elsa_converters.torch._tensors import arrays, without_aliases

__all__ = [
    "InvalidData",
    "Levels",
    "TorchCheckpoint",
    "Unmatched",
    "arrays",
    "attach",
    "calibrate",
    "calibration",
    "evaluate",
    "load_level",
    "sparsify",
    "state_dict",
    "unwrapped",
    "without_aliases",
]
