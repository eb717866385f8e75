"""A PyTorch state dict to ELSA, and a level of it back into `load_state_dict`.

pip install . torch safetensors
python examples/torch_state_dict.py
"""

import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

import elsa_format

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(784, 300), nn.ReLU(), nn.Linear(300, 10))
folder = Path(tempfile.mkdtemp())

# To ELSA: PyTorch's safetensors file is all that is needed.
save_file(model.state_dict(), folder / "dense.safetensors")
elsa_format.pack(folder / "dense.safetensors", folder / "net.safetensors", sparsities=[95, 90, 80])

# The ELSA file is itself a safetensors file: the dense network loads as ever.
model.load_state_dict(load_file(folder / "net.safetensors"))

# And back: a level into the same model, bit for bit.
with elsa_format.open(folder / "net.safetensors") as file:
    level = {name: torch.from_numpy(array) for name, array in file.load(level=2).items()}
model.load_state_dict(level)
zeros = sum(int((p == 0).sum()) for p in model.parameters() if p.dim() > 1)
total = sum(p.numel() for p in model.parameters() if p.dim() > 1)
print(f"level 2: {zeros / total:.1%} of the weights are zero")
