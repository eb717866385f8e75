"""Matrix products and convolutions as calibration sees them: a matrix times columns of inputs."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import jax
import numpy as np
from jax.extend.core import JaxprEqn
from numpy.typing import NDArray

Array = NDArray[Any]


class Product(ABC):
    """An equation that multiplies inputs by weights; `weights` is the number of that operand."""

    kernel: int = 1
    """Places of the kernel."""

    def __init__(self, equation: JaxprEqn, weights: int) -> None:
        self.equation, self.weights = equation, weights
        self.inputs: Any = equation.invars[1 - weights]
        self.kernels: Any = equation.invars[weights]
        self.outputs: Any = equation.outvars[0]
        self.shape: tuple[int, ...] = self.outputs.aval.shape  # type: ignore[attr-defined]

    @abstractmethod
    def matrices(self, kernel: Array) -> Array:
        """The operand's elements as (groups, rows, columns)."""

    @abstractmethod
    def rows(self) -> Array:
        """The row, of all groups' rows, of which each output is."""

    @property
    @abstractmethod
    def where(self) -> Sequence[int]:
        """The sizes of the axes along which the columns are, that of the samples first."""

    @abstractmethod
    def columns(self, inputs: Array, chosen: Array) -> Array:
        """Some of the columns: (places, groups, columns)."""


class Contraction(Product):
    """`dot_general`."""

    @cached_property
    def _axes(self) -> tuple[tuple[list[int], ...], tuple[list[int], ...]]:
        """Axes of the inputs and of the weights: free, of groups, contracted."""
        contracted, groups = self.equation.params["dimension_numbers"]
        found = []
        for value, operand in ((self.inputs, 1 - self.weights), (self.kernels, self.weights)):
            bound = [*groups[operand], *contracted[operand]]
            free = [axis for axis in range(len(value.aval.shape)) if axis not in bound]
            found.append((free, list(groups[operand]), list(contracted[operand])))
        return found[0], found[1]

    def _sizes(self, operand: int) -> list[list[int]]:
        shape = (self.inputs, self.kernels)[operand].aval.shape
        return [[shape[axis] for axis in axes] for axes in self._axes[operand]]

    def matrices(self, kernel: Array) -> Array:
        free, groups, contracted = self._axes[1]
        sizes = self._sizes(1)
        ordered = kernel.transpose(*groups, *free, *contracted)
        return ordered.reshape(prod(sizes[1]), prod(sizes[0]), prod(sizes[2]))

    def rows(self) -> Array:
        (mine, groups, _), (others, _, _) = self._sizes(1), self._sizes(0)
        numbers = np.arange(prod(groups) * prod(mine)).reshape(*groups, *mine)
        between = list(range(len(groups), len(groups) + len(others)))
        after = [axis + len(mine) for axis in between]
        return np.broadcast_to(
            np.expand_dims(numbers, between if self.weights else after), self.shape
        )

    @property
    def where(self) -> Sequence[int]:
        return self._sizes(0)[0]

    def columns(self, inputs: Array, chosen: Array) -> Array:
        free, groups, contracted = self._axes[0]
        sizes = self._sizes(0)
        # Places first, so that only those chosen are put into order.
        ordered = inputs.transpose(*free, *groups, *contracted)
        some = ordered[np.unravel_index(chosen, sizes[0])]
        return some.reshape(len(chosen), prod(sizes[1]), prod(sizes[2]))


@dataclass(frozen=True)
class _Window:
    """One axis of a convolution."""

    size: int
    stride: int
    dilation: int

    def taken(self, places: Array) -> Array:
        """The inputs under the kernel at some places: (places, size)."""
        return places[:, None] * self.stride + np.arange(self.size) * self.dilation


class Convolution(Product):
    """`conv_general_dilated`, whose right operand is the kernel."""

    def __init__(self, equation: JaxprEqn, weights: int) -> None:
        super().__init__(equation, weights)
        self._of = equation.params["dimension_numbers"]
        self._groups = equation.params["feature_group_count"]
        spatial = [self.kernels.aval.shape[axis] for axis in self._of.rhs_spec[2:]]
        strides = equation.params["window_strides"], equation.params["rhs_dilation"]
        self._windows = [_Window(*each) for each in zip(spatial, *strides, strict=True)]
        self.kernel = prod(spatial)

    def matrices(self, kernel: Array) -> Array:
        ordered = kernel.transpose(self._of.rhs_spec)
        outputs, channels = ordered.shape[:2]
        return ordered.reshape(self._groups, outputs // self._groups, channels * self.kernel)

    def rows(self) -> Array:
        features = self._of.out_spec[1]
        shape = [1] * len(self.shape)
        shape[features] = self.shape[features]
        return np.broadcast_to(np.arange(shape[features]).reshape(shape), self.shape)

    @property
    def where(self) -> Sequence[int]:
        return [self.shape[axis] for axis in (self._of.out_spec[0], *self._of.out_spec[2:])]

    def columns(self, inputs: Array, chosen: Array) -> Array:
        batch, channels, *spatial = self._of.lhs_spec
        ordered = inputs.transpose(batch, *spatial, channels)
        params = self.equation.params
        gaps = [spread - 1 for spread in params["lhs_dilation"]]
        around = [(0, 0, 0)]
        around += [(*pad, gap) for pad, gap in zip(params["padding"], gaps, strict=True)]
        padded = _padded(ordered, [*around, (0, 0, 0)])
        sample, *places = np.unravel_index(chosen, self.where)
        count, dimensions = len(chosen), len(spatial)
        at: list[Array] = [sample.reshape(count, *[1] * dimensions)]
        for axis, (place, window) in enumerate(zip(places, self._windows, strict=True)):
            shape = [count, *[1] * dimensions]
            shape[1 + axis] = window.size
            at.append(window.taken(place).reshape(shape))
        patches = padded[tuple(at)]  # (places, *kernel, channels)
        patches = np.moveaxis(patches.reshape(count, self.kernel, -1), 1, 2)
        return np.ascontiguousarray(patches).reshape(count, self._groups, -1)


def _padded(array: Array, around: list[tuple[int, int, int]]) -> Array:
    if not any(any(each) for each in around):
        return array
    return np.asarray(jax.lax.pad(array, array.dtype.type(0), around))
