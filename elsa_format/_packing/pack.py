"""Pack a checkpoint: decide every weight's counter, embed it, write the file, in bounded memory."""

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from fractions import Fraction
from functools import cached_property
from pathlib import Path

import numpy as np

from elsa_format._container.header import TensorInfo
from elsa_format._container.index import is_index, is_url
from elsa_format._container.json import is_text
from elsa_format._counters import (
    MAX_LEVELS,
    ROUNDINGS,
    Embedding,
    Rounding,
    bits_for,
    check_bits,
)
from elsa_format._delivery.estimate import estimated_downloads
from elsa_format._errors import (
    InfeasibleLevels,
    InvalidCheckpoint,
    InvalidOption,
    NoSuchTensor,
    OutputExists,
    TensorMismatch,
)
from elsa_format._memory import BLOCK, give_block, take_block
from elsa_format._options import one_of, strings, whole
from elsa_format._output import Target
from elsa_format._output.directory import InDirectory, in_directory
from elsa_format._output.shards import check_shard_size, group_tensors
from elsa_format._packing.assignment import Assignment, Words
from elsa_format._packing.checkpoint import Checkpoint
from elsa_format._packing.directory import (
    chosen_by_default,
    pattern_axes,
    transformer_notes,
    unpruned,
)
from elsa_format._packing.given import GivenCounters
from elsa_format._packing.magnitude import SCOPES, MagnitudeLevels, Scope
from elsa_format._packing.nested import NestedCheckpoints
from elsa_format._packing.open import CheckpointLike, open_checkpoint
from elsa_format._packing.pattern import PatternLevels, common_group
from elsa_format._packing.starved import starved_notes
from elsa_format._profile import Profile, variant_name
from elsa_format._storage.directory import is_directory
from elsa_format._threads import Meter, Progress, no_progress
from elsa_format._writer import (
    Contents,
    LevelSpec,
    NetworkWriter,
    ShardWriter,
    open_writer,
    refuse_same_names,
)
from elsa_format.levels import Pattern, Sparsity, check_levels, parse_sparsities


@dataclass(frozen=True)
class PackReport:
    """What was packed.

    >>> report = pack("dense.safetensors", "new.safetensors", sparsities=["2:4"])
    >>> report.nested_weights, [level.nonzero for level in report.profile.levels]
    (10000, [5000])
    """

    profile: Profile
    nested: tuple[str, ...]
    nested_weights: int
    shared: Mapping[str, str]
    """Tensors that carry no counters, and why."""
    notes: tuple[str, ...] = ()
    """What the user should know about the result."""
    defaults: tuple[str, ...] = ()
    """What was chosen because no option said otherwise, and why."""
    parameters: int = 0
    """Elements of all tensors of the network, nested or not."""
    downloads: Mapping[int | str, int] = field(default_factory=dict)
    """About how many bytes of a delivery file each level, and "dense", would take."""


