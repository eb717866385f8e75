"""Calls of layers: what torch's functions for them are given, and the columns they multiply."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves

Replaced = Mapping[int, Tensor]
"""Tensors that stand for others, by the `id` of those."""
Key = tuple[int, int | None]
"""Which weight: the `id` of a parameter, and which matrix of it if it has one for each expert."""


@dataclass(frozen=True)
class Call:
    """A product of a weight with columns of inputs, plus a bias."""

    weight: Tensor
    bias: Tensor | None
    x: Tensor
    inputs_first: bool = False
    """Whether the weight is (inputs, outputs), as Conv1D of transformers has it."""
    stride: tuple[int, ...] = ()
    padding: tuple[tuple[int, int], ...] = ()
    dilation: tuple[int, ...] = ()
    groups: int = 1

    @property
    def kernel(self) -> tuple[int, ...]:
        """The size of a convolution's kernel; () of what is none."""
        return tuple(self.weight.shape[2:])

    @property
    def places(self) -> int:
        """How many columns there are."""
        if not self.kernel:
            return math.prod(self.x.shape[:-1])
        return len(self._batched) * math.prod(self._sizes)

    def columns(self, places: Tensor) -> Tensor:
        """Some of the columns: (places, inputs), or (places, channels, *kernel)."""
        if not self.kernel:
            return self.x.reshape(-1, self.x.shape[-1])[places]
        sides = [side for pair in reversed(self.padding) for side in pair]
        x = functional.pad(self._batched, sides).movedim(1, -1)
        sample, *starts = torch.unravel_index(places, (len(x), *self._sizes))
        index = [_along(sample[:, None], 0, len(self.kernel))]
        for axis, (start, size) in enumerate(zip(starts, self.kernel, strict=True)):
            steps = torch.arange(size, device=x.device) * self.dilation[axis]
            at = start[:, None] * self.stride[axis] + steps
            index.append(_along(at, axis, len(self.kernel)))
        return x[tuple(index)].movedim(-1, 1)

    @property
    def _batched(self) -> Tensor:
        return self.x if self.x.ndim == self.weight.ndim else self.x[None]

    @property
    def _sizes(self) -> list[int]:
        """The size of the output along each axis of the kernel."""
        each = zip(
            self._batched.shape[2:],
            self.kernel,
            self.stride,
            self.padding,
            self.dilation,
            strict=True,
        )
        return [(n + sum(p) - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in each]


def _along(index: Tensor, axis: int, axes: int) -> Tensor:
    """(places, n) as (places, 1, …, n, …, 1), with n at one of the axes of a kernel."""
    shape = [1] * axes
    shape[axis] = index.shape[1]
    return index.reshape(-1, *shape)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Call:
    return Call(weight, bias, input)


def _addmm(input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Any:
    return Call(mat2, input, mat1, inputs_first=True) if beta == alpha == 1 else None


def _convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | str | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Call:
    axes = weight.ndim - 2
    dilations = _each(dilation, axes)
    if padding == "same":
        totals = [d * (k - 1) for d, k in zip(dilations, weight.shape[2:], strict=True)]
        pairs = tuple((total // 2, total - total // 2) for total in totals)
    else:
        pairs = tuple((p, p) for p in _each(0 if padding == "valid" else padding, axes))
    strides = _each(stride, axes)
    return Call(weight, bias, input, False, strides, pairs, dilations, groups)


def _each(value: Any, axes: int) -> tuple[int, ...]:
    found = (value,) if isinstance(value, int) else tuple(value)
    return found * axes if len(found) == 1 else found


_READERS: dict[Any, Callable[..., Call | None]] = {
    functional.linear: _linear,
    torch.addmm: _addmm,
    functional.conv1d: _convolution,
    functional.conv2d: _convolution,
    functional.conv3d: _convolution,
}


def call_of(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call | None:
    """What a function is given, if it is one of a layer."""
    reader = _READERS.get(function)
    call = reader(*args, **kwargs) if reader else None
    whole = call is not None and isinstance(call.weight, Tensor) and call.weight.ndim > 1
    return call if whole else None


class Matrices:
    """The matrices that modules have taken out of parameters of three dimensions, as experts do."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[Tensor, Key]] = {}
        """By the `id` of what was taken; it is kept, so that no other tensor gets its `id`."""

    def note(self, function: Any, args: Sequence[Any], result: Any) -> bool:
        """Remember a matrix if the function has taken one."""
        if function is not Tensor.__getitem__ or not isinstance(args[0], nn.Parameter):
            return False
        index = args[1]
        if isinstance(index, Tensor) and index.ndim == 0 and index.dtype != torch.bool:
            index = int(index)
        if args[0].ndim != 3 or type(index) is not int:
            return False
        self._found[id(result)] = result, (id(args[0]), index % len(args[0]))
        return True

    def key_of(self, weight: Tensor) -> Key:
        """Which weight it is."""
        found = self._found.get(id(weight))
        return (id(weight), None) if found is None else found[1]


def replace(replaced: Replaced, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a function is given, some tensors replaced."""
    other = {name: replaced.get(id(value), value) for name, value in kwargs.items()}
    return tuple(replaced.get(id(value), value) for value in args), other


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors of nested tuples, lists and mappings."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
