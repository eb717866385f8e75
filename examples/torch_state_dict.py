"""A PyTorch state dict to ELSA, and levels of it back into the model, while it runs.

pip install '.[torch]'
python examples/torch_state_dict.py
"""

import tempfile
from pathlib import Path

import torch
from elsa_converters.torch import attach
from torch import nn

import elsa_format

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(784, 300), nn.ReLU(), nn.Linear(300, 10)).to(torch.bfloat16)
path = Path(tempfile.mkdtemp()) / "net.safetensors"

# To ELSA. The file is a safetensors file: safetensors.torch.load_file gives the dense network.
elsa_format.pack(model.state_dict(), path, sparsities=[95, 90, 80])

# And back: each level into the same memory, bit for bit.
levels = attach(model, path, level="dense")
weights = [p for p in model.parameters() if p.dim() > 1]
total = sum(p.numel() for p in weights)
for level in (3, 2, 1):
    levels.use(level)
    zeros = sum(int((p == 0).sum()) for p in weights)
    print(f"level {level}: {zeros / total:.1%} of the weights are zero")
