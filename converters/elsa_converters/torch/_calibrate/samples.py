"""Batches as a module takes them: their sizes, their padding, the rows of what it gives."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_map

from elsa_converters._errors import InvalidData
from elsa_converters.torch._calibrate.calls import Call, tensors_in

MAIN = "logits", "last_hidden_state"
"""What of a mapping of outputs is compared; else its first."""


def size_of(batch: Any, number: int) -> int:
    """How many samples a batch holds."""
    tensors = [tensor for tensor in tensors_in(batch) if tensor.ndim]
    if not tensors:
        raise InvalidData(f"batch {number} holds no tensor")
    return len(tensors[0])


def moved(batch: Any, device: torch.device) -> Any:
    """A copy of a batch on a device."""
    return tree_map(
        lambda leaf: leaf.to(device, copy=True) if isinstance(leaf, Tensor) else leaf, batch
    )


def masks_of(batch: Any) -> list[Tensor]:
    """Which places are no padding, for what has padding."""
    if not isinstance(batch, Mapping):
        return []
    found = [value for name, value in batch.items() if str(name).endswith("attention_mask")]
    return [mask.bool() for mask in found if isinstance(mask, Tensor) and mask.ndim == 2]


def real_places(call: Call, masks: Sequence[Tensor]) -> Tensor:
    """The columns of a call that are none of padding."""
    device = call.x.device
    real = None if call.kernel else _real(call.x.shape[:-1], masks)
    if real is None:
        return torch.arange(call.places, device=device)
    return real.to(device).nonzero()[:, 0]


def _real(shape: Sequence[int], masks: Sequence[Tensor]) -> Tensor | None:
    """Whether each of some rows is no padding; None if the masks are of another shape.

    Where several have the shape, as in an encoder-decoder, a row counts if all say so.
    """
    fitting = [
        mask.reshape(-1)
        for mask in masks
        if tuple(shape[: mask.ndim]) == tuple(mask.shape) or tuple(shape) == (mask.numel(),)
    ]
    if not fitting:
        return None
    real = torch.stack(fitting).all(0)
    times = int(np.prod(shape)) // real.numel()
    return real.repeat_interleave(times)


def named_logits(output: Any) -> Literal["logits"] | None:
    """Whether an output says that it is of classes, of which there are two or more."""
    logits = output.get("logits") if isinstance(output, Mapping) else None
    return "logits" if isinstance(logits, Tensor) and logits.shape[-1] > 1 else None


def is_of_tokens(output: Any, batch: Any, labels: int | None) -> bool:
    """Whether a model gives a number for each token, as many as a batch has of them.

    Args:
        output: What it gives.
        batch: What it is given.
        labels: How many classes it knows.
    """
    found = main_outputs(output)[0]
    tokens = (given for given in tensors_in(batch) if not given.is_floating_point())
    same = any(given.shape == found.shape for given in tokens)
    return same and found.ndim == 2 and found.shape[-1] != labels


def main_outputs(output: Any) -> list[Tensor]:
    """The tensors of an output that are compared."""
    if isinstance(output, Mapping):
        for name in MAIN:
            if isinstance(output.get(name), Tensor):
                return [output[name]]
    found = [t for t in tensors_in(output) if t.is_floating_point() and t.ndim]
    if not found:
        raise InvalidData("the model gives no floating tensor for the first batch")
    return found[:1] if isinstance(output, Mapping) else found


def rows_of(output: Any, masks: Sequence[Tensor], of_tokens: bool = False) -> list[NDArray[Any]]:
    """The outputs as (items, features), float32, none of padding."""
    found = []
    for tensor in main_outputs(output):
        if tensor.ndim > 3:
            tensor = tensor.movedim(1, -1)
        elif of_tokens and tensor.ndim == 2:
            tensor = tensor[..., None]
        rows = tensor.reshape(-1, tensor.shape[-1] if tensor.ndim > 1 else 1)
        real = _real(tensor.shape[:-1], masks) if tensor.ndim > 1 else None
        if real is not None:
            rows = rows[real.to(rows.device)]
        found.append(rows.detach().float().cpu().numpy())
    return found


def at_most(batches: Iterable[Any], samples: int | None) -> list[Any]:
    """The batches with so many samples in all."""
    found: list[Any] = []
    count = 0
    for number, batch in enumerate(batches, 1):
        left = None if samples is None else samples - count
        if left == 0:
            break
        size = size_of(batch, number)
        if left is not None and size > left:
            batch, size = _first(batch, size, left), left
        found.append(batch)
        count += size
    return found


def _first(batch: Any, size: int, wanted: int) -> Any:
    """The first samples of a batch."""

    def cut(leaf: Any) -> Any:
        whole = isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == size
        return leaf[:wanted] if whole else leaf

    return tree_map(cut, batch)