def pack(
    dense: CheckpointLike,
    out: Target,
    *,
    sparsities: Sparsity | Iterable[Sparsity] | None = None,
    levels: CheckpointLike | Iterable[CheckpointLike] | None = None,
    counters: CheckpointLike | None = None,
    scope: Scope | None = None,
    axis: int | None = None,
    include: str | Iterable[str] = (),
    exclude: str | Iterable[str] = (),
    nest_all: bool = False,
    per_level: str | Iterable[str] = (),
    names: str | Iterable[str] | None = None,
    level_count: int | None = None,
    rounding: Rounding = "nearest",
    digests: bool = True,
    template: str | os.PathLike[str] | None = None,
    max_shard_size: int | None = None,
    jobs: int = 1,
    force: bool = False,
    progress: Progress = no_progress,
) -> PackReport:
    """Nest levels into a dense checkpoint and write the ELSA file.

    Exactly one of: `sparsities`, one-shot magnitude levels, sparsest first; `levels`, nested sparse
    checkpoints, sparsest first; `counters`, the paper's N, integers under the same names: t is
    frozen at level t, 0 in the dense network only. There are as many levels as the largest counter
    says, or `level_count` T, and then T + 1 is in the dense network only, too. A `template` is what
    else a kind of checkpoint needs to run, such as ONNX's graph.

    `include`, `exclude` and `per_level` are shell patterns of tensor names; `names` names the
    levels. Magnitudes are compared over all tensors, or within each if the `scope` is "uniform";
    N:M patterns lie along an `axis`, the last.

    A model directory, as `save_pretrained` writes it, gives a directory, unless `out` ends in
    `.safetensors`; all but other weights is copied. Its one-shot levels are uniform, N:M patterns
    lie along the inputs of each layer, and embeddings, positions, norms, routers and output heads
    are not nested, but with `nest_all`, nor are layers that N:M does not divide.

    An `out` that ends in `.index.json` is written in shards, those of the input or, given
    `max_shard_size`, as many as it takes; `jobs` shards are written at a time. It may be a URL of a
    store, such as `s3://bucket/net.safetensors`.

    >>> report = pack("dense.safetensors", "packed.safetensors", sparsities=[95, 90, 80])
    >>> report.nested, report.shared
    (('layer',), {'bias': '1-dimensional'})
    """
    if sum(way is not None for way in (sparsities, levels, counters)) != 1:
        raise TypeError("give exactly one of sparsities, levels, counters")
    if level_count is not None and counters is None:
        raise TypeError("level_count goes with counters")
    one_of("rounding", rounding, ROUNDINGS)
    folder = Path(dense) if is_directory(dense) else None  # type: ignore[arg-type]
    default_scope = scope is None
    if scope is None:
        scope = "uniform" if folder else "global"
    one_of("scope", scope, SCOPES)
    axis = None if axis is None else whole("axis", axis)
    jobs = whole("jobs", jobs, low=1)
    out = in_directory(dense, out, sharded=max_shard_size is not None)
    check_shard_size(out, max_shard_size)
    names = None if names is None else strings("names", names)
    sources: list[Checkpoint] = []
    with contextlib.ExitStack() as stack:

        def opened(source: CheckpointLike) -> Checkpoint:
            checkpoint = open_checkpoint(source)
            stack.callback(checkpoint.close)
            sources.append(checkpoint)
            return checkpoint

        network = opened(dense)
        if template is not None:
            _check_template(network, template, out, force)
        choice = _choose(
            network,
            strings("include", include),
            strings("exclude", exclude),
            strings("per_level", per_level),
        )
        assignment: Assignment
        variants: list[Checkpoint] = []
        defaults: tuple[str, ...] = ()
        if sparsities is not None:
            parsed = parse_sparsities(sparsities)
            check_levels(parsed)
            axes: int | Mapping[str, int] = -1 if axis is None else axis
            spare = folder is not None and not (nest_all or include)
            if folder is not None and spare:
                choice = choice.without(unpruned(network.tensors, folder))
            patterns = [level for level in parsed if isinstance(level, Pattern)]
            if folder is not None and patterns:
                axes, uneven = pattern_axes(network.tensors, common_group(patterns), axis)
                choice = choice.without(uneven)
            defaults = chosen_by_default(
                directory=folder is not None,
                patterns=bool(patterns),
                scope=default_scope,
                axis=axis is None,
                spared=spare,
            )
            if patterns:
                assignment = PatternLevels(network, patterns, axes)
            else:
                fractions = [level for level in parsed if isinstance(level, Fraction)]
                assignment = MagnitudeLevels(network, fractions, scope, any_order=is_index(out))
        elif levels is not None:
            if isinstance(levels, str | os.PathLike | Mapping | Checkpoint):
                levels = [levels]
            variants = [opened(level) for level in levels]
            assignment = NestedCheckpoints(network, variants)
            _check_shared(network, variants, choice)
        else:
            assert counters is not None
            given = opened(counters)
            choice = choice.only(given.tensors, "no counters given")
            if level_count is not None:
                level_count = whole("level_count", level_count, low=1, high=MAX_LEVELS)
            elif names is not None:
                level_count = len(names)
            assignment = GivenCounters(network, given, choice.nested, level_count)
        if choice.per_level and not variants:
            raise TensorMismatch(
                "per-level tensors come from level checkpoints, and none are given"
            )
        specs = _name(assignment.specs, names)
        job = _Job(network, assignment, variants, choice, specs, rounding)
        job.check()
        groups = job.groups(max_shard_size) if is_index(out) else [job.infos]
        contents = Contents(
            job.bits,
            specs,
            frozenset(choice.nested),
            choice.per_level,
            network.metadata,
            digests=digests,
            about=network.about,
        )
        left = out.not_copied if isinstance(out, InDirectory) else []
        with open_writer(out, groups, contents, force=force) as writer:
            job.run(writer, progress, jobs)
            for checkpoint in sources:
                checkpoint.check_unchanged()
            profile = writer.finish(progress)
        report = replace(job.report(profile, left), defaults=defaults)
        if sparsities is not None and folder is None and not include:
            nested, other = job.nested.values(), default_scope and not patterns
            notes = transformer_notes(nested, scope=other)
            report = replace(report, notes=report.notes + notes)
        if template is not None:
            network.write_template(template, os.fspath(out), force=force)  # type: ignore[arg-type]
        return report


