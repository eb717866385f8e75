"""Export one level as an ONNX model of its own, in one pass and constant memory."""

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from onnx import ModelProto

from elsa_converters._errors import MisplacedOutput
from elsa_converters.onnx._fast.pick import Fast, check_fast, pick_layers
from elsa_converters.onnx._fast.rewrite import prepare, use_sparse
from elsa_converters.onnx._fast.timing import check_threads
from elsa_converters.onnx._graph.simplify import fold_batch_norm
from elsa_converters.onnx._graph.walk import remove_named
from elsa_converters.onnx._level.bind import Binding
from elsa_converters.onnx._level.read import Template, open_level
from elsa_converters.onnx._model.read import LEVEL_KEY, drop_metadata
from elsa_converters.onnx._model.sparse import coordinates, is_smaller_sparse
from elsa_converters.onnx._model.write import LARGEST_FILE, Entry, ModelWriter, model_size
from elsa_converters.onnx._write.places import location_of
from elsa_format import InvalidOption, NoSuchLevel
from elsa_format.levels import Sparsity
from elsa_format.plugins import (
    LevelLike,
    LevelNumber,
    Network,
    Output,
    Progress,
    Source,
    Target,
    TensorInfo,
    choose_level,
    commit_outputs,
    dump,
    is_special,
    is_url,
    no_progress,
    of_array,
    open_output,
)


def export(
    source: Source,
    template: Template,
    target: Target,
    *,
    level: LevelLike | None = None,
    sparsity: Sparsity | None = None,
    max_size: int | None = None,
    sparse: bool = False,
    fold: bool = False,
    fast: Fast = False,
    threads: int | None = None,
    sizes: Mapping[str, int] | None = None,
    chosen: Callable[[int, int], None] = lambda some, of: None,
    external_data: bool | None = None,
    verify: bool = True,
    max_bytes: int | None = None,
    force: bool = False,
    progress: Progress = no_progress,
) -> LevelNumber:
    """Write one level of an ELSA file as an ONNX model; returns which.

    The level is given by number or name, or as the densest with at least a `sparsity` (percent, a
    fraction below 1, or N:M), or as the densest whose model has at most `max_size` bytes. `sparse`
    writes sparse initializers where they are smaller; `fold` folds batch norm into the convolutions
    before it. `fast` lets
    sparse operators compute layers: those of at least the sparsity that it says, or, if it is True,
    those with which the network is fastest on this machine with so many `threads` and inputs whose
    named axes have these `sizes`; `chosen` is told how many layers of how many. Tensors go to a
    file beside the model, named after it with `.data`, if `external_data` is true or, unless it is
    false, the model would exceed 2 GB. A network of more than `max_bytes` is refused.

    >>> export("net.safetensors", "net.onnx", "level.onnx", sparsity=0.9)
    2
    """
    fast = check_fast(fast)
    check_threads(threads)
    if fast is not False and max_size is not None:
        raise InvalidOption("a fast model's size is not known before it is made: give a level")
    choice = partial(_choose, level=level, sparsity=sparsity, max_size=max_size, sparse=sparse)
    with open_level(
        source,
        template,
        choice,
        verify=verify,
        max_bytes=max_bytes,
        counts=sparse or sparsity is not None,
        progress=progress,
    ) as opened:
        binding, proto = opened.binding, opened.binding.proto
        describe_level(proto, binding.network, opened.level)
        in_memory = fold or fast is not False
        if in_memory:
            arrays = opened.arrays()
            if fast is not False:
                where = str(binding.model.path)
                layers = prepare(proto, arrays, where)
                picked = pick_layers(
                    proto, arrays, layers, fast, threads=threads, sizes=sizes, where=where
                )
                chosen(len(picked), len(layers))
                proto, arrays = use_sparse(proto, arrays, picked)
            else:
                fold_batch_norm(proto, arrays)
            entries = [_array_entry(name, array, sparse) for name, array in arrays.items()]
        else:
            entries = _entries(binding, opened.level, sparse)
        remove_named(proto.graph.input, {e.info.name for e in entries if e.kept is not None})
        with contextlib.ExitStack() as stack:
            data = None
            if _is_external(external_data, proto, entries):
                data = _data_output(stack, target, force)
            output = stack.enter_context(open_output(target, force=force))
            writer = ModelWriter(proto, entries, output, data)
            if in_memory:
                for name, array in arrays.items():
                    writer.append(name, array)
            else:
                for name, block in opened.blocks():
                    writer.append(name, block)
            writer.finish()
            commit_outputs([*([data[1]] if data else []), output])  # the data alone is of no use
        return opened.level


def describe_level(proto: ModelProto, network: Network, level: LevelNumber) -> None:
    """Record in the model which level it is."""
    drop_metadata(proto, LEVEL_KEY)
    if level == "dense":
        return
    entry = network.profile.level(level)
    document: dict[str, Any] = {"level": level, "name": entry.name, "version": "1.0"}
    if entry.digest and network.profile.shard is None:
        document["digest"] = entry.digest
    proto.metadata_props.add(key=LEVEL_KEY, value=dump(dict(sorted(document.items()))))


def _choose(
    binding: Binding,
    *,
    level: LevelLike | None,
    sparsity: Sparsity | None,
    max_size: int | None,
    sparse: bool,
) -> LevelNumber:
    if max_size is None or level is not None or sparsity is not None:
        return choose_level(binding.network, level=level, sparsity=sparsity, max_size=max_size)
    network = binding.network
    sizes: dict[LevelNumber, int] = {}
    numbers = [level.number for level in network.profile.levels]
    tried: list[LevelNumber] = ["dense", *reversed(numbers)]
    for number in tried:
        describe_level(binding.proto, network, number)
        sizes[number] = model_size(binding.proto, _entries(binding, number, sparse))
        if sizes[number] <= max_size:
            return number
    smallest = f"level {numbers[0]} takes {sizes[numbers[0]]}"
    problem = f"{network.name}: no level fits {max_size} bytes, {smallest}"
    raise NoSuchLevel(problem, "" if sparse else "{sparse} may be smaller", sparse=True)


def _entries(binding: Binding, level: LevelNumber, sparse: bool) -> list[Entry]:
    """The initializers of a level, in the order their bytes arrive."""
    entries = []
    for step in binding.network.steps(level):
        if step.name is None or step.name not in binding.names:
            continue
        info, kept = binding.info(step.name), binding.kept(step.name, level) if sparse else None
        smaller = kept is not None and is_smaller_sparse(info, kept)
        entries.append(Entry(info, kept if smaller else None))
    return entries + [Entry(weight.info) for weight in binding.rest.values()]


def _array_entry(name: str, array: NDArray[Any], sparse: bool) -> Entry:
    info = TensorInfo(name, of_array(array.dtype), array.shape)
    kept = int(coordinates(array.reshape(-1).view(info.dtype.words)).size) if sparse else 0
    return Entry(info, kept if sparse and is_smaller_sparse(info, kept) else None)


def _is_external(asked: bool | None, proto: ModelProto, entries: Iterable[Entry]) -> bool:
    if asked is not None:
        return asked
    return model_size(proto, entries) > LARGEST_FILE


def _data_output(stack: contextlib.ExitStack, target: Target, force: bool) -> tuple[str, Output]:
    if not isinstance(target, str | os.PathLike) or is_special(target) or is_url(target):
        raise MisplacedOutput("external data needs a model file on disk to stand beside")
    path = Path(target).with_name(Path(target).name + ".data")
    return location_of(Path(path.name)), stack.enter_context(open_output(path, force=force))
