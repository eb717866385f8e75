"""The layers of a module as calibration sees them, and back."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from elsa_converters.calibrate import Layer, Weights
from elsa_converters.torch._calibrate.calls import Call
from elsa_converters.torch._calibrate.order import Order, Use
from elsa_converters.torch._tensors import arrays

Array = NDArray[Any]


@dataclass(frozen=True)
class Place:
    """Where a layer is in a module: its tensors, and their names."""

    layer: Layer
    use: Use
    bias: str | None = None
    """The bias that every level may have for itself."""
    norm: tuple[str, str] | None = None
    """The mean and the weight of a batch norm, which take a bias and a scale."""

    @property
    def call(self) -> Call:
        """The first call."""
        return self.use.call

    def original(self) -> Weights:
        """The module's own weights."""
        weight = self.matrices(arrays({"": self.call.weight})[""])
        if self.norm is not None:
            return Weights(weight, np.zeros(weight.shape[0] * weight.shape[1], np.float32))
        bias = self.call.bias
        return Weights(weight, None if bias is None else bias.detach().float().cpu().numpy())

    def matrices(self, weight: Array) -> Array:
        """A weight as it is stored, as a matrix for each group."""
        return np.ascontiguousarray(weight.T if self.call.inputs_first else weight).reshape(
            self.layer.shape
        )

    def stored(self, weight: Array) -> Array:
        """A matrix for each group, as the weight is stored."""
        shape = tuple(self.call.weight.shape)
        if self.call.inputs_first:
            return np.ascontiguousarray(weight.reshape(shape[::-1]).T)
        return weight.reshape(shape)

    def varying(self, weights: Weights) -> dict[str, Tensor]:
        """The other tensors that weights determine."""
        if self.norm is not None:
            return self._in_norm(weights)
        if self.bias is None or weights.bias is None:
            return {}
        own = self.call.bias
        assert own is not None
        return {self.bias: torch.from_numpy(weights.bias).to(own.dtype).reshape(own.shape)}

    def _in_norm(self, weights: Weights) -> dict[str, Tensor]:
        """scale * z + bias, in what follows: (z - mean') * weight' / deviation + shift."""
        norm, names = self.use.norm, self.norm
        assert norm is not None
        assert names is not None
        mean, weight = norm.mean.detach().cpu().double(), norm.weight.detach().cpu().double()
        scale = torch.ones_like(mean)
        if weights.scale is not None:
            scale = torch.from_numpy(weights.scale).double()
        if weights.bias is not None:
            mean = (mean - torch.from_numpy(weights.bias).double()) / scale
        return {
            names[0]: mean.to(norm.mean.dtype),
            names[1]: (weight * scale).to(norm.weight.dtype),
        }

    def replaced(self, weights: Weights) -> dict[int, Tensor]:
        """What stands for the module's tensors in a network of these weights."""
        own: dict[str, Tensor] = {}
        if self.norm is not None:
            assert self.use.norm is not None
            own = dict(zip(self.norm, (self.use.norm.mean, self.use.norm.weight), strict=True))
        elif self.bias is not None:
            assert self.call.bias is not None
            own = {self.bias: self.call.bias}
        found = {
            id(own[name]): new.to(own[name].device) for name, new in self.varying(weights).items()
        }
        weight = self.call.weight
        flat = torch.from_numpy(self.stored(weights.weight).reshape(-1).view(np.uint8).copy())
        new = flat.view(weight.dtype).reshape(weight.shape).to(weight.device)
        return {id(weight): new, **found}


class Layers:
    """The layers of a network, in stages; and the weights that have no levels, and why."""

    def __init__(
        self,
        named: Mapping[str, Tensor],
        order: Order,
        wanted: Callable[[str, Tensor], str | None],
    ) -> None:
        self.places: dict[str, Place] = {}
        self.stages: list[list[Layer]] = []
        self.blocks: list[int] = []
        """The block of each stage."""
        self.left: dict[str, str] = {}
        names: dict[int, list[str]] = {}
        for name, tensor in named.items():
            names.setdefault(id(tensor), []).append(name)
        for number, (name, *others) in names.items():
            tensor = named[name]
            if tensor.ndim < 2 or not tensor.is_floating_point():
                continue
            use = order.uses.get(number)
            reason = wanted(name, tensor) or _left(number, use, others, order)
            if reason is not None:
                self.left[name] = reason
                continue
            assert use is not None
            self.places[name] = _place(name, use, names, order)
        stages: dict[tuple[int, int], list[Layer]] = {}
        for place in self.places.values():
            key = place.use.block, place.use.depth
            stages.setdefault(key, []).append(place.layer)
        for key in sorted(stages):
            self.stages.append(stages[key])
            self.blocks.append(key[0])


def _left(number: int, use: Use | None, others: Sequence[str], order: Order) -> str | None:
    if use is None:
        return "is not called as a layer's weight"
    if others:
        return f"is tied to {others[0]!r}"
    if number in order.others:
        return "is used in other ways, too"
    return None


def _place(name: str, use: Use, names: Mapping[int, Sequence[str]], order: Order) -> Place:
    call = use.call
    shape = call.weight.shape
    rows, columns = (shape[1], shape[0]) if call.inputs_first else (shape[0], shape[1:].numel())
    rows //= call.groups
    depthwise = call.groups > 1 and shape[1] == 1
    norm, bias = _norm(use, names, order), None
    if norm is None and call.bias is not None and _alone(call.bias, order):
        bias = names.get(id(call.bias), [None])[0]
    layer = Layer(
        name,
        arrays({"": call.weight[:0]})[""].dtype,
        call.groups,
        rows,
        columns,
        kernel=max(1, shape[2:].numel()) if call.kernel else 1,
        bias=norm is not None or bias is not None,
        scale=norm is not None,
        nested=not depthwise,
    )
    return Place(layer, use, bias, norm)


def _alone(bias: Tensor, order: Order) -> bool:
    return order.biases.get(id(bias)) == 1 and id(bias) not in order.others


def _norm(use: Use, names: Mapping[int, Sequence[str]], order: Order) -> tuple[str, str] | None:
    """The batch norm's tensors that take the layer's bias and scale, if it has one for itself."""
    norm = use.norm
    if norm is None or use.call.bias is not None:
        return None
    users = [other for other in order.uses.values() if other.norm and other.norm.mean is norm.mean]
    mean, weight = names.get(id(norm.mean), ()), names.get(id(norm.weight), ())
    return (mean[0], weight[0]) if len(users) == len(mean) == len(weight) == 1 else None


def content(tensor: Tensor) -> Array:
    """A tensor as a numpy array of its own dtype."""
    return arrays({"": tensor})[""]