def _check_template(
    network: Checkpoint, template: str | os.PathLike[str], out: Target, force: bool
) -> None:
    """Refuse before packing what writing the template could fail for."""
    if not isinstance(out, str | os.PathLike):
        raise TypeError("a template points into a file, and the output is a stream")
    if is_url(os.fspath(out)):
        raise InvalidOption("a template points into a file beside it, and the output is in a store")
    network.check_template(template, out)
    if not force and os.path.exists(template):
        exists = f"{os.fspath(template)}: exists already"
        raise OutputExists(exists, "{force} replaces it", force=True)


@dataclass(frozen=True)
class _Choice:
    """What is to become of each tensor."""

    nested: tuple[str, ...]
    per_level: frozenset[str]
    shared: dict[str, str]

    def without(self, reasons: Mapping[str, str]) -> "_Choice":
        dropped = {name: reasons[name] for name in self.nested if name in reasons}
        kept = tuple(name for name in self.nested if name not in reasons)
        return replace(self, nested=kept, shared=self.shared | dropped)

    def only(self, names: Mapping[str, object], reason: str) -> "_Choice":
        return self.without({name: reason for name in self.nested if name not in names})


def _choose(
    network: Checkpoint, include: list[str], exclude: list[str], per_level: list[str]
) -> _Choice:
    for pattern in (*include, *exclude, *per_level):
        if not any(fnmatchcase(name, pattern) for name in network.tensors):
            raise NoSuchTensor.of(network.path, "no tensor matches", pattern, network.tensors)

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
    return _Choice(tuple(nested), frozenset(varying), shared)


def _name(specs: list[LevelSpec], names: Sequence[str] | None) -> list[LevelSpec]:
    if not 1 <= len(specs) <= MAX_LEVELS:
        raise InfeasibleLevels(f"{len(specs)} levels, expected 1..{MAX_LEVELS}")
    if names is not None:
        if len(names) != len(specs):
            raise InfeasibleLevels(f"{len(names)} names for {len(specs)} levels")
        for name in names:
            if isinstance(name, str) and not is_text(name):
                raise InfeasibleLevels(f"level name {name!r}: expected UTF-8")
        specs = [replace(spec, name=name) for spec, name in zip(specs, names, strict=True)]
    refuse_same_names([spec.name for spec in specs])
    return specs


