"""Pack a checkpoint: decide every weight's counter, embed it, write the file, in bounded memory."""

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

import numpy as np

from elsa_format import _kernels
from elsa_format._assign import (
    MAX_LEVELS,
    Assignment,
    GivenCounters,
    NestedCheckpoints,
    Scope,
    Sparsity,
    Words,
    one_shot,
    parse_sparsity,
)
from elsa_format._blocks import BLOCK, Progress, ignore
from elsa_format._checkpoint import Checkpoint, CheckpointLike, GraphCheckpoint, open_checkpoint
from elsa_format._codec import Rounding, check_bits, refuse_unpackable
from elsa_format._errors import (
    InfeasibleLevels,
    InvalidCheckpoint,
    OutputExists,
    TensorMismatch,
)
from elsa_format._header import TensorInfo
from elsa_format._output import Target, open_output
from elsa_format._profile import Profile, bits_for, variant_name
from elsa_format._writer import Writer


@dataclass(frozen=True)
class PackReport:
    """What was packed."""

    profile: Profile
    nested: tuple[str, ...]
    nested_weights: int
    shared: Mapping[str, str]
    """Tensors that carry no counters, and why."""
    notes: tuple[str, ...] = ()
    """What the user should know about the result."""


def pack(
    dense: CheckpointLike,
    out: Target,
    *,
    sparsities: Sequence[Sparsity] | None = None,
    levels: Sequence[CheckpointLike] | None = None,
    counters: CheckpointLike | None = None,
    scope: Scope = "global",
    axis: int = -1,
    include: Iterable[str] = (),
    exclude: Iterable[str] = (),
    per_level: Iterable[str] = (),
    names: Sequence[str] | None = None,
    rounding: Rounding = "nearest",
    digests: bool = True,
    template: str | os.PathLike[str] | None = None,
    force: bool = False,
    progress: Progress = ignore,
) -> PackReport:
    """Nest levels into a dense checkpoint and write the ELSA file.

    Exactly one of: `sparsities`, one-shot magnitude levels, sparsest first; `levels`, nested sparse
    checkpoints, sparsest first; `counters`, the paper's N, integers under the same names. A
    `template` is what else a kind of checkpoint needs to run, such as ONNX's graph.

    >>> pack("dense.safetensors", "net.safetensors", sparsities=[95, 90, 80])  # doctest: +SKIP
    """
    if sum(way is not None for way in (sparsities, levels, counters)) != 1:
        raise TypeError("give exactly one of sparsities, levels, counters")
    with contextlib.ExitStack() as stack:

        def opened(source: CheckpointLike) -> Checkpoint:
            checkpoint = open_checkpoint(source)
            stack.callback(checkpoint.close)
            return checkpoint

        network = opened(dense)
        graph = None if template is None else _graph_of(network, template, out, force)
        choice = _choose(network, include, exclude, per_level)
        way: Assignment
        variants: list[Checkpoint] = []
        if sparsities is not None:
            way = one_shot(network, [parse_sparsity(s) for s in sparsities], scope, axis)
        elif levels is not None:
            variants = [opened(level) for level in levels]
            way = NestedCheckpoints(network, variants)
            _check_shared(network, variants, choice)
        else:
            assert counters is not None
            given = opened(counters)
            choice = choice.only(given.tensors, "no counters given")
            way = GivenCounters(
                network, given, choice.nested, len(names) if names is not None else None
            )
        if choice.per_level and not variants:
            raise TensorMismatch(
                "per-level tensors come from level checkpoints, and none are given"
            )
        report = _write(
            network, way, variants, choice, out, names, rounding, digests, force, progress
        )
        if graph is not None and template is not None:
            graph.write_template(template, os.fspath(out), force=force)  # type: ignore[arg-type]
        return report


def _graph_of(
    network: Checkpoint, template: str | os.PathLike[str], out: Target, force: bool
) -> GraphCheckpoint:
    """The graph to write a template of; what could fail then is refused before packing."""
    if not isinstance(network, GraphCheckpoint):
        raise InvalidCheckpoint(f"{network.path}: has no graph to write a template of; ONNX has")
    if not isinstance(out, str | os.PathLike):
        raise TypeError("a template points into a file, and the output is a stream")
    if not force and os.path.exists(template):
        raise OutputExists(f"{os.fspath(template)}: exists already; --force replaces it")
    return network


@dataclass(frozen=True)
class _Choice:
    """What is to become of each tensor."""

    nested: tuple[str, ...]
    per_level: tuple[str, ...]
    shared: dict[str, str] = field(default_factory=dict)

    def only(self, names: Mapping[str, object], reason: str) -> "_Choice":
        dropped = {name: reason for name in self.nested if name not in names}
        kept = tuple(name for name in self.nested if name in names)
        return replace(self, nested=kept, shared=self.shared | dropped)


