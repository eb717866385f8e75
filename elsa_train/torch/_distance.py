"""How far a network's answers are from those of the original: what a fine-tune makes small."""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, log_softmax

from elsa_train._errors import BadData

Classes = Literal["logits"]
MAIN = "logits", "last_hidden_state"
"""What of a mapping of outputs is compared; else its first."""
IGNORED = -100
"""The label of places that do not count, as in transformers."""


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in a batch, or in what a module returns."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from tensors_in(inner)
    elif isinstance(value, tuple | list):
        for inner in value:
            yield from tensors_in(inner)


def answer_of(outputs: Any) -> Tensor:
    """The tensor that is compared: of several outputs, the logits or else the first."""
    if isinstance(outputs, Mapping):
        for name in MAIN:
            if isinstance(outputs.get(name), Tensor):
                return outputs[name]
    for tensor in tensors_in(outputs):
        if tensor.is_floating_point() and tensor.ndim:
            return tensor
    raise BadData("the model returns no floating-point tensor for a batch")


def holds_logits(outputs: Any) -> bool:
    """Whether an output says that it is of classes, of which there are two or more."""
    logits = outputs.get("logits") if isinstance(outputs, Mapping) else None
    return isinstance(logits, Tensor) and logits.shape[-1] > 1


def rows_of(answer: Tensor, real: Tensor | None) -> Tensor:
    """An answer as (items, features), without those of padding."""
    rows = answer.reshape(-1, answer.shape[-1] if answer.ndim > 1 else 1)
    if real is not None and tuple(real.shape) == tuple(answer.shape[:-1]):
        rows = rows[real.reshape(-1).bool()]
    return rows.float()


def divergence(rows: Tensor, wanted: Tensor, temperature: float = 1.0) -> Tensor:
    """The Kullback-Leibler divergence of logits from those that are wanted, nats an item.

    >>> round(float(divergence(torch.tensor([[0.0, 0.0]]), torch.tensor([[1.0, -1.0]]))), 3)
    0.328
    """
    log_p = log_softmax(wanted / temperature, -1)
    log_q = log_softmax(rows / temperature, -1)
    return (log_p.exp() * (log_p - log_q)).sum(-1).mean() * temperature**2


def relative(rows: Tensor, wanted: Tensor) -> Tensor:
    """The squared distance, relative to the variance of what is wanted.

    >>> float(relative(torch.tensor([[1.0], [1.0]]), torch.tensor([[0.0], [2.0]])))
    1.0
    """
    spread = (wanted - wanted.mean(0)).square().sum()
    return (rows - wanted).square().sum() / spread.clamp_min(torch.finfo(spread.dtype).tiny)


def from_labels(answer: Tensor, labels: Tensor) -> Tensor:
    """The cross entropy of labels."""
    return cross_entropy(answer.reshape(-1, answer.shape[-1]).float(), labels.reshape(-1),
                         ignore_index=IGNORED)  # fmt: skip
