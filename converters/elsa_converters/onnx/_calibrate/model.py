"""A graph as calibration sees it: its layers, and walks through samples from stretch to stretch."""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elsa_converters._errors import InvalidData
from elsa_converters.calibrate import Kept, Layer, Model, Store, Walk, Weights
from elsa_converters.calibrate._work import Work
from elsa_converters.onnx._calibrate.classes import find_classes
from elsa_converters.onnx._calibrate.columns import columns
from elsa_converters.onnx._calibrate.rewrite import Prepared, Site
from elsa_converters.onnx._calibrate.samples import size_of
from elsa_converters.onnx._calibrate.stretches import Stretch, cut

Array = NDArray[Any]
Feeds = Mapping[str, Array]
MASK = "attention_mask"
"""The input that says, where a graph has one, which positions are padding."""
MAX_MEMORY = 1 << 29
"""Bytes of live values beyond which they go to a temporary file, unless told otherwise."""


class OnnxModel(Model):
    """A prepared graph, and samples to calibrate it with."""

    def __init__(
        self,
        prepared: Prepared,
        batches: Sequence[Feeds],
        *,
        max_memory: int | None = None,
        threads: int | None = None,
    ) -> None:
        self.prepared, self.feeds, self.threads = prepared, list(batches), threads
        self.batches = [size_of(feeds) for feeds in self.feeds]
        self.sites = {site.layer.name: site for site in prepared.sites}
        self.stages = [[site.layer] for site in prepared.sites]
        self.outputs = prepared.outputs
        self.classes, self.head = find_classes(prepared)
        self.stretches = cut(prepared)
        self.store = Store(MAX_MEMORY if max_memory is None else max_memory)

    def original(self, layer: Layer) -> Weights:
        site, weights = self.sites[layer.name], self.prepared.model.weights
        stored = weights[layer.name].array().transpose(site.product.order)
        weight = np.ascontiguousarray(stored).reshape(layer.shape)
        bias = weights[site.bias].array().reshape(-1).astype(np.float32) * np.float32(site.beta)
        return Weights(weight, bias)

    def walk(self, batches: Sequence[int]) -> Walk:
        return _Walk(self, batches)

    def weight_as_stored(self, layer: Layer, weight: Array) -> Array:
        product = self.sites[layer.name].product
        turned = weight.reshape(product.shape).transpose(np.argsort(product.order))
        return np.ascontiguousarray(turned)

    def varying(self, layer: Layer, weights: Weights) -> Mapping[str, Array]:
        site = self.sites[layer.name]
        assert weights.bias is not None
        bias = weights.bias / np.float32(site.beta)
        found = {}
        if site.scale is not None:
            scale = weights.scale
            if scale is None:
                scale = np.ones(len(bias), np.float32)
            bias = bias / scale
            found[site.scale] = self._as_stored(site.scale, scale)
        found[site.bias] = self._as_stored(site.bias, bias)
        return found

    def _as_stored(self, name: str, array: Array) -> Array:
        info = self.prepared.model.weights[name].info
        return array.astype(info.dtype.numpy).reshape(info.shape)

    def tensors(self, site: Site, weights: Weights | None) -> dict[str, Array]:
        """The tensors of a layer that has these weights; None stands for the original ones."""
        if weights is None:
            names = [site.layer.name, site.bias, *([site.scale] if site.scale else [])]
            return {name: self.prepared.model.weights[name].array() for name in names}
        varying = self.varying(site.layer, weights)
        return {site.layer.name: self.weight_as_stored(site.layer, weights.weight), **varying}


class _Walk(Walk):
    def __init__(self, model: OnnxModel, batches: Sequence[int]) -> None:
        self.model, self.work = model, Work(model.threads)
        self.numbers, self.at = list(batches), 0
        self.live: list[dict[str, Kept]] = [{} for _ in self.numbers]
        try:
            for live, number in zip(self.live, self.numbers, strict=True):
                for name, array in model.feeds[number].items():
                    live[name] = Kept(partial(_same, array), _nothing)
            self._step(model.stretches[0], {})
        except BaseException:
            self.close()
            raise

    def inputs(self, layer: Layer) -> Iterator[Array]:
        model, site = self.model, self.model.sites[layer.name]
        most = max(1, model.places // len(self.numbers))

        def of(at: int) -> Array:
            x = self.live[at][site.product.node.input[0]].get()
            number = self.numbers[at]
            seen = model.feeds[number].get(MASK)
            found = columns(site.product, x, most, number, seen)
            if not np.isfinite(found).all():
                raise InvalidData(f"layer {layer.name!r}: its inputs hold NaN or infinity")
            return found

        return self._each(of)

    def advance(self, weights: Mapping[str, Weights]) -> None:
        self.at += 1
        stretch = self.model.stretches[self.at]
        self._step(stretch, self._tensors(stretch, weights))

    def outputs(self, weights: Mapping[str, Weights] = {}) -> Iterator[list[Array]]:
        stretches = self.model.stretches[self.at + 1 :]
        changed = self._tensors(stretches[0], weights) if stretches else {}

        def of(at: int) -> list[Array]:
            live = _Overlay(self.live[at])
            for stretch in stretches:
                if stretch.session is not None:
                    tensors = changed if stretch is stretches[0] else self._tensors(stretch, {})
                    live.made.update(stretch.run(live, tensors))
                for name in stretch.drops:
                    live.made.pop(name, None)
            seen = self.model.feeds[self.numbers[at]].get(MASK)
            return [_items(live[name], seen) for name in self.model.outputs]

        return self._each(of)

    def close(self) -> None:
        for live in self.live:
            for kept in live.values():
                kept.drop()
        self.live = []
        self.work.close()

    def _tensors(self, stretch: Stretch, weights: Mapping[str, Weights]) -> dict[str, Array]:
        assert stretch.site is not None
        return self.model.tensors(stretch.site, weights.get(stretch.site.layer.name))

    def _step(self, stretch: Stretch, tensors: Mapping[str, Array]) -> None:
        def run(live: dict[str, Kept]) -> None:
            if stretch.session is not None:
                values = {name: live[name].get() for name in stretch.takes}
                made = stretch.run(values, tensors)
            for name in stretch.drops:
                live.pop(name).drop()
            if stretch.session is not None:
                live.update({name: self.model.store.put(array) for name, array in made.items()})

        self.work.map(run, self.live)

    def _each(self, function: Any) -> Iterator[Any]:
        """The function's results for each batch, some computed at a time."""
        for start in range(0, len(self.numbers), self.work.threads):
            stop = min(start + self.work.threads, len(self.numbers))
            yield from self.work.map(function, range(start, stop))


class _Overlay(Mapping[str, Array]):
    """What is live, and what was made of it since."""

    def __init__(self, kept: Mapping[str, Kept]) -> None:
        self.kept, self.made = kept, dict[str, Array]()

    def __getitem__(self, name: str) -> Array:
        return self.made[name] if name in self.made else self.kept[name].get()

    def __iter__(self) -> Iterator[str]:
        return iter({*self.kept, *self.made})

    def __len__(self) -> int:
        return len({*self.kept, *self.made})


def _same(array: Array) -> Array:
    return array


def _nothing() -> None:
    pass


def _items(output: Array, seen: Array | None) -> Array:
    """An output as (items, features)."""
    found = output.astype(np.float32)
    if seen is not None and found.ndim > 2 and found.shape[:2] == seen.shape:
        found = found[seen != 0]
    *places, features = found.shape if found.ndim > 1 else (*found.shape, 1)
    return found.reshape(math.prod(places), features)
