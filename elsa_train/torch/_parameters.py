"""What a module has to train: which parameters are pruned, along which axis; its buffers."""

import re
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from elsa_train._errors import InfeasibleTraining, NonFiniteLoss, TrainError


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that a state dict holds."""
    stored = model.state_dict().keys()
    return {name: b for name, b in model.named_buffers() if name in stored}


def _owners(model: nn.Module, name: str) -> list[nn.Module]:
    """The modules that have a parameter; tied ones have several."""
    parameter = model.get_parameter(name)
    return [m for m in model.modules() if any(p is parameter for p in m._parameters.values())]


def prunable(
    model: nn.Module, params: Iterable[str], prune: str | None, exclude: str
) -> tuple[str, ...]:
    """The parameters to prune: by patterns of names, or all weights but embeddings."""
    for pattern in (prune or "", exclude):
        try:
            re.compile(pattern)
        except re.error as error:
            raise TrainError(f"{pattern!r} is not a regular expression: {error}") from None

    def chosen(name: str) -> bool:
        if exclude and re.search(exclude, name):
            return False
        if prune is not None:
            return bool(re.search(prune, name))
        embeds = any(isinstance(m, nn.Embedding | nn.EmbeddingBag) for m in _owners(model, name))
        return bool(model.get_parameter(name).dim() >= 2) and not embeds

    found = tuple(name for name in params if chosen(name))
    if not found:
        raise InfeasibleTraining(f"no parameter matches prune={prune!r} exclude={exclude!r}")
    return found


def input_axis(model: nn.Module, name: str) -> int:
    """The axis of a weight along which a layer's inputs are: the second, but for GPT-2's Conv1D."""
    if model.get_parameter(name).dim() < 2:
        return -1
    return 0 if any(type(m).__name__ == "Conv1D" for m in _owners(model, name)) else 1


def check_finite(name: str, p: Tensor) -> None:
    """Refuse Inf and NaN, which carry no counter."""
    if not bool(torch.isfinite(p).all()):
        raise NonFiniteLoss(f"{name}: weights are not finite")
