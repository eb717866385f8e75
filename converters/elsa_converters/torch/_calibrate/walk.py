"""A network on its way through samples, block by block."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from elsa_converters._errors import InvalidData
from elsa_converters.calibrate import Kept, Layer, Walk, Weights
from elsa_converters.torch._calibrate.calls import Call, Key
from elsa_converters.torch._calibrate.kept import drop, get, put
from elsa_converters.torch._calibrate.network import Run, Stop, one_thread, tensors_of
from elsa_converters.torch._calibrate.samples import real_places, rows_of

if TYPE_CHECKING:
    from elsa_converters.torch._calibrate.model import TorchModel

Array = NDArray[Any]
T = TypeVar("T")
LARGE = 1 << 26
"""Bytes of a batch's outputs, such as those of a language model, that are held once only."""


class _Columns:
    """Columns that several layers multiply, kept until each has them."""

    def __init__(self, kept: Kept, layers: int) -> None:
        self._kept, self._left = kept, layers

    def take(self) -> Array:
        """The columns, for one of the layers."""
        array = self._kept.get().copy()
        self.drop()
        return array

    def drop(self) -> None:
        """One layer does without them."""
        self._left -= 1
        if not self._left:
            self._kept.drop()


class TorchWalk(Walk):
    """Holds what the finished blocks gave for each batch, as far as it is used later."""

    def __init__(self, model: "TorchModel", batches: Sequence[int]) -> None:
        self._model, self._batches = model, list(batches)
        self._stage = self._cut = 0
        self._replaced: dict[int, Tensor] = {}
        self._kept: dict[int, list[Any]] = {batch: [] for batch in batches}
        """For each batch the outputs of finished blocks: kept, or blank."""
        self._columns: dict[tuple[str, int], _Columns] = {}
        """Those of this stage's layers that were not asked for yet."""
        try:
            self._go_on()
        except BaseException:
            self.close()
            raise

    def inputs(self, layer: Layer) -> Iterator[Array]:
        def of(batch: int) -> Array:
            kept = self._columns.pop((layer.name, batch), None)
            return self._seen(layer, batch) if kept is None else kept.take()

        return self._each(of)

    def _seen(self, layer: Layer, batch: int) -> Array:
        """The columns of a layer; those of the others of its stage are kept."""
        model = self._model
        stage = [model.place(other) for other in model.stages[self._stage]]
        calls: dict[Key, list[Call]] = {place.held.key: [] for place in stage}
        missing = sum({place.held.key: place.use.calls for place in stage}.values())

        def seen(key: Key, call: Call) -> None:
            nonlocal missing
            if key in calls:
                calls[key].append(call)
                missing -= 1
                if not missing:
                    raise Stop

        known = None if model.decisions is None else model.decisions[batch].again()
        until = model.layers.blocks[self._stage] + 1
        self._run(batch, Run(until=until, seen=seen, decisions=known))
        asked, others = np.zeros(0), dict[tuple[int, ...], list[Layer]]()
        for place in stage:
            mine = calls[place.held.key]
            # Columns of layers that are no convolutions are those of their inputs.
            same = mine if any(call.kernel for call in mine) else [call.x for call in mine]
            others.setdefault(tuple(map(id, same)), []).append(place.layer)
        for alike in others.values():
            columns = self._of(alike[0], batch, calls[model.place(alike[0]).held.key])
            if layer in alike:
                asked = columns
            if later := [other.name for other in alike if other is not layer]:
                kept = _Columns(model.store.put(columns), len(later))
                self._columns |= {(name, batch): kept for name in later}
        return asked

    def _of(self, layer: Layer, batch: int, calls: Sequence[Call]) -> Array:
        """Some of the columns of a batch, the same places in every walk."""
        model = self._model
        found = [real_places(call, model.masks(batch)) for call in calls]
        every = sum(map(len, found))
        samples = sum(model.batches[at] for at in self._batches)
        share = -(-model.places * model.batches[batch] // samples)
        chosen = np.arange(every)
        if every > share:
            random = np.random.default_rng([batch, every])
            chosen = np.sort(random.choice(every, share, replace=False))
        parts, start = [], 0
        for call, places in zip(calls, found, strict=True):
            mine = chosen[(chosen >= start) & (chosen < start + len(places))] - start
            start += len(places)
            columns = call.columns(places[torch.from_numpy(mine).to(places.device)])
            columns = columns.detach().reshape(len(mine), layer.groups, layer.columns)
            parts.append(columns.float().cpu())
        if not parts:
            return np.zeros((0, layer.groups, layer.columns), np.float32)
        array = np.asarray(torch.cat(parts).numpy())
        if not np.isfinite(array).all():
            raise InvalidData(f"layer {layer.name!r}: its inputs hold NaN or infinity")
        return array

    def advance(self, weights: Mapping[str, Weights]) -> None:
        self._replaced |= self._model.replaced(weights, self._replaced)
        self._forget()
        self._stage += 1
        self._go_on()

    def _go_on(self) -> None:
        """Compute what is before the block of the stage."""
        network, blocks = self._model.network, self._model.layers.blocks
        last = self._stage == len(blocks)
        cut = len(network.order.blocks) if last else blocks[self._stage]
        if cut == self._cut:
            return
        before, live = network.order.live(self._cut), network.order.live(cut)

        def run_one(batch: int) -> None:
            made: dict[int, Any] = {}

            def keep(at: int, output: Any) -> None:
                made[at] = put(self._model.store, output)

            self._run(batch, Run(until=cut, keep=keep))
            kept = self._kept[batch]
            for at in before - live:
                kept[at] = drop(kept[at])
            for at in range(self._cut, cut):
                if at not in made:
                    raise InvalidData(f"batch {batch + 1} runs other modules than the first one")
                kept.append(made[at] if at in live else drop(made[at]))

        for _ in self._each(run_one):
            pass
        for block in network.order.blocks[self._cut : cut]:
            for tensor in tensors_of(block):
                self._replaced.pop(id(tensor), None)
        self._cut = cut

    def outputs(self, weights: Mapping[str, Weights] = {}) -> Iterator[list[Array]]:
        others = self._model.replaced(weights, self._replaced)

        def of(batch: int) -> list[Array]:
            output = self._run(batch, Run(), others)
            return rows_of(output, self._model.masks(batch), self._model.of_tokens)

        return self._each(of, lambda found: sum(array.nbytes for array in found) > LARGE)

    def _run(self, batch: int, run: Run, others: Mapping[int, Tensor] = {}) -> Any:
        run.before = [get(output) for output in self._kept[batch]]
        run.replaced = {**self._replaced, **others}
        return self._model.network.run(self._model.moved(batch), run)

    def _each(
        self, function: Callable[[int], T], large: Callable[[T], bool] | None = None
    ) -> Iterator[T]:
        """The function's results for each batch, some computed at a time, each by one thread.

        One at a time if the first is large.
        """
        threads = self._model.threads or torch.get_num_threads()

        def alone(batch: int) -> T:
            torch.set_num_threads(1)
            return function(batch)

        start = 0
        while start < len(self._batches):
            some = self._batches[start : start + (1 if large and not start else threads)]
            with one_thread():
                if len(some) == 1:
                    found = [function(some[0])]
                else:
                    with ThreadPoolExecutor(len(some)) as pool:
                        found = list(pool.map(alone, some))
            if large and not start and large(found[0]):
                threads = 1
            start += len(some)
            yield from found

    def _forget(self) -> None:
        """Give back columns that nobody has asked for."""
        for columns in self._columns.values():
            columns.drop()
        self._columns = {}

    def close(self) -> None:
        self._forget()
        for kept in self._kept.values():
            drop(kept)
        self._kept, self._replaced = {}, {}
