"""What can be chosen in a fine-tune."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from elsa_train._errors import BadRecipe


def _adamw(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return AdamW(parameters, weight_decay=0.0, betas=(0.9, 0.99))


@dataclass(frozen=True)
class FinetuneOptions:
    """How levels are fine-tuned together.

    Args:
        rate: The highest learning rate. It rises over `warmup`, a fraction of the steps, and then
            falls to zero along half a cosine.
        warmup: Fraction of the steps over which the rate rises.
        each: Which levels a step trains. "sandwich": the sparsest, the dense network, and one
            between, in turn. "one": one level, as often as `shares` says.
        shares: How many steps of a round each level gets, the dense network last. Default: three
            eighths for the sparsest, an eighth for the dense network.
        train: "all", or "own": biases, norms and statistics of each level, which leaves the dense
            network exactly as it was.
        classes: "logits", if these are the model's output; then levels learn the original's
            probabilities. Outputs that are called `logits` need no word of it. Otherwise levels
            learn the outputs themselves.
        temperature: Divides both networks' logits.
        hidden: A regular expression on names of modules. The distance of their outputs from the
            original's is added to the loss.
        labels: How much of the loss comes from labels, 0 to 1: of tuples the last item, of mappings
            `labels`. A model that takes `labels` and returns a `loss`, as those of transformers
            do, says itself what that is; else it is the cross entropy.
        dense_bound: The dense network's loss on held-back batches may be so high, or as high as it
            was. Above that, its share of the loss doubles. `None` does not look.
        ema: Decay of a moving average of the weights, which is then what is written; 0 for none.
        amp: Compute in this type: `torch.bfloat16` or `torch.float16`.
        accumulate: Batches of a step.
        clip: The largest norm of a gradient.
        held_back: Batches that are not trained on, if no `validation` is given: the first ones.
        seed: Of the order of levels.
        optimizer: Makes the optimizer of the parameters.

    >>> FinetuneOptions(rate=3e-3, each="one").each
    'one'
    """

    rate: float = 1e-3
    warmup: float = 0.1
    each: Literal["sandwich", "one"] = "sandwich"
    shares: tuple[int, ...] = ()
    train: Literal["all", "own"] = "all"
    classes: Literal["logits"] | None = None
    temperature: float = 1.0
    hidden: str = ""
    labels: float = 0.0
    dense_bound: float | None = 0.01
    ema: float = 0.0
    amp: torch.dtype | None = None
    accumulate: int = 1
    clip: float = 1.0
    held_back: int = 8
    seed: int = 0
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] = _adamw

    def __post_init__(self) -> None:
        """Refuse what can't be meant."""
        expected: dict[str, tuple[bool, str]] = {
            "rate": (self.rate > 0, "above 0"),
            "warmup": (0 <= self.warmup < 1, "0 to below 1"),
            "each": (self.each in ("sandwich", "one"), "'sandwich' or 'one'"),
            "train": (self.train in ("all", "own"), "'all' or 'own'"),
            "classes": (self.classes in ("logits", None), "'logits' or None"),
            "temperature": (self.temperature > 0, "above 0"),
            "labels": (0 <= self.labels <= 1, "0 to 1"),
            "ema": (0 <= self.ema < 1, "0 to below 1"),
            "amp": (
                self.amp in (None, torch.bfloat16, torch.float16),
                "torch.bfloat16 or torch.float16",
            ),
            "accumulate": (self.accumulate >= 1, "1 or more"),
            "clip": (self.clip > 0, "above 0"),
            "held_back": (self.held_back >= 1, "1 or more"),
        }
        for name, (fine, wanted) in expected.items():
            if not fine:
                found: Any = getattr(self, name)
                raise BadRecipe(f"{name}={found!r}: expected {wanted}")
