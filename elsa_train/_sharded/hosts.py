"""Processes that hold a network together: what they tell one another, and whose a tensor is.

Any sharding will do. A tensor is gathered by itself, and only if its owner has not all of it.
"""

import json
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from elsa_format.plugins import BLOCK
from elsa_train._errors import InfeasibleTraining
from elsa_train._tree import flatten, sharding_of

PyTree = Any
SLICES = 4 << 20
"""Bytes of a tensor that are on their way at a time."""

LIMIT = 600.0
"""Seconds for which a run waits for its other processes."""

Box = tuple[tuple[int, int], ...]
"""First and last element of a part, along each axis."""


class Hosts:
    """The processes on whose devices a network lies; of a network in one process, that one."""

    def __init__(self, tree: PyTree) -> None:
        """Look at where the leaves are; this process must hold some of each."""
        devices = {d for leaf in jax.tree.leaves(tree) for d in _devices(leaf)}
        self.processes = sorted({d.process_index for d in devices}) or [jax.process_index()]
        if jax.process_index() not in self.processes:
            raise InfeasibleTraining(
                f"process {jax.process_index()} has no device of the network, which is on those of "
                f"processes {self.processes}"
            )
        self.number = self.processes.index(jax.process_index())
        """The place of this process among them."""
        self._rows = [
            sorted((d for d in devices if d.process_index == process), key=lambda d: d.id)
            for process in self.processes
        ]

    @property
    def several(self) -> bool:
        """Tell whether there is anyone to talk to."""
        return len(self.processes) > 1

    @cached_property
    def _mesh(self) -> Mesh:
        if len({len(row) for row in self._rows}) > 1:
            counts = dict(zip(self.processes, map(len, self._rows), strict=True))
            raise InfeasibleTraining(
                f"the network is on {counts} devices of these processes; expected as many of each"
            )
        return Mesh(np.array(self._rows), ("process", "local"))

    def exchange(self, message: bytes) -> list[bytes]:
        """Tell all what each says; all must call it."""
        if not self.several:
            return [message]
        sizes = self._all(np.array([len(message)], np.uint32))[:, 0]
        # Powers of two, since each length is compiled.
        padded = np.zeros(1 << int(sizes.max() - 1).bit_length() if sizes.max() else 1, np.uint8)
        padded[: len(message)] = np.frombuffer(message, np.uint8)
        rows = self._all(padded)
        return [row[:size].tobytes() for row, size in zip(rows, sizes, strict=True)]

    def _all(self, row: NDArray[Any]) -> NDArray[Any]:
        split = _sharding(self._mesh, "process")
        shape = (len(self._rows), *row.shape)
        rows = jax.make_array_from_callback(shape, split, lambda _: row[None])
        return np.asarray(jax.device_put(rows, _sharding(self._mesh)))

    def check(self, network: PyTree) -> None:
        """Refuse what can't be trained or written together, before it is tried."""
        places: dict[frozenset[Any], str] = {}
        for name, leaf in flatten(network).items():
            if devices := _devices(leaf):
                places.setdefault(frozenset(devices), name)
        if len(places) > 1:
            first, second, *_ = places.values()
            raise InfeasibleTraining(
                f"{first!r} and {second!r} are on different devices; put the network on one mesh"
            )
        if not self.several:
            return
        own = [[n, list(x.shape), str(x.dtype), _spec(x)] for n, x in flatten(network).items()]
        trees = [json.loads(text) for text in self.exchange(json.dumps(own).encode())]
        for process, tree in zip(self.processes, trees, strict=True):
            if tree == trees[0]:
                continue
            here, there = ({tuple(map(str, row)) for row in t} for t in (tree, trees[0]))
            odd = min(here ^ there)
            raise InfeasibleTraining(
                f"process {process} has another network than process {self.processes[0]}: "
                f"{odd[0]!r} is in one of them {', '.join(odd[1:])}"
            )

    def owners(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Deal tensors out, the largest first, to who has least so far."""
        loads = [0] * len(self.processes)
        found = {}
        for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
            found[name] = loads.index(min(loads))
            loads[found[name]] += sizes[name]
        return found

    def blocks(self, array: Any, owner: int, dtype: Any = None) -> Iterator[NDArray[Any]]:
        """Give a tensor's elements in their order to its owner, and nobody else anything.

        All must call it. Blocks hold, but for the last, a multiple of 8 elements.
        """
        if isinstance(array, jax.Array) and not self._has_all(array, owner):
            array = self._collect(array, owner == self.number)
        if owner == self.number:
            for block in _in_eights(_in_order(array)):
                yield block.astype(dtype or block.dtype, copy=False)

    def everywhere(self, array: Any) -> NDArray[Any]:
        """Give a whole tensor to every process."""
        several = range(len(self.processes))
        if isinstance(array, jax.Array) and not all(self._has_all(array, n) for n in several):
            array = self._collect(array, wanted=True)
        parts = [part.reshape(-1) for part in _in_order(array)]
        return np.concatenate(parts).reshape(array.shape)

    def _has_all(self, array: jax.Array, owner: int) -> bool:
        if array.is_fully_addressable:
            return True
        places: Mapping[Any, Any] = array.sharding.devices_indices_map(array.shape)
        own = {
            _box(index, array.shape)
            for device, index in places.items()
            if device.process_index == self.processes[owner]
        }
        return sum(map(_volume, own)) == array.size

    def _collect(self, array: jax.Array, wanted: bool) -> NDArray[Any] | None:
        """Put a tensor together on the hosts that want it.

        A slice of each shard goes to all devices, then the next: a device needs room for a few
        slices, a host for the tensor.
        """
        sharding = sharding_of(array) or _sharding(self._mesh)
        array = jax.device_put(array, sharding)
        local = sharding.shard_shape(array.shape)
        axis = int(np.argmax(local))
        length, parts = local[axis], array.shape[axis] // local[axis]
        step = max(1, min(length, SLICES * length * parts // array.nbytes))
        whole = np.empty(array.shape, array.dtype) if wanted else None
        for start in range(0, length, step):
            size = min(step, length - start)
            slices = _take(sharding, axis, size)(array, np.int32(start))
            if whole is None:
                slices.block_until_ready()  # one at a time
                continue
            found = np.asarray(slices)
            for part in range(parts):
                at = part * length + start
                whole[_along(axis, at, size)] = found[_along(axis, part * size, size)]
        return whole


def everyone() -> Hosts:
    """Return all processes that JAX knows of."""
    everywhere = _sharding(Mesh(np.array(jax.devices()), ("all",)))
    return Hosts(jax.make_array_from_callback((), everywhere, lambda _: np.zeros((), np.float32)))


@contextmanager
def limited(where: object) -> Iterator[None]:
    """End the process if the others don't come: what waits in a device can't be broken off."""
    if jax.process_count() == 1:
        yield
        return
    timer = threading.Timer(LIMIT, _give_up, [where])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _give_up(where: object) -> None:
    text = (
        f"\nerror: {where}: waited {LIMIT:.0f} seconds for the other processes; look for an error "
        "there, then run the same command on all hosts to resume\n"
    )
    try:
        os.write(sys.stderr.fileno(), text.encode("utf-8", "replace"))
    finally:
        os._exit(1)


@lru_cache(maxsize=256)
def _take(sharding: NamedSharding, axis: int, size: int) -> Any:
    """Make what takes a slice of each shard, and copies them to all devices."""
    mesh: Any = sharding.mesh
    spec, everywhere = sharding.spec, _sharding(mesh)

    def take(shard: jax.Array, start: jax.Array) -> jax.Array:
        return lax.dynamic_slice_in_dim(shard, start, size, axis)

    own = jax.shard_map(take, mesh=mesh, in_specs=(spec, everywhere.spec), out_specs=spec)
    return jax.jit(own, out_shardings=everywhere)


def _along(axis: int, start: int, size: int) -> tuple[slice, ...]:
    return (*[slice(None)] * axis, slice(start, start + size))


def _in_order(array: Any) -> Iterator[NDArray[Any]]:
    """Give the parts of an array that this process has all of, put together unless in order."""
    if not isinstance(array, jax.Array):
        yield np.ascontiguousarray(array)
        return
    parts = {_box(s.index, array.shape): s.data for s in array.addressable_shards}
    if all(box[1:] == _box((), array.shape)[1:] for box in parts):
        for box in sorted(parts):
            yield _host(parts[box])
        return
    whole = np.empty(array.shape, array.dtype)
    for box, part in parts.items():
        whole[tuple(slice(*side) for side in box)] = _host(part)
    yield whole


def _host(part: jax.Array) -> NDArray[Any]:
    # An array remembers its copy on the host; this one is dropped with it.
    passing = jax.make_array_from_single_device_arrays(part.shape, part.sharding, [part])
    return np.ascontiguousarray(passing)


def _in_eights(parts: Iterator[NDArray[Any]]) -> Iterator[NDArray[Any]]:
    rest: NDArray[Any] | None = None
    for part in parts:
        flat = part.reshape(-1)
        if rest is not None and rest.size:
            missing = -rest.size % 8
            rest, flat = np.concatenate([rest, flat[:missing]]), flat[missing:]
            if rest.size % 8:
                continue
            yield rest
        whole, step = flat.size - flat.size % 8, BLOCK // flat.itemsize
        for start in range(0, whole, step):
            yield flat[start : min(start + step, whole)]
        rest = flat[whole:]
    if rest is not None and rest.size:
        yield rest


def _devices(leaf: Any) -> set[Any]:
    committed = isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)
    return set(leaf.sharding.device_set) if committed and leaf.committed else set()


def _spec(leaf: Any) -> str:
    sharding = getattr(leaf, "sharding", None)
    return str(sharding.spec) if isinstance(sharding, NamedSharding) else ""


def _sharding(mesh: Mesh, *parts: str | None) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(*parts))  # type: ignore[no-untyped-call]


def _box(index: Sequence[slice], shape: Sequence[int]) -> Box:
    slices = (*index, *[slice(None)] * (len(shape) - len(index)))
    return tuple(s.indices(length)[:2] for s, length in zip(slices, shape, strict=True))


def _volume(box: Box) -> int:
    return int(np.prod([stop - start for start, stop in box], dtype=object)) if box else 1
