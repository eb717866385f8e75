"""The layers of a module as calibration sees them, and back."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from elsa_converters.calibrate import Layer, Weights
from elsa_converters.torch._calibrate.calls import Call, Key
from elsa_converters.torch._calibrate.order import Order, Use
from elsa_converters.torch._tensors import arrays

Array = NDArray[Any]


class Held(NamedTuple):
    """A tensor of a module, or the part of one that is stored under a name of its own."""

    tensor: Tensor
    matrix: int | None = None
    """Which of the first axis, where there is one for each expert."""
    rows: slice = slice(None)
    """Which of the second axis then."""

    @property
    def key(self) -> Key:
        return id(self.tensor), self.matrix

    @property
    def part(self) -> Tensor:
        return self.tensor if self.matrix is None else self.tensor[self.matrix][self.rows]


@dataclass(frozen=True)
class Place:
    """Where a layer is in a module: its tensors, and their names."""

    layer: Layer
    held: Held
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
        weight = self.matrices(content(self.held.part))
        if self.norm is not None or self.call.bias is not None:
            return Weights(weight, self._own_bias(len(weight) * weight.shape[1]))
        return Weights(weight)

    def _own_bias(self, count: int) -> Array:
        bias = self.call.bias
        if bias is None:
            return np.zeros(count, np.float32)
        found: Array = bias.detach().float().cpu().numpy().reshape(-1)[self._own_rows]
        return found

    @property
    def _own_rows(self) -> slice:
        return slice(None) if self.held.matrix is None else self.held.rows

    def matrices(self, weight: Array) -> Array:
        """A weight as it is stored, as a matrix for each group."""
        return np.ascontiguousarray(weight.T if self.call.inputs_first else weight).reshape(
            self.layer.shape
        )

    def stored(self, weight: Array) -> Array:
        """A matrix for each group, as the weight is stored."""
        shape = tuple(self.held.part.shape)
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
        """scale * (z - own bias) + bias, in (z - mean) * weight / deviation, which follows."""
        norm, names = self.use.norm, self.norm
        assert norm is not None
        assert names is not None
        mean, weight = norm.mean.detach().cpu().double(), norm.weight.detach().cpu().double()
        own = torch.from_numpy(self._own_bias(len(mean))).double()
        scale, bias = torch.ones_like(mean), own
        if weights.scale is not None:
            scale = torch.from_numpy(weights.scale).double()
        if weights.bias is not None:
            bias = torch.from_numpy(weights.bias).double()
        return {
            names[0]: (own + (mean - bias) / scale).to(norm.mean.dtype),
            names[1]: (weight * scale).to(norm.weight.dtype),
        }

    def replace(
        self, weights: Weights, found: dict[int, Tensor], before: Mapping[int, Tensor]
    ) -> None:
        """Add what stands for the module's tensors in a network of these weights."""
        own: dict[str, Tensor] = {}
        if self.norm is not None:
            assert self.use.norm is not None
            own = dict(zip(self.norm, (self.use.norm.mean, self.use.norm.weight), strict=True))
        elif self.bias is not None:
            assert self.call.bias is not None
            own = {self.bias: self.call.bias}
        for name, tensor in self.varying(weights).items():
            found[id(own[name])] = tensor.to(own[name].device)
        whole, part = self.held.tensor, self.held.part
        flat = torch.from_numpy(self.stored(weights.weight).reshape(-1).view(np.uint8).copy())
        new = flat.view(part.dtype).reshape(part.shape).to(part.device)
        if self.held.matrix is not None:
            if id(whole) not in found:
                found[id(whole)] = before.get(id(whole), whole).detach().clone()
            found[id(whole)][self.held.matrix][self.held.rows] = new
        else:
            found[id(whole)] = new


class Layers:
    """The layers of a network, in stages; and the weights that have no levels, and why.

    Args:
        model: The module.
        named: Its tensors, by the names they are stored by.
        order: What runs have shown of it.
        wanted: Why a layer is not to be nested, if it is not.
    """

    def __init__(
        self,
        model: nn.Module,
        named: Mapping[str, Held],
        order: Order,
        wanted: Callable[[str, Layer], str | None],
    ) -> None:
        self.places: dict[str, Place] = {}
        self.stages: list[list[Layer]] = []
        self.blocks: list[int] = []
        """The block of each stage."""
        self.left: dict[str, str] = {}
        named = dict(_with_matrices(named, order))
        names: dict[int, list[str]] = {}
        for name, held in named.items():
            if held.matrix is None:
                names.setdefault(id(held.tensor), []).append(name)
        alike = _Alike(model, named, order)
        for name, held in named.items():
            tensor, tied = held.tensor, names.get(id(held.tensor), [name])
            if tensor.ndim < 2 or not tensor.is_floating_point():
                continue
            use = order.uses.get(held.key) or alike.use_of(name, held)
            if use is None:
                self.left[name] = "is not called as a layer's weight"
            elif name != tied[0]:
                self.left[name] = f"is tied to {tied[0]!r}"
            elif id(tensor) in order.others:
                self.left[name] = "is used in other ways, too"
            else:
                place = _place(name, held, use, names, order)
                if (why := wanted(name, place.layer)) is not None:
                    self.left[name] = why
                else:
                    self.places[name] = place
        stages: dict[tuple[int, int], list[Layer]] = {}
        for place in self.places.values():
            key = place.use.block, place.use.depth
            stages.setdefault(key, []).append(place.layer)
        for key in sorted(stages):
            self.stages.append(stages[key])
            self.blocks.append(key[0])


