"""Which weights to keep: the best-scored within a budget, exactly, ties to the lower index.

Scores become integers in the same order, and thresholds are found digit by digit in counts of
these, so that no tensor is sorted or joined with others.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from elsa_format.levels import Pattern

FROZEN = 0x7FFFFFFF
"""Above every score, NaN included: what is frozen is kept."""

DIGIT = 16


def keys(score: Tensor, frozen: Tensor) -> Tensor:
    """Scores as integers in the same order, frozen weights above all."""
    words = score.detach().abs().float().view(torch.int32)
    return torch.where(frozen, FROZEN, words)


def select(group: Sequence[Tensor], budget: int) -> list[Tensor]:
    """What to keep of tensors of keys that share a budget.

    >>> kept, = select([keys(torch.tensor([3.0, -1.0, 2.0, 2.0]), torch.zeros(4, dtype=bool))], 2)
    >>> kept.tolist()
    [True, False, True, False]
    """
    if budget >= sum(k.numel() for k in group):
        return [torch.ones_like(k, dtype=torch.bool) for k in group]
    threshold, ties = _threshold(group, budget)
    kept = []
    for k in group:
        equal = k == threshold
        order = equal.reshape(-1).cumsum(0).reshape(k.shape)
        kept.append((k > threshold) | (equal & (order <= ties)))
        ties = max(0, ties - int(order.reshape(-1)[-1])) if k.numel() else ties
    return kept


def _threshold(group: Sequence[Tensor], budget: int) -> tuple[int, int]:
    """The key of the last weight that is kept, and how many with that key are."""
    prefix = 0
    for shift in (DIGIT, 0):
        counts = torch.zeros(1 << DIGIT, dtype=torch.int64)
        for k in group:
            chosen = k if shift else k[(k >> DIGIT) == prefix]
            digits = ((chosen >> shift) & ((1 << DIGIT) - 1)).reshape(-1)
            counts += torch.bincount(digits, minlength=1 << DIGIT).cpu()
        above = counts.flip(0).cumsum(0).flip(0)  # with this digit or a larger one
        digit = int((above >= budget).nonzero().max())
        budget -= int(above[digit] - counts[digit])
        prefix = (prefix << DIGIT) | digit
    return prefix, budget


def select_blocks(k: Tensor, pattern: Pattern, axis: int) -> Tensor:
    """What to keep of one tensor of keys: N of every M neighbours along an axis.

    >>> select_blocks(torch.tensor([[1, 2, 3, 4, 9, 9, 9, 9]]), Pattern(2, 4), axis=1).tolist()
    [[False, False, True, True, True, True, False, False]]
    """
    moved = k.movedim(axis, -1)
    blocks = moved.reshape(*moved.shape[:-1], -1, pattern.m)
    best = blocks.argsort(dim=-1, descending=True, stable=True)[..., : pattern.n]
    kept = torch.zeros_like(blocks, dtype=torch.bool).scatter_(-1, best, True)
    return kept.reshape(moved.shape).movedim(-1, axis).contiguous()
