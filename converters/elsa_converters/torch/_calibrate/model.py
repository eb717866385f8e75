"""A PyTorch module as a model to calibrate."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from elsa_converters._errors import InvalidData
from elsa_converters.calibrate import Layer, Model, Weights
from elsa_converters.torch._calibrate.layers import Layers, Place, content
from elsa_converters.torch._calibrate.network import Network, Run
from elsa_converters.torch._calibrate.samples import main_outputs, masks_of, moved, size_of
from elsa_converters.torch._calibrate.store import Store
from elsa_converters.torch._calibrate.walk import TorchWalk
from elsa_converters.torch._load import unwrapped
from elsa_format import InvalidOption

Array = NDArray[Any]
MEMORY = 1 << 30
"""Bytes of what blocks gave, before a file is used."""


class TorchModel(Model):
    """A module and batches of what it takes; neither is changed."""

    def __init__(
        self,
        model: nn.Module,
        batches: Sequence[Any],
        *,
        wanted: Callable[[str, Tensor], str | None] = lambda name, tensor: None,
        classes: Literal["probabilities", "logits"] | None = None,
        max_memory: int | None = None,
    ) -> None:
        model = unwrapped(model)
        _check(model)
        self._samples = list(batches)
        if not self._samples:
            raise InvalidData("batches: holds no samples")
        self.batches = [size_of(batch, at) for at, batch in enumerate(self._samples, 1)]
        self.classes = classes
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self.network = Network(model, self.moved(0))
        self.layers = Layers(named_tensors(model), self.network.order, wanted)
        self.stages = self.layers.stages
        self.head = next((n for n, p in self.layers.places.items() if p.use.answer), None)
        if classes is None:
            self.head = None
        self.store = Store(MEMORY if max_memory is None else max_memory)
        self._check_outputs()

    def _check_outputs(self) -> None:
        output = self.network.run(self.moved(0), Run())
        if not all(bool(tensor.isfinite().all()) for tensor in main_outputs(output)):
            raise InvalidData("batches: the model's outputs are not finite for the first batch")

    def place(self, layer: Layer) -> Place:
        """Where a layer is in the module."""
        return self.layers.places[layer.name]

    def moved(self, batch: int) -> Any:
        """A batch on the module's device."""
        return moved(self._samples[batch], self.device)

    def masks(self, batch: int) -> list[Tensor]:
        """Which places of a batch are no padding."""
        return masks_of(self._samples[batch])

    def replaced(self, weights: Mapping[str, Weights]) -> dict[int, Tensor]:
        """What stands for the module's tensors in a network of these weights."""
        found: dict[int, Tensor] = {}
        for name, one in weights.items():
            found |= self.layers.places[name].replaced(one)
        return found

    def original(self, layer: Layer) -> Weights:
        """See `Model`."""
        return self.place(layer).original()

    def walk(self, batches: range) -> TorchWalk:
        """See `Model`."""
        return TorchWalk(self, batches)

    def weight_as_stored(self, layer: Layer, weight: Array) -> Array:
        """See `Model`."""
        return self.place(layer).stored(weight)

    def varying(self, layer: Layer, weights: Weights) -> Mapping[str, Array]:
        """See `Model`."""
        return {n: content(t) for n, t in self.place(layer).varying(weights).items()}


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """What the module's state dict holds, tied tensors under each of their names."""
    state = model.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in state.items() if isinstance(tensor, Tensor)}


def _check(model: nn.Module) -> None:
    tensors = (*model.parameters(), *model.buffers())
    if any(tensor.is_meta for tensor in tensors):
        raise InvalidOption("the model is on the meta device, or offloaded; load it whole first")
    if any(is_lazy(tensor) for tensor in tensors):
        raise InvalidOption("the model has lazy parameters; run it once first")
