"""A PyTorch module as a model to calibrate."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from elsa_converters._errors import InvalidData
from elsa_converters.calibrate import Layer, Model, Store, Weights
from elsa_converters.torch._calibrate.decisions import Decisions
from elsa_converters.torch._calibrate.layers import Held, Layers, Place, content
from elsa_converters.torch._calibrate.network import Network, Run, one_thread, tensors_of
from elsa_converters.torch._calibrate.samples import (
    is_of_tokens,
    main_outputs,
    masks_of,
    moved,
    named_logits,
    size_of,
)
from elsa_converters.torch._calibrate.walk import TorchWalk
from elsa_converters.torch._load import unwrapped
from elsa_format import InvalidOption

Array = NDArray[Any]
Classes = Literal["probabilities", "logits"]
MAX_MEMORY = 1 << 29
"""Bytes of what blocks gave, before a file is used, unless told otherwise."""


class TorchModel(Model):
    """A module and batches of what it takes; neither is changed.

    Args:
        model: The module.
        batches: What it is called with: a tensor, a tuple of arguments, or a mapping of them.
        named: Its tensors, and where they are, under the names that they are stored by.
        wanted: Why a tensor is not to be nested, if it is not.
        classes: What a classifier's first output holds. Outputs that are called `logits` do.
        padding: Says of a batch which places are padding. Default: its attention masks do.
        max_memory: Bytes that walks keep in memory.
        threads: How many batches run at a time.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Iterable[Any],
        *,
        named: Mapping[str, Held] | None = None,
        wanted: Callable[[str, Layer], str | None] = lambda name, layer: None,
        classes: Classes | None = None,
        padding: Callable[[Any], Any] | None = None,
        max_memory: int | None = None,
        threads: int | None = None,
    ) -> None:
        model = unwrapped(model)
        check_loaded(model)
        self._samples = list(batches)
        if not self._samples:
            raise InvalidData("no batches: calibration needs samples")
        self.batches = [size_of(batch, at) for at, batch in enumerate(self._samples, 1)]
        self.of_tokens = False
        """Whether the outputs are a number for each token."""
        self._named_logits: Classes | None = None
        self._config = getattr(model, "config", None)
        self._padding, self.threads = padding, threads
        self.device = next((t.device for t in tensors_of(model)), torch.device("cpu"))
        with one_thread():
            self.network = Network(model, self.moved(0))
            self.decisions = self._decided()
        if self.network.random or self.device.type != "cpu":
            self.threads = 1
        self.layers = Layers(model, named or held_by(model), self.network.order, wanted)
        self.stages = self.layers.stages
        self.classes = classes or self._named_logits
        self.of_tokens = self.of_tokens and classes is None
        heads = [name for name, place in self.layers.places.items() if place.use.answer]
        self.head = heads[0] if heads and self.classes is not None else None
        self.store = Store(MAX_MEMORY if max_memory is None else max_memory)

    def _decided(self) -> list[Decisions] | None:
        """What the network chooses by values, for each batch, if it does so."""
        found = []
        for batch in range(len(self._samples)):
            run = Run(decisions=Decisions())
            self._check_outputs(self.network.run(self.moved(batch), run), batch)
            assert run.decisions is not None
            if not run.decisions:
                return None
            found.append(run.decisions)
        return found

    def _check_outputs(self, output: Any, batch: int) -> None:
        if not batch:
            labels = getattr(self._config, "num_labels", None)
            self.of_tokens = is_of_tokens(output, self._samples[batch], labels)
            self._named_logits = None if self.of_tokens else named_logits(output)
        if not all(bool(tensor.isfinite().all()) for tensor in main_outputs(output)):
            raise InvalidData(f"batch {batch + 1}: the model's outputs are NaN or infinite")

    def place(self, layer: Layer) -> Place:
        """Where a layer is in the module."""
        return self.layers.places[layer.name]

    def moved(self, batch: int) -> Any:
        """A batch on the module's device, for the module to do with what it will."""
        return moved(self._samples[batch], self.device)

    def masks(self, batch: int) -> list[Tensor]:
        """Which places of a batch are no padding."""
        if self._padding is None:
            return masks_of(self._samples[batch])
        return [~torch.as_tensor(self._padding(self._samples[batch])).bool().cpu()]

    def replaced(self, weights: Mapping[str, Weights], before: Mapping[int, Tensor]) -> Any:
        """What stands for the module's tensors where layers have these weights.

        `before` is what stands for them already: of a tensor that holds several layers, such as
        experts, the others stay.
        """
        found: dict[int, Tensor] = {}
        for name, one in weights.items():
            self.layers.places[name].replace(one, found, before)
        return found

    def original(self, layer: Layer) -> Weights:
        return self.place(layer).original()

    def walk(self, batches: Sequence[int]) -> TorchWalk:
        return TorchWalk(self, batches)

    def weight_as_stored(self, layer: Layer, weight: Array) -> Array:
        return self.place(layer).stored(weight)

    def varying(self, layer: Layer, weights: Weights) -> Mapping[str, Array]:
        return {n: content(t) for n, t in self.place(layer).varying(weights).items()}


def held_by(model: nn.Module) -> dict[str, Held]:
    """What the module's state dict holds, tied tensors under each of their names."""
    state = model.state_dict(keep_vars=True)
    return {name: Held(tensor) for name, tensor in state.items() if isinstance(tensor, Tensor)}


def check_loaded(model: nn.Module) -> None:
    """Refuse a module whose tensors have no content yet."""
    if any(tensor.is_meta for tensor in tensors_of(model)):
        raise InvalidOption("the model is on the meta device, or offloaded; load it whole first")
    if any(is_lazy(tensor) for tensor in tensors_of(model)):
        raise InvalidOption("the model has lazy parameters; run it once first")
