"""Export one level as an ONNX model of its own, in one pass and constant memory."""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from onnx import ModelProto

from elsa_converters._errors import MisplacedOutput
from elsa_converters.onnx._fast.pick import Precision, accelerate, check_precision
from elsa_converters.onnx._fast.timing import check_threads
from elsa_converters.onnx._graph.simplify import fold_batch_norm
from elsa_converters.onnx._graph.walk import Arrays, remove_named
from elsa_converters.onnx._level.bind import Binding
from elsa_converters.onnx._level.read import LevelPass, Template, open_level
from elsa_converters.onnx._model.read import LEVEL_KEY, drop_metadata
from elsa_converters.onnx._model.sparse import coordinates, is_smaller_sparse
from elsa_converters.onnx._model.write import LARGEST_FILE, Entry, ModelWriter, model_size
from elsa_converters.onnx._write.places import location_of
from elsa_converters.sparse._choice import Fast, check_fast
from elsa_format import InvalidOption, NoSuchLevel
from elsa_format.levels import Sparsity
from elsa_format.plugins import (
    LevelChoice,
    LevelLike,
    LevelNumber,
    Network,
    Output,
    Progress,
    Source,
    Target,
    TensorInfo,
    Transaction,
    choose_level,
    dump,
    is_special,
    is_url,
    no_progress,
    of_array,
)


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """How `export` makes a model of a level; every field is a keyword of `export`, too.

    The level is given by one of `level`, `sparsity` and `max_size`, or by `min` and `max`.

    >>> small = ExportOptions(sparsity=0.9, sparse=True)
    >>> export("net.safetensors", "net.onnx", "small.onnx", small)
    2
    """

    level: LevelLike | None = None
    """Its number or name, or "dense"."""
    sparsity: Sparsity | None = None
    """The densest level with at least this sparsity: percent, a fraction below 1, or N:M."""
    max_size: int | None = None
    """The densest level whose model has at most so many bytes."""
    min: Mapping[str, float] | None = None
    """The sparsest level whose metrics are at least these, such as `{"accuracy": 0.9}`; with
    `max_size`, the best of them that is small enough."""
    max: Mapping[str, float] | None = None
    """As `min`, of metrics that are at most these."""
    sparse: bool = False
    """Write sparse initializers where they are smaller."""
    fold: bool = False
    """Fold batch norm into the convolutions before it."""
    fast: Fast = False
    """Let sparse operators compute the layers of at least this sparsity or, if it is True, those
    with which the network is fastest on this machine."""
    precision: Precision = 32
    """Bits of the numbers that sparse operators compute with: floats of 32, integers of 16 or 8, or
    "auto", the faster of 32 and 16 on this machine. The model keeps its floats."""
    threads: int | None = None
    """Threads of ONNX Runtime that layers are timed with."""
    sizes: Mapping[str, int] | None = None
    """Sizes of open axes, by their names, that layers are timed with; 1 for all others."""
    chosen: Callable[[int, int], None] = lambda some, of: None
    """Is told how many layers sparse operators compute, and of how many."""
    external_data: bool | None = None
    """Write tensors to a file beside the model, named after it with `.data`; if None, where the
    model would exceed 2 GB."""
    verify: bool = True
    """Compare checksums."""
    max_bytes: int | None = None
    """Refuse a larger network."""

    @property
    def choice(self) -> LevelChoice:
        """Which level is wanted."""
        return LevelChoice.of(vars(self))

    def __post_init__(self) -> None:
        LevelChoice.of(vars(self))
        check_fast(self.fast)
        check_precision(self.precision, self.fast)
        check_threads(self.threads)
        if self.fast is not False and self.max_size is not None:
            raise InvalidOption("a fast model's size is not known before it is made: give a level")


