"""Layers whose levels are read straight into packed form: their dense weights are never kept."""

import threading
from collections.abc import Callable, Mapping
from fractions import Fraction

import torch
from torch import Tensor, nn

from elsa_converters.torch._fast.layers import FastLayer, fast_class, make_dense, make_fast
from elsa_converters.torch._fast.packed import Packed
from elsa_converters.torch._fast.sparsify import gains, is_large, layers_of, may, shared_weights
from elsa_converters.torch._tensors import run
from elsa_format.plugins import LevelNumber


def sparse_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers that can do without dense weights, by the names of these."""
    shared = shared_weights(model)
    return {
        f"{name}.weight" if name else "weight": module
        for name, module in layers_of(model).items()
        if id(module.weight) not in shared and module.weight.device.type in ("cpu", "meta")
    }


class SparseLayers:
    """Layers by the stored names of their weights, and a function that reads such a level.

    It is given memory to read into, if that is large enough, and returns what it has read into.
    """

    def __init__(
        self,
        layers: Mapping[str, nn.Module],
        read: Callable[[str, LevelNumber, Tensor | None], Tensor],
        wanted: bool | Fraction,
    ) -> None:
        self.layers, self.wanted = layers, wanted
        self._read, self._dtypes = read, dict[str, torch.dtype]()
        for name, module in layers.items():
            if not module.weight.is_meta:  # else it will be that of the file
                self._dtypes[name] = module.weight.dtype

    def read(self, level: LevelNumber) -> Callable[[], None]:
        """Read a level of all layers, and return what lets them have it, which cannot fail."""
        found: dict[str, Tensor | Packed] = {}
        memory = threading.local()  # each thread reads into the same: new memory takes longer

        def read_weight(name: str) -> Tensor:
            module = self.layers[name]
            memory.room = self._read(name, level, getattr(memory, "room", None))
            weight = memory.room[: module.weight.numel()].view(module.weight.shape)
            return weight.to(self._dtypes.get(name, weight.dtype))

        def read_one(name: str) -> None:
            module, weight = self.layers[name], read_weight(name)
            kind = type(module) if isinstance(module, FastLayer) else fast_class(module)
            packed = None
            if kind is not None and self.wanted is not False and may(weight, self.wanted):
                packed = kind.pack_of(weight)
            found[name] = weight.clone() if packed is None else packed

        nbytes = sum(module.weight.numel() * 4 for module in self.layers.values())
        run(read_one, list(self.layers), nbytes)
        large = is_large(self.layers.values())
        for name, weights in found.items():  # here: threads would be timed together
            timed = isinstance(weights, Packed) and self.wanted is True
            if timed and not gains(self.layers[name], weights, large):
                found[name] = read_weight(name).clone()

        def show() -> None:
            for name, weights in found.items():
                module = self.layers[name]
                if isinstance(weights, Packed):
                    make_fast(module, weights, keep_dense=False)
                    continue
                module.weight = nn.Parameter(weights, requires_grad=False)
                if isinstance(module, FastLayer):
                    make_dense(module)

        return show
