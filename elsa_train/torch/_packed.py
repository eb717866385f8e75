"""What a packed file has for a module: levels, counters, and what each level has of its own."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from elsa_converters.torch import arrays, state_dict, without_aliases
from torch import Tensor, nn

import elsa_format
from elsa_format import read_counters
from elsa_format.levels import Pattern, parse_sparsity
from elsa_train._errors import TrainError
from elsa_train._levels import Level


@dataclass(frozen=True)
class Packed:
    """A file's tensors, by names of the module but for `dense`."""

    levels: tuple[Level, ...]
    bits: int
    metadata: dict[str, str]
    stored: dict[str, str]
    """Names of the module's tensors, and those in the file."""
    dense: dict[str, Tensor]
    """The dense network, by names of the file."""
    counters: dict[str, Tensor]
    own: list[dict[str, Tensor]]
    """What each level has of its own, and the dense network, which comes last: all vectors that are
    not nested, and what the file has for each level already."""


def read(model: nn.Module, net: Any) -> Packed:
    """Read a packed file of a module; a file of another one is refused."""
    with elsa_format.open(net) as file:
        numbers = range(1, len(file.levels) + 1)
        if tuple(file.available) != (*numbers, "dense"):
            raise TrainError(f"{file.path}: expected an ELSA file with all its levels")
        dense = state_dict(file)
        stored = _matched(model, dense, file)
        own = {
            name: at
            for name, at in stored.items()
            if at not in file.nested
            and dense[at].is_floating_point()
            and (dense[at].dim() < 2 or at in file.per_level)
        }
        variants = []
        for t in (*numbers, "dense"):
            level = state_dict(file, t)
            variants.append({name: level[at].clone() for name, at in own.items()})
        levels = tuple(
            Level(level.name, level.target or file.sparsity(t) or 0.0, _pattern(level.pattern))
            for t, level in zip(numbers, file.levels, strict=True)
        )
        counters = {
            name: torch.from_numpy(read_counters(arrays({at: dense[at]})[at], file.bits))
            for name, at in stored.items()
            if at in file.nested
        }
        kept = {name: dense[name] for name in file.tensors}
        return Packed(levels, file.bits, dict(file.metadata), stored, kept, counters, variants)


def _matched(
    model: nn.Module, stored: Mapping[str, Tensor], file: elsa_format.File
) -> dict[str, str]:
    """Names of the model's tensors, of tied ones the first, and those in the file."""
    state = model.state_dict(keep_vars=True)
    own, _ = without_aliases({n: t for n, t in state.items() if isinstance(t, Tensor)})
    found = {}
    for name, tensor in own.items():
        if name not in stored or stored[name].shape != tensor.shape:
            shape = list(stored[name].shape) if name in stored else "none"
            raise TrainError(
                f"{file.path}: tensor {name!r}: found {shape}, the model has {list(tensor.shape)}"
            )
        if tensor.is_meta or hasattr(tensor, "to_local"):
            raise TrainError(f"{name}: is on the meta device or sharded, which is not supported")
        found[name] = name if name in file.tensors else file.metadata[name]
    for name in (*file.nested, *file.per_level):
        if name not in found.values():
            raise TrainError(f"{file.path}: tensor {name!r}: the model has none of this name")
    return found


def _pattern(text: str | None) -> Pattern | None:
    found = parse_sparsity(text) if text else None
    return found if isinstance(found, Pattern) else None
