"""A network on its way through samples, block by block."""

import zlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from elsa_converters._errors import InvalidData
from elsa_converters.calibrate import Layer, Walk, Weights
from elsa_converters.torch._calibrate.calls import Call
from elsa_converters.torch._calibrate.network import Run, Stop, blank
from elsa_converters.torch._calibrate.samples import real_places, rows_of

if TYPE_CHECKING:
    from elsa_converters.torch._calibrate.model import TorchModel

Array = NDArray[Any]


class TorchWalk(Walk):
    """Holds what the finished blocks gave for each batch, as far as it is used later."""

    def __init__(self, model: "TorchModel", batches: range) -> None:
        self._model, self._batches = model, batches
        self._stage = self._cut = 0
        self._replaced: dict[int, Tensor] = {}
        self._kept: dict[int, list[Any]] = {batch: [] for batch in batches}
        """For each batch the outputs of finished blocks: stored, or blank."""
        self._go_on()

    def inputs(self, layer: Layer) -> Iterator[Array]:
        """See `Walk`."""
        place = self._model.place(layer)
        for batch in self._batches:
            calls: list[Call] = []

            def seen(call: Call, calls: list[Call] = calls) -> None:
                if call.weight is place.call.weight:
                    calls.append(call)
                    if len(calls) == place.use.calls:
                        raise Stop

            until = self._model.layers.blocks[self._stage] + 1
            self._run(batch, Run(until=until, seen=seen))
            yield self._columns(layer, batch, calls)

    def _columns(self, layer: Layer, batch: int, calls: list[Call]) -> Array:
        """Some of the columns of a batch, the same places in every walk."""
        found = [real_places(call, self._model.masks(batch)) for call in calls]
        every = sum(map(len, found))
        samples = sum(self._model.batches[at] for at in self._batches)
        share = -(-self._model.places * self._model.batches[batch] // samples)
        chosen = np.arange(every)
        if every > share:
            rng = np.random.default_rng([batch, zlib.crc32(layer.name.encode())])
            chosen = np.sort(rng.choice(every, share, replace=False))
        parts, start = [], 0
        for call, places in zip(calls, found, strict=True):
            mine = chosen[(chosen >= start) & (chosen < start + len(places))] - start
            start += len(places)
            columns = call.columns(places[torch.from_numpy(mine).to(places.device)])
            parts.append(columns.reshape(len(mine), layer.groups, layer.columns).float().cpu())
        if not parts:
            return np.zeros((0, layer.groups, layer.columns), np.float32)
        return np.asarray(torch.cat(parts).numpy())

    def advance(self, weights: Mapping[str, Weights]) -> None:
        """See `Walk`."""
        self._replaced |= self._model.replaced(weights)
        self._stage += 1
        self._go_on()

    def _go_on(self) -> None:
        """Compute what is before the block of the stage."""
        network, blocks = self._model.network, self._model.layers.blocks
        last = self._stage == len(blocks)
        cut = len(network.order.blocks) if last else blocks[self._stage]
        if cut == self._cut:
            return
        store, before, live = (
            self._model.store,
            network.order.live(self._cut),
            network.order.live(cut),
        )
        for batch in self._batches:
            run = Run(until=cut)
            self._run(batch, run)
            kept = self._kept[batch]
            for at in before - live:
                output = store.get(kept[at])
                store.drop(kept[at])
                kept[at] = blank(output)
            for at in range(self._cut, cut):
                if at not in run.outputs:
                    raise InvalidData(f"batch {batch + 1} runs other modules than the first one")
                output = run.outputs[at]
                kept.append(store.put(output) if at in live else blank(output))
        for block in network.order.blocks[self._cut : cut]:
            for tensor in (*block.parameters(), *block.buffers()):
                self._replaced.pop(id(tensor), None)
        self._cut = cut

    def outputs(self, weights: Mapping[str, Weights] = {}) -> Iterator[list[Array]]:
        """See `Walk`."""
        others = self._model.replaced(weights)
        for batch in self._batches:
            output = self._run(batch, Run(), others)
            yield rows_of(output, self._model.masks(batch))

    def _run(self, batch: int, run: Run, others: Mapping[int, Tensor] = {}) -> Any:
        get = self._model.store.get
        run.before = [get(output) for output in self._kept[batch]]
        run.replaced = {**self._replaced, **others}
        return self._model.network.run(self._model.moved(batch), run)

    def close(self) -> None:
        """See `Walk`."""
        for kept in self._kept.values():
            for at in self._model.network.order.live(self._cut):
                self._model.store.drop(kept[at])
        self._kept, self._replaced = {}, {}
