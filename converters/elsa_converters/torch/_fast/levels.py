"""Layers whose levels are read straight into packed form: their dense weights are never kept."""

from collections.abc import Callable, Mapping
from fractions import Fraction

import torch
from torch import Tensor, nn

from elsa_converters.torch._fast.layers import FastLayer, fast_class, make_dense, make_fast
from elsa_converters.torch._fast.packed import Packed
from elsa_converters.torch._fast.sparsify import gains, layers_of, may, shared_weights
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
    """Layers by the stored names of their weights, and a function that reads such a level."""

    def __init__(
        self,
        layers: Mapping[str, nn.Module],
        read: Callable[[str, LevelNumber], Tensor],
        wanted: bool | Fraction,
    ) -> None:
        self.layers, self.wanted = layers, wanted
        self._read, self._dtypes = read, dict[str, torch.dtype]()
        for name, module in layers.items():
            if not module.weight.is_meta:  # else it will be that of the file
                self._dtypes[name] = module.weight.dtype

    def read(self, level: LevelNumber) -> Callable[[], None]:
        """Read a level of all layers, and return what lets them have it, which cannot fail."""
        found: dict[str, tuple[Tensor, Packed | None]] = {}

        def read_one(name: str) -> None:
            module, weight = self.layers[name], self._read(name, level)
            weight = weight.to(self._dtypes.get(name, weight.dtype))
            kind = type(module) if isinstance(module, FastLayer) else fast_class(module)
            packed = None
            if kind is not None and self.wanted is not False and may(weight, self.wanted):
                packed = kind.pack_of(weight)
            found[name] = (weight if packed is None else torch.empty(0)), packed

        nbytes = sum(module.weight.numel() * 4 for module in self.layers.values())
        run(read_one, list(self.layers), nbytes)
        for name, (_, packed) in found.items():
            if packed is not None and self.wanted is True and not gains(self.layers[name], packed):
                weight = self._read(name, level).to(packed.values.dtype)
                found[name] = weight, None

        def show() -> None:
            for name, (weight, packed) in found.items():
                module = self.layers[name]
                if packed is not None:
                    make_fast(module, packed, keep_dense=False)
                    continue
                module.weight = nn.Parameter(weight, requires_grad=False)
                if isinstance(module, FastLayer):
                    make_dense(module)

        return show