def export(
    source: Source,
    template: Template,
    target: Target,
    options: ExportOptions | None = None,
    *,
    force: bool = False,
    progress: Progress = no_progress,
    **fields: Any,
) -> LevelNumber:
    """Write one level of an ELSA file as an ONNX model.

    Args:
        source: The ELSA file, a model directory, a shard index, a delivery file, a URL or a stream.
        template: The graph: a template, or any ONNX model with the same weights.
        target: Where the model goes.
        options: How it is made.
        force: Replace a file that exists.
        progress: Is told how much is done.
        **fields: Fields of `ExportOptions`, in place of those of `options`.

    Returns:
        The number of the level, or "dense".

    >>> export("net.safetensors", "net.onnx", "level.onnx", sparsity=0.9)
    2
    """
    options = replace(options or ExportOptions(), **fields)
    with open_level(
        source,
        template,
        partial(_choose, options),
        verify=options.verify,
        max_bytes=options.max_bytes,
        counts=options.sparse or options.sparsity is not None,
        progress=progress,
    ) as opened:
        proto, sparse = opened.binding.proto, options.sparse
        describe_level(proto, opened.binding.network, opened.level)
        blocks: Iterable[tuple[str, NDArray[Any]]] = opened.blocks()
        if options.fold or options.fast is not False:
            proto, arrays = _changed(opened, options)
            entries = [_array_entry(name, array, sparse) for name, array in arrays.items()]
            blocks = arrays.items()
        else:
            entries = _entries(opened.binding, opened.level, sparse)
        remove_named(proto.graph.input, {e.info.name for e in entries if e.kept is not None})
        with Transaction(force=force) as transaction:
            data = None
            if _is_external(options.external_data, proto, entries):
                data = _data_output(transaction, target)
            output = transaction.open(target)  # appears last: the data alone is of no use
            writer = ModelWriter(proto, entries, output, data)
            for name, block in blocks:
                writer.append(name, block)
            writer.finish()
            transaction.commit()
        return opened.level


def _changed(opened: LevelPass, options: ExportOptions) -> tuple[ModelProto, Arrays]:
    """The level's graph and tensors, with fewer operators or with sparse ones; all in memory."""
    proto, arrays = opened.binding.proto, opened.arrays()
    fast = check_fast(options.fast)
    if fast is False:
        fold_batch_norm(proto, arrays)
        return proto, arrays
    proto, arrays, counts = accelerate(
        proto,
        arrays,
        str(opened.binding.model.path),
        fast,
        precision=options.precision,
        threads=options.threads,
        sizes=options.sizes,
    )
    options.chosen(*counts)
    return proto, arrays


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


def _choose(options: ExportOptions, binding: Binding) -> LevelNumber:
    choice, network, max_size = options.choice, binding.network, options.max_size
    if max_size is None:
        return choose_level(network, choice)

    def takes(number: LevelNumber) -> int:
        describe_level(binding.proto, network, number)
        return model_size(binding.proto, _entries(binding, number, options.sparse))

    if choice.measured:
        return choice.within(network, takes, max_size, "bytes")
    sizes: dict[LevelNumber, int] = {}
    numbers = [level.number for level in network.profile.levels]
    tried: list[LevelNumber] = ["dense", *reversed(numbers)]
    for number in tried:
        sizes[number] = takes(number)
        if sizes[number] <= max_size:
            return number
    smallest = f"level {numbers[0]} takes {sizes[numbers[0]]}"
    problem = f"{network.name}: no level fits {max_size} bytes, {smallest}"
    raise NoSuchLevel(problem, "" if options.sparse else "{sparse} may be smaller", sparse=True)


def _entries(binding: Binding, level: LevelNumber, sparse: bool) -> list[Entry]:
    """The initializers of a level, in the order their bytes arrive."""
    entries = []
    for step in binding.network.plan(level):
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


def _data_output(transaction: Transaction, target: Target) -> tuple[str, Output]:
    if not isinstance(target, str | os.PathLike) or is_special(target) or is_url(target):
        raise MisplacedOutput("external data needs a model file on disk to stand beside")
    path = Path(target).with_name(Path(target).name + ".data")
    return location_of(Path(path.name)), transaction.open(path)
