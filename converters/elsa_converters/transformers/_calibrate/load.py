"""The model of a directory, and where its stored tensors are in it."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.utils import logging

from elsa_converters._errors import InvalidData
from elsa_converters.torch._calibrate.layers import Held
from elsa_converters.torch._calibrate.model import Classes
from elsa_converters.torch._tensors import as_tensor, torch_dtype
from elsa_converters.transformers._names import Place, find_places
from elsa_converters.transformers._text import from_pretrained
from elsa_format.plugins import Checkpoint, TensorInfo, weights_file

FEW = 3
"""Tensors that a message names."""


@dataclass(frozen=True)
class Loaded:
    """A model, and what its directory says of it."""

    model: nn.Module
    named: Mapping[str, Held]
    """The stored tensors, and where they are in the model."""
    left: Mapping[str, str] = field(default_factory=dict)
    """Stored tensors that are elsewhere in the model, and how."""
    classes: Classes | None = None
    """What the first output holds, if it does not say so by its name."""
    notes: Sequence[str] = ()


def load(folder: Path, checkpoint: Checkpoint) -> Loaded:
    """Load the model of a directory in evaluation mode, its weights mapped."""
    config = _config(folder)
    if "architecture" in config and "model_type" not in config:
        return _load_timm(folder, config)
    kind = getattr(transformers, (config.get("architectures") or [""])[0], AutoModel)
    from_pretrained(AutoConfig, str(folder))  # whose errors say more
    dtypes = Counter[torch.dtype]()
    for info in checkpoint.tensors.values():
        if info.dtype.nestable:
            dtypes[torch_dtype(info, checkpoint.path)] += info.elements
    ((dtype, _),) = dtypes.most_common(1) or [(torch.float32, 0)]
    with _quiet():
        model, info = from_pretrained(
            kind, str(folder), dtype=dtype, variant=_variant(folder), output_loading_info=True
        )
    notes = []
    if missing := sorted(info["missing_keys"]):
        few = ", ".join(map(repr, missing[:FEW])) + (", …" if len(missing) > FEW else "")
        notes.append(f"{len(missing)} tensors of the model are not stored, and random: {few}")
    places = find_places(model, checkpoint.tensors, get_model_conversion_mapping(model))
    named, left = dict[str, Held](), dict[str, str]()
    own = model.state_dict(keep_vars=True)
    for place in places:
        found = _held(place, own, checkpoint)
        named |= found
        left |= {
            name: f"is {place.held[0]!r} in the model, of another form"
            for name in place.stored
            if name not in found
        }
    return Loaded(model.eval(), named, left, notes=notes)


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        raise InvalidData(f"{folder}: has no config.json, so it cannot be run")
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise InvalidData(f"{path}: is no JSON object")
    return found


def _variant(folder: Path) -> str | None:
    """The variant of a directory's only weights, such as fp16."""
    parts = weights_file(folder, torch=True).name.split(".")
    known = ("model", "pytorch_model", "safetensors", "bin", "index", "json")
    return ".".join(part for part in parts if part not in known) or None


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the progress and the warnings of transformers: what matters is told later."""
    level, shown = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()


# --- Where the tensors are ------------------------------------------------------------------------


def _held(place: Place, own: Mapping[str, Tensor], checkpoint: Checkpoint) -> dict[str, Held]:
    """Where the stored tensors of a place are, as far as they are parts of the model's."""
    first = own[place.held[0]]
    if not place.converted:
        name = place.stored[0]
        same = len(place.stored) == len(place.held) == 1
        return {name: Held(first)} if same and _fits(checkpoint, name, first) else {}
    if first.ndim != 3 or len(place.held) != 1:
        return {}
    return _parts(place.stored, first, checkpoint)


def _fits(checkpoint: Checkpoint, name: str, tensor: Tensor) -> bool:
    info = checkpoint.tensors[name]
    return info.shape == tuple(tensor.shape) and _dtype(info) == tensor.dtype


def _dtype(info: TensorInfo) -> torch.dtype | None:
    return torch_dtype(info, "") if info.dtype.nestable else None


def _parts(stored: Sequence[str], whole: Tensor, checkpoint: Checkpoint) -> dict[str, Held]:
    """Which rows of which matrix each stored tensor is: one for each expert, or several in a row.

    They are told by their content, as transformers says only by a program what it makes of them.
    """
    rows = {checkpoint.tensors[name].shape[0] for name in stored}
    size = rows.pop() if len(rows) == 1 else 0
    if not size or whole.shape[1] % size:
        return {}
    times = whole.shape[1] // size
    free = [
        Held(whole, matrix, slice(at * size, (at + 1) * size))
        for matrix in range(len(whole))
        for at in range(times)
    ]
    found: dict[str, Held] = {}
    for name in stored:
        own = _read(checkpoint, name)
        for held in free:
            if held.part.shape == own.shape and torch.equal(held.part, own):
                found[name] = held
                free.remove(held)
                break
    return found if not free else {}


def _read(checkpoint: Checkpoint, name: str) -> Tensor:
    info = checkpoint.tensors[name]
    blocks = [torch.from_numpy(block.copy()) for block in checkpoint.blocks(name, 1 << 22)]
    return as_tensor(torch.cat(blocks).numpy(), info, checkpoint.path)


# --- timm -----------------------------------------------------------------------------------------


def _load_timm(folder: Path, config: Mapping[str, Any]) -> Loaded:
    """A model of timm, whose tensors have the names of the module's."""
    try:
        import timm
    except ImportError as error:  # of timm, or of what it needs
        missing = error.name or "timm"
        raise InvalidData(
            f"{folder}: is a model of timm, and {missing} is not installed; "
            f"run: pip install {missing}"
        ) from None
    model = timm.create_model(f"local-dir:{folder}", pretrained=True)
    own = model.state_dict(keep_vars=True)
    named = {name: Held(tensor) for name, tensor in own.items()}
    classes: Classes | None = "logits" if config.get("num_classes", 0) > 1 else None
    return Loaded(model.eval(), named, classes=classes)
