"""Model directories, as `save_pretrained` writes them: which file holds the weights."""

import os
from pathlib import Path
from typing import Any

from elsa_format import InvalidCheckpoint

NAMES = ("model", "diffusion_pytorch_model")
"""What transformers, timm and diffusers call their weights."""


def weights_file(source: Any) -> Any:
    """The file or shard index with the weights of a directory; any other source is returned.

    >>> import os
    >>> os.makedirs("bert", exist_ok=True)
    >>> open("bert/model.safetensors", "wb").close()
    >>> weights_file("bert").name
    'model.safetensors'
    """
    if not isinstance(source, str | os.PathLike) or not os.path.isdir(source):
        return source
    folder = Path(source)
    for name in NAMES:
        for suffix in (".safetensors.index.json", ".safetensors"):
            if (path := folder / f"{name}{suffix}").exists():
                return path
    raise InvalidCheckpoint(
        f"{folder}: holds no model.safetensors and no diffusion_pytorch_model.safetensors, "
        "nor an index of either"
    )
