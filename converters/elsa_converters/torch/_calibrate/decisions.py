"""Choices that a network makes by values, such as which expert a token goes to."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from elsa_converters.torch._calibrate.calls import tensors_in

_TAKEN = torch.topk, Tensor.topk, torch.sort, Tensor.sort
"""Functions that give values and where these are."""
_LARGEST = torch.argmax, Tensor.argmax, torch.argsort, Tensor.argsort
_TRUE = torch.nonzero, Tensor.nonzero, torch.where, Tensor.where


def decides(function: Any, args: Sequence[Any]) -> bool:
    """Whether a function chooses by values, so that what follows may be other modules."""
    if function in _TAKEN or function in _LARGEST:
        return isinstance(args[0], Tensor) and args[0].is_floating_point()
    return function in _TRUE and len(args) == 1


class Decisions:
    """The choices of the original network for one batch, that others are to make, too.

    Without them, an expert would not see the same tokens in each network.
    """

    def __init__(self) -> None:
        self._kept: dict[int, list[list[Tensor]]] = {}
        self._replayed: dict[int, int] | None = None

    def __bool__(self) -> bool:
        return bool(self._kept)

    def again(self) -> "Decisions":
        """The same choices, for another run."""
        other = Decisions()
        other._kept, other._replayed = self._kept, {}
        return other

    def of(
        self,
        block: int | None,
        function: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        result: Any,
    ) -> Any:
        """What the function gives, with the choices that are known."""
        if block is None or not decides(function, args):
            return result
        if function not in _TAKEN:
            known = self._next(block, tensors_in(result))
            return tuple(known) if isinstance(result, tuple) else known[0]
        (places,) = self._next(block, [result[1]])
        if self._replayed is None:
            return result
        axis, kind = kwargs.get("dim", _axis(function, args)), type(result)
        return kind((args[0].gather(axis, places), places))

    def _next(self, block: int, found: list[Tensor]) -> list[Tensor]:
        kept = self._kept.setdefault(block, [])
        if self._replayed is None:
            kept.append(found)
            return found
        at = self._replayed.get(block, 0)
        self._replayed[block] = at + 1
        return kept[at] if at < len(kept) else found


def _axis(function: Any, args: Sequence[Any]) -> int:
    """The axis of a function's arguments: the last, unless they say otherwise."""
    at = 2 if function in (torch.topk, Tensor.topk) else 1
    return int(args[at]) if len(args) > at and args[at] is not None else -1
