"""What a library offers to calibration: a network whose layers can be looked at and replaced."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True)
class Layer:
    """A layer as calibration sees it: y = scale * (W x) + bias, where x are columns of inputs.

    A fully connected layer, or a convolution whose patches are the columns. Grouped ones have a
    matrix for each group.
    """

    name: str
    """The tensor of its weight, as it is stored."""
    dtype: np.dtype[Any]
    """Of the stored weight."""
    groups: int
    rows: int
    """Outputs of each group."""
    columns: int
    """Inputs of each group: channels x kernel, the kernel's places of a channel side by side."""
    kernel: int = 1
    """Places of the kernel: what N:M patterns step over."""
    bias: bool = True
    """Whether every level can have a bias of its own."""
    scale: bool = True
    """Whether every level can have a factor of its own for each output."""
    nested: bool = True
    """Whether the weight carries counters; if not, every level has a small weight of its own.

    That is for depthwise convolutions and for the scales of norms (groups = channels, rows = 1).
    """

    @property
    def shape(self) -> tuple[int, int, int]:
        """That of the weight, as matrices."""
        return self.groups, self.rows, self.columns


@dataclass(frozen=True)
class Weights:
    """What a layer computes with, in one network."""

    weight: Array
    """Of the layer's shape and dtype: zeros where the level has none."""
    bias: Array | None = None
    """float32, groups * rows; None where the layer can have none."""
    scale: Array | None = None
    """float32, groups * rows; None stands for ones."""


class Walk(ABC):
    """A network on its way through some samples, stopped before a stage.

    Several walks are under way at a time: the original network's, and one for each level and the
    dense network. What they keep beyond the model's limit of memory is in temporary files.
    """

    @abstractmethod
    def inputs(self, layer: Layer) -> Iterator[Array]:
        """The columns that a layer of this stage multiplies, batch after batch.

        float32, (places, groups, columns). At most `Model.places` in all, the same ones in every
        walk through the same samples; none of padding.
        """

    @abstractmethod
    def advance(self, weights: Mapping[str, Weights]) -> None:
        """Give the layers of this stage these weights, and go on to the next stage.

        Layers that are not mentioned keep the original weights.
        """

    @abstractmethod
    def outputs(self, weights: Mapping[str, Weights] = {}) -> Iterator[list[Array]]:
        """The network's outputs, batch after batch, if all later layers are the original ones.

        `weights` replaces some of this stage's. Each output is (items, features), float32: an item
        is a sample, or a position or token of one; none of padding. The walk stays where it is.
        """

    @abstractmethod
    def close(self) -> None:
        """Give back memory and temporary files."""


class Model(ABC):
    """A network and the samples to calibrate it with."""

    stages: Sequence[Sequence[Layer]]
    """The layers in the order they run; those of a stage need nothing of one another."""
    batches: Sequence[int]
    """How many samples each batch holds; samples keep their order."""
    classes: Literal["probabilities", "logits"] | None = None
    """What the first output holds of classes; None if it is no classifier's."""
    head: str | None = None
    """The layer whose outputs, but for a softmax, the first output is, row for class."""
    places: int = 16384
    """Most columns that are taken of a layer's inputs, over all samples."""

    @abstractmethod
    def original(self, layer: Layer) -> Weights:
        """The layer's own weights; its scale is None."""

    @abstractmethod
    def walk(self, batches: Sequence[int]) -> Walk:
        """A walk through some of the batches, by number, stopped before the first stage."""

    @abstractmethod
    def weight_as_stored(self, layer: Layer, weight: Array) -> Array:
        """The weight in the shape and order in which its tensor is stored; dtype and bits stay."""

    @abstractmethod
    def varying(self, layer: Layer, weights: Weights) -> Mapping[str, Array]:
        """The other tensors of a network that these weights determine, by name, as stored.

        Bias, and scale where that is a tensor: they are stored per level, as is the weight itself
        of a layer that is not nested. The names are the same for all weights of a layer.
        """