def _choose(
    network: Checkpoint, include: Iterable[str], exclude: Iterable[str], per_level: Iterable[str]
) -> _Choice:
    include, exclude, per_level = list(include), list(exclude), list(per_level)
    for pattern in (*include, *exclude, *per_level):
        if not any(fnmatchcase(name, pattern) for name in network.tensors):
            raise TensorMismatch(f"{network.path}: no tensor matches {pattern!r}")

    def matches(name: str, patterns: list[str]) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in patterns)

    nested, varying, shared = [], [], {}
    for name, info in network.tensors.items():
        if matches(name, per_level):
            varying.append(name)
        elif not info.dtype.nestable:
            shared[name] = f"dtype {info.dtype.name}"
        elif matches(name, exclude):
            shared[name] = "excluded"
        elif include and not matches(name, include):
            shared[name] = "not included"
        elif not include and not network.nestable(name):
            few = len(info.shape) < 2
            shared[name] = f"{len(info.shape)}-dimensional" if few else "not a layer's weight"
        else:
            nested.append(name)
    return _Choice(tuple(nested), tuple(varying), shared)


def _write(
    network: Checkpoint,
    way: Assignment,
    variants: list[Checkpoint],
    choice: _Choice,
    out: Target,
    names: Sequence[str] | None,
    rounding: Rounding,
    digests: bool,
    force: bool,
    progress: Progress,
) -> PackReport:
    specs = way.specs
    if not 1 <= len(specs) <= MAX_LEVELS:
        raise InfeasibleLevels(f"{len(specs)} levels, expected 1..{MAX_LEVELS}")
    if names is not None:
        if len(names) != len(specs) or not all(names):
            raise InfeasibleLevels(f"{len(names)} names for {len(specs)} levels")
        specs = [replace(spec, name=name) for spec, name in zip(specs, names, strict=True)]
    if not choice.nested:
        raise InfeasibleLevels(
            f"{network.path}: no tensor can be nested; expected a floating tensor of 2 dimensions, "
            "or name some with --include"
        )
    bits = bits_for(len(specs))
    nested = [network.tensors[name] for name in choice.nested]
    for info in nested:
        check_bits(info.dtype, bits, f"{network.path}: tensor {info.name!r}")
    infos = [info for name, info in network.tensors.items()]
    for name in choice.per_level:
        for t in range(1, len(specs) + 1):
            infos.append(replace(network.tensors[name], name=variant_name(name, t)))
    meter = _Meter(progress, nested, infos, way.passes)
    with open_output(out, force=force) as output:
        way.prepare(nested, meter.tick)
        writer = Writer(
            output,
            infos,
            bits=bits,
            levels=specs,
            nested=choice.nested,
            per_level=choice.per_level,
            metadata=network.metadata,
            digests=digests,
        )
        variant_of = {
            variant_name(name, t): (checkpoint, name)
            for t, checkpoint in enumerate(variants, 1)
            for name in choice.per_level
        }
        for name in writer.tensors:
            if name in writer.counts:
                stored = _embedded(
                    network.tensors[name], way, network.path, bits, len(specs), rounding
                )
            else:
                checkpoint, plain = variant_of.get(name, (network, name))
                stored = checkpoint.blocks(plain, BLOCK)
            for block in stored:
                writer.append(name, block)
                meter.tick(block.nbytes)
        profile = writer.finish()
    weights = sum(info.elements for info in nested)
    return PackReport(profile, choice.nested, weights, choice.shared, _notes(nested, bits))


def _embedded(
    info: TensorInfo, way: Assignment, path: str, bits: int, levels: int, rounding: Rounding
) -> Iterator[Words]:
    where, position = f"{path}: tensor {info.name!r}", 0
    result = np.empty(0, info.dtype.words)
    for words, counters in way.blocks(info):
        refuse_unpackable(words, counters, info.dtype, levels, where, first=position)
        if result.size < words.size:
            result = np.empty(words.size, info.dtype.words)
        part = result[: words.size]
        nearest = rounding == "nearest"
        _kernels.embed(words, counters, part, bits, info.dtype.infinity, nearest)
        yield part
        position += words.size


class _Meter:
    """Adds up what was read, over all passes."""

    def __init__(
        self, progress: Progress, nested: list[TensorInfo], infos: list[TensorInfo], passes: int
    ) -> None:
        self.progress, self.done = progress, 0
        self.total = sum(info.nbytes for info in infos) + passes * sum(i.nbytes for i in nested)

    def tick(self, size: int) -> None:
        self.done += size
        self.progress(self.done, self.total)


def _notes(nested: list[TensorInfo], bits: int) -> tuple[str, ...]:
    # Measured: in BF16, 3 counter bits cost about a point of accuracy and 4 cost eight.
    narrow = [info for info in nested if info.dtype.mantissa - bits < 5]
    if not narrow:
        return ()
    info = narrow[0]
    return (
        f"{bits}-bit counters leave {info.dtype.mantissa - bits} mantissa bits in "
        f"{info.dtype.name} ({len(narrow)} tensors); check the accuracy, or pack from float32",
    )


def _check_shared(network: Checkpoint, levels: list[Checkpoint], choice: _Choice) -> None:
    """Tensors without counters are stored once, so all checkpoints must agree on them."""
    for name in choice.shared:
        for level in levels:
            pairs = zip(network.blocks(name, BLOCK), level.blocks(name, BLOCK), strict=True)
            if not all(np.array_equal(one, other) for one, other in pairs):
                raise TensorMismatch(
                    f"{level.path}: tensor {name!r} differs from {network.path}'s; "
                    f"store one per level with --per-level {name!r}"
                )