def _with_matrices(named: Mapping[str, Held], order: Order) -> Iterator[tuple[str, Held]]:
    """The tensors; those of experts in one tensor one by one."""
    experts = {number for number, matrix in order.uses if matrix is not None}
    for name, held in named.items():
        if held.matrix is None and id(held.tensor) in experts:
            for matrix in range(len(held.tensor)):
                yield f"{name}[{matrix}]", Held(held.tensor, matrix)
        else:
            yield name, held


class _Alike:
    """Layers that no sample has called, although it has others that are like them: experts."""

    def __init__(self, model: nn.Module, named: Mapping[str, Held], order: Order) -> None:
        # Not `module.weight`: a parametrized one is computed, and may change the module.
        linear = (m for m in model.modules() if isinstance(m, nn.Linear))
        self._linear = {id(m._parameters.get("weight")): m for m in linear}
        self._matrices = {number: use for (number, m), use in order.uses.items() if m is not None}
        self._called: dict[str, list[tuple[str, Use]]] = {}
        for name, held in named.items():
            if (use := order.uses.get(held.key)) is not None:
                self._called.setdefault(_pattern(name), []).append((name, use))

    def use_of(self, name: str, held: Held) -> Use | None:
        """How a layer would be used."""
        if held.matrix is not None:
            use = self._matrices.get(id(held.tensor))
            call = None if use is None else Call(held.tensor[held.matrix], None, use.call.x)
        else:
            use = self._nearest(name)
            module = self._linear.get(id(held.tensor))
            call = None
            if use is not None and module is not None:
                call = Call(module.weight, module.bias, use.call.x)
        if use is None or call is None:
            return None
        return Use(call, use.block, use.depth, calls=1)

    def _nearest(self, name: str) -> Use | None:
        """The use of the layer that differs in the number of an expert alone."""
        found = [(_common(name, other), use) for other, use in self._called.get(_pattern(name), ())]
        return max(found, key=lambda pair: pair[0])[1] if found else None


def _pattern(name: str) -> str:
    return re.sub(r"\d+", "#", name)


def _common(name: str, other: str) -> int:
    """How many parts names have in common, from the first on."""
    parts = list(zip(name.split("."), other.split("."), strict=False))
    return next((at for at, (one, two) in enumerate(parts) if one != two), len(parts))


def _place(
    name: str, held: Held, use: Use, names: Mapping[int, Sequence[str]], order: Order
) -> Place:
    call, shape = use.call, held.part.shape
    rows, columns = (shape[1], shape[0]) if call.inputs_first else (shape[0], shape[1:].numel())
    rows //= call.groups
    depthwise = call.groups > 1 and shape[1] == 1
    norm, bias = _norm(use, names, order), None
    if norm is None and call.bias is not None and _alone(call.bias, order):
        bias = names.get(id(call.bias), [None])[0]
    layer = Layer(
        name,
        content(held.part[:0]).dtype,
        call.groups,
        rows,
        columns,
        kernel=max(1, shape[2:].numel()) if call.kernel else 1,
        bias=norm is not None or bias is not None,
        scale=norm is not None,
        nested=not depthwise,
    )
    return Place(layer, held, use, bias, norm)


def _alone(bias: Tensor, order: Order) -> bool:
    return order.biases.get(id(bias), 0) <= 1 and id(bias) not in order.others


def _norm(use: Use, names: Mapping[int, Sequence[str]], order: Order) -> tuple[str, str] | None:
    """The batch norm's tensors that take the layer's bias and scale, if it has one for itself."""
    norm = use.norm
    if norm is None:
        return None
    users = [other for other in order.uses.values() if other.norm and other.norm.mean is norm.mean]
    mean, weight = names.get(id(norm.mean), ()), names.get(id(norm.weight), ())
    return (mean[0], weight[0]) if len(users) == len(mean) == len(weight) == 1 else None


def content(tensor: Tensor) -> Array:
    """A tensor as a numpy array of its own dtype."""
    return arrays({"": tensor})[""]
