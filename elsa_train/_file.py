"""The result as an ELSA file: written and checked by all processes that hold the network."""

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

import elsa_format
from elsa_format import read_counters
from elsa_format.plugins import (
    Contents,
    SharedWriter,
    TensorInfo,
    Together,
    digest_lines,
    digest_of_lines,
    is_index,
    of_array,
    open_network,
    open_output,
    open_shared_writer,
    variant_name,
)
from elsa_train._errors import NotReproduced, TrainError
from elsa_train._multilevel import FrozenLevel, Network, Result
from elsa_train._sharded.hosts import Hosts
from elsa_train._tree import flatten, names, unflatten

PyTree = Any


class Stored(NamedTuple):
    """A tensor of the file."""

    info: TensorInfo
    array: Any
    owner: int
    """The process that writes it."""


def write_file(
    path: str | os.PathLike[str],
    result: Result,
    *,
    settings: Mapping[str, Any] | None = None,
    force: bool = False,
) -> None:
    """Write the ELSA file and check that it gives back each level as it was frozen, bit by bit.

    Every process that holds some of the network calls it. If the path is an index (its name ends in
    .index.json), each writes a shard beside it; else process 0 writes all. Tensors are gathered one
    by one.

    >>> import jax
    >>> from elsa_train import Level, multi_level
    >>> def keep_one(network, counters, level):
    ...     return Network({"kernel": network.params["kernel"].at[1:].set(0)})
    >>> network = Network({"kernel": jax.numpy.ones(4)})
    >>> write_file("one.safetensors", multi_level(network, [Level("75%", 0.75)], keep_one))
    >>> elsa_format.open("one.safetensors").sparsity(1)
    0.75
    """
    path, hosts = os.fspath(path), Hosts(result.network)
    about = {} if settings is None else {"elsa_train": json.dumps(settings, sort_keys=True)}
    contents = Contents(
        bits=result.bits,
        levels=[_spec(frozen) for frozen in result.levels],
        nested=frozenset(flatten(result.network.params)),
        per_level=frozenset(flatten(result.network.state)),
        metadata=json.loads(hosts.exchange(json.dumps(about).encode())[0]),
        dense_metrics=result.metrics,
    )
    tensors = _tensors(result, hosts, in_shards=is_index(path))
    owners = sorted({tensor.owner for tensor in tensors})
    groups = [[tensor.info for tensor in tensors if tensor.owner == owner] for owner in owners]
    together = Together(path, hosts.number, hosts.exchange)
    try:
        _check_folder(together, hosts)
        with open_shared_writer(together, groups, owners, contents, force=force) as writer:
            for tensor in tensors:
                _append(writer, hosts, tensor)
            writer.finish()
        _check_file(together, writer, result)
    except jax.errors.JaxRuntimeError as error:
        first, *_ = str(error).splitlines() or [""]
        raise TrainError(
            f"{path}: while it was written, a device failed or a process was lost ({first}); "
            "start all processes again"
        ) from None


def _append(writer: SharedWriter, hosts: Hosts, tensor: Stored) -> None:
    # By itself: a block left over would keep its whole tensor while the next is gathered.
    for block in hosts.blocks(tensor.array, tensor.owner, tensor.info.dtype.numpy):
        writer.append(tensor.info.name, block)


def load(path: str | os.PathLike[str], level: int | str, *, like: PyTree) -> PyTree:
    """Read a level of an ELSA file into a tree like one that is known.

    >>> from elsa_train import Level, multi_level
    >>> def keep_one(network, counters, level):
    ...     return Network({"kernel": network.params["kernel"].at[1:].set(0)})
    >>> params = {"kernel": jax.numpy.ones(4)}
    >>> write_file("own.safetensors", multi_level(Network(params), [Level("75%", 0.75)], keep_one))
    >>> load("own.safetensors", 1, like=params)["kernel"].nonzero()[0].tolist()
    [0]

    Args:
        path: The file, or the index of several.
        level: Number or name of a level, or "dense".
        like: Parameters, or a `Network` with parameters and statistics: arrays, or their shapes and
            types. The file's tensors have the names of its leaves.

    Returns:
        A tree like `like`, of its types, on its devices.

    Raises:
        TrainError: The file lacks a tensor, or has it in another shape.
    """
    with elsa_format.open(path) as file:
        tensors = file.load(level)

    def place(name: str, wanted: Any) -> Any:
        array = np.asarray(tensors[name], wanted.dtype)
        known = isinstance(wanted, jax.Array) and not isinstance(wanted, jax.core.Tracer)
        if known and wanted.committed:
            return jax.make_array_from_callback(array.shape, wanted.sharding, array.__getitem__)
        return jax.numpy.asarray(array)

    def fill(tree: PyTree) -> PyTree:
        unflatten(tree, tensors)
        return jax.tree.map(place, names(tree), tree)

    return Network(*map(fill, like)) if isinstance(like, Network) else fill(like)