@dataclass(frozen=True)
class _Job:
    """A checkpoint, and all that was decided about it."""

    network: Checkpoint
    assignment: Assignment
    variants: list[Checkpoint]
    choice: _Choice
    specs: list[LevelSpec]
    rounding: Rounding

    @property
    def bits(self) -> int:
        return bits_for(len(self.specs))

    @cached_property
    def nested(self) -> dict[str, TensorInfo]:
        return {name: self.network.tensors[name] for name in self.choice.nested}

    @cached_property
    def _variants(self) -> dict[str, tuple[Checkpoint, str]]:
        """Where the variants of tensors come from, by their stored names."""
        return {
            variant_name(name, t): (checkpoint, name)
            for name in self.choice.per_level
            for t, checkpoint in enumerate(self.variants, 1)
        }

    def check(self) -> None:
        """Refuse what cannot be packed before anything is read."""
        if not self.nested:
            chosen = {"excluded", "not included"} & set(self.choice.shared.values())
            for name, reason in reversed(self.choice.shared.items()):
                if self.network.nestable(name) and reason not in chosen:
                    raise InfeasibleLevels(
                        f"{self.network.path}: no tensor is left to nest; {name!r} is left out: "
                        f"{reason}",
                        "{include} names others",
                    )
            problem = InfeasibleLevels if chosen else InvalidCheckpoint
            raise problem(
                f"{self.network.path}: no tensor can be nested; expected a floating tensor of "
                "2 dimensions",
                "{include} names others",
            )
        for info in self.nested.values():
            check_bits(info.dtype, self.bits, f"{self.network.path}: tensor {info.name!r}")

    @property
    def infos(self) -> list[TensorInfo]:
        """Every tensor to be stored."""
        return self._with_variants(self.network.tensors)

    def groups(self, max_size: int | None) -> list[list[TensorInfo]]:
        """The tensors of each shard; variants are where the plain tensor is."""
        sizes = {
            name: sum(info.nbytes for info in self._with_variants([name]))
            for name in self.network.tensors
        }
        groups = group_tensors(sizes, self.network.groups, max_size)
        return [self._with_variants(names) for names in groups]

    def _with_variants(self, names: Iterable[str]) -> list[TensorInfo]:
        infos = [self.network.tensors[name] for name in names]
        varying = [info for info in infos if info.name in self.choice.per_level]
        numbers = range(1, len(self.specs) + 1)
        variants = [replace(it, name=variant_name(it.name, t)) for it in varying for t in numbers]
        return infos + variants

    def run(self, writer: NetworkWriter, progress: Progress, jobs: int) -> None:
        """Decide on the counters, then write all tensors."""
        nested = list(self.nested.values())
        passes = self.assignment.passes * sum(info.nbytes for info in nested)
        meter = Meter(progress, passes + sum(info.nbytes for info in self.infos))
        self.assignment.prepare(nested, meter.tick)

        def write_shard(shard: ShardWriter) -> None:
            for name in shard.tensors:
                for block in self._stored(name):
                    shard.append(name, block)
                    meter.tick(block.nbytes)

        meter.run(write_shard, writer.shards, jobs)

    def _stored(self, name: str) -> Iterator[Words]:
        if name in self.nested:
            return self._embedded(self.nested[name])
        checkpoint, plain = self._variants.get(name, (self.network, name))
        return checkpoint.blocks(plain, BLOCK)

    def _embedded(self, info: TensorInfo) -> Iterator[Words]:
        embedding = Embedding(info.dtype, self.bits, len(self.specs), self.rounding)
        where, position = f"{self.network.path}: tensor {info.name!r}", 0
        result = take_block()
        for words, counters in self.assignment.blocks(info):
            if result.size < words.nbytes:
                result = take_block(words.nbytes)
            part = result[: words.nbytes].view(info.dtype.words)
            embedding.embed(words, counters, part, where, first=position)
            yield part
            position += words.size
        give_block(result)

    def report(self, profile: Profile, not_copied: list[str]) -> PackReport:
        """What was packed."""
        sizes = {name: info.elements for name, info in self.nested.items()}
        weights = sum(sizes.values())
        levels = [level.name for level in profile.levels]
        notes = (
            *self.assignment.notes,
            *_notes(list(self.nested.values()), self.bits),
            *starved_notes(profile.nested, sizes, levels, advice=self.assignment.starved_advice),
        )
        if not_copied:
            few = ", ".join(map(repr, not_copied[:4]))
            more = f", … {len(not_copied) - 4} more" if len(not_copied) > 4 else ""
            notes += (f"not copied, as they hold weights: {few}{more}",)
        return PackReport(
            profile,
            self.choice.nested,
            weights,
            self.choice.shared,
            notes,
            parameters=sum(info.elements for info in self.network.tensors.values()),
            downloads=estimated_downloads({info.name: info for info in self.infos}, profile),
        )


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
                    f"{level.path}: tensor {name!r} differs from {network.path}'s",
                    "{per_level} stores one for each level",
                    per_level=name,
                )