def load_counters(path: str | os.PathLike[str], *, like: PyTree) -> PyTree:
    """Read the counters of an ELSA file: the first level that has each weight, 0 for none.

    Tensors that are not nested are in every level: their counters are 1.

    >>> weights = {"kernel": np.random.default_rng(0).normal(size=(10, 10)).astype(np.float32)}
    >>> report = elsa_format.pack(weights, "counters.safetensors", sparsities=[90])
    >>> int(load_counters("counters.safetensors", like=weights)["kernel"].sum())
    10

    Args:
        path: The file, or the index of several.
        like: Parameters, with the names of the file's tensors.
    """
    with elsa_format.open(path) as file:
        tensors = file.load("dense")
        nested, bits = file.nested, file.bits
    found = {
        name: read_counters(array, bits) if name in nested else np.ones(array.shape, np.uint8)
        for name, array in tensors.items()
    }
    return jax.tree.map(jax.numpy.asarray, unflatten(like, found))


def check_target(path: str | os.PathLike[str], network: Network, *, force: bool = False) -> None:
    """Refuse, before training, what `write_file` could not write there afterwards.

    Every process that holds some of the network calls it.

    >>> network = Network({"kernel": np.ones(4)})
    >>> check_target("missing/one.safetensors", network)
    Traceback (most recent call last):
    FileNotFoundError: [Errno 2] No such file or directory: 'missing/one.safetensors'
    """
    path, hosts = os.fspath(path), Hosts(network)
    hosts.check(network)
    together = Together(path, hosts.number, hosts.exchange)
    _check_folder(together, hosts)

    def try_it() -> None:
        if hosts.number == 0:
            with open_output(path, force=force):
                pass  # what is not committed leaves nothing

    together.agree(try_it)


def _check_folder(together: Together, hosts: Hosts) -> None:
    if hosts.several and is_index(together.target):
        together.check_folder()


def _tensors(result: Result, hosts: Hosts, *, in_shards: bool) -> list[Stored]:
    """Return what is stored, in one order everywhere; variants of a tensor have its owner."""
    stored = of_array(result.dtype)
    arrays = {
        name: [(TensorInfo(name, stored, p.shape), p)]
        for name, p in flatten(result.network.params).items()
    }
    states = [flatten(frozen.state) for frozen in result.levels]
    for name, dense in flatten(result.network.state).items():
        dtype, shape = of_array(np.dtype(dense.dtype)), dense.shape
        arrays[name] = [(TensorInfo(name, dtype, shape), dense)]
        for t, state in enumerate(states, 1):
            arrays[name].append((TensorInfo(variant_name(name, t), dtype, shape), state[name]))
    sizes = {name: sum(info.nbytes for info, _ in own) for name, own in arrays.items()}
    owners = hosts.owners(sizes) if in_shards else dict.fromkeys(sizes, 0)
    return [
        Stored(info, array, owners[name]) for name, own in arrays.items() for info, array in own
    ]


def _spec(frozen: FrozenLevel) -> elsa_format.LevelSpec:
    level = frozen.level
    return elsa_format.LevelSpec(
        level.name,
        target=level.target,
        pattern=str(level.pattern) if level.pattern else None,
        metrics=frozen.metrics,
    )


def _check_file(together: Together, writer: SharedWriter, result: Result) -> None:
    """Read back what this process wrote, and compare each level with what was frozen.

    Checksums say that the bytes are those that were written, the dense ones too.
    """

    def read() -> bytes:
        found: list[dict[str, str]] = [{} for _ in result.levels]
        for file in writer.files:
            for lines, more in zip(found, digest_lines(file), strict=True):
                lines |= more
        return json.dumps(found).encode()

    parts = [json.loads(said) for said in together.agree(read)]

    def compare() -> None:
        _compare_levels(together.target, parts, writer.files, result)

    together.agree(compare)


def _compare_levels(
    path: str, parts: Sequence[Sequence[dict[str, str]]], files: Sequence[str], result: Result
) -> None:
    headers = []
    for file in files:
        with open_network(file) as network:
            headers.append(network.profile.levels)
    for t, frozen in enumerate(result.levels):
        lines = {name: line for part in parts for name, line in part[t].items()}
        found = [digest_of_lines(lines), *(levels[t].digest for levels in headers)]
        counts = [levels[t].nonzero for levels in headers]
        if {*found} != {frozen.digest} or any(n != frozen.nonzero for n in counts):
            raise NotReproduced(f"{path}: level {t + 1} ({frozen.level.name}) is not as it froze")
