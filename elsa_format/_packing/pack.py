"""Pack a checkpoint: decide every weight's counter, embed it, write the file, in bounded memory."""

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Unpack

import numpy as np

from elsa_format._container import TensorInfo
from elsa_format._container.index import is_index, is_url
from elsa_format._container.json import is_text
from elsa_format._counters import MAX_LEVELS, Embedding, Words, bits_for, check_bits
from elsa_format._destination import DirectoryTarget, check_shard_size, group_tensors, in_directory
from elsa_format._directory import is_directory
from elsa_format._errors import (
    ConflictingOptions,
    InfeasibleLevels,
    InvalidCheckpoint,
    InvalidOption,
    OutputExists,
    TensorMismatch,
)
from elsa_format._level_header import estimated_downloads
from elsa_format._memory import BLOCK, give_block, take_block
from elsa_format._options import check_int
from elsa_format._output import Target
from elsa_format._packing import Checkpoint, CheckpointLike, open_checkpoint
from elsa_format._packing.assignment import Assignment, GivenCounters, NestedCheckpoints
from elsa_format._packing.calibration import (
    Calibration,
    SolvedLevels,
    one_shot_notes,
    open_calibration,
)
from elsa_format._packing.layers import empty_layers, transformer_notes
from elsa_format._packing.one_shot import MagnitudeLevels, PatternLevels
from elsa_format._packing.options import PackFields, PackOptions, TensorChoice, choose_tensors
from elsa_format._profile import Profile, variant_name
from elsa_format._threads import Meter, Progress, no_progress
from elsa_format._writer import (
    Contents,
    LevelSpec,
    NetworkWriter,
    ShardWriter,
    open_writer,
    refuse_same_names,
)


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
    options: PackOptions | None = None,
    *,
    template: str | os.PathLike[str] | None = None,
    max_shard_size: int | None = None,
    jobs: int = 1,
    force: bool = False,
    progress: Progress = no_progress,
    **fields: Unpack[PackFields],
) -> PackReport:
    """Nest levels into a dense checkpoint and write the ELSA file.

    A model directory, as `save_pretrained` writes it, gives a directory, unless `out` ends in
    `.safetensors`; all but other weights is copied. Its one-shot levels are uniform, N:M patterns
    lie along the inputs of each layer, and embeddings, positions, norms, routers and output heads
    are not nested, but with `nest_all`, nor are layers that N:M does not divide.

    >>> report = pack("dense.safetensors", "packed.safetensors", sparsities=[95, 90, 80])
    >>> report.nested, report.shared
    (('layer',), {'bias': '1-dimensional'})

    Args:
        dense: A file, a shard index, a model directory, a URL, named arrays or a `Checkpoint`.
        out: A file, a model directory, a stream, or a URL of a store such as
            `s3://bucket/net.safetensors`. One that ends in `.index.json` is written in shards,
            those of the input unless `max_shard_size` is given.
        options: Which levels are nested into which tensors.
        template: Where what else a kind of checkpoint needs to run goes, such as ONNX's graph.
        max_shard_size: Most bytes of a shard.
        jobs: How many shards are written at a time.
        force: Replace files that exist.
        progress: Is told how much is done.
        **fields: Fields of `PackOptions`, in place of those of `options`.

    Returns:
        What was packed.
    """
    if isinstance(dense, Calibration):
        options = _of_calibration(dense, options, fields)
    else:
        options = PackOptions(**fields) if options is None else replace(options, **fields)
    jobs = check_int("jobs", jobs, low=1)
    folder = Path(dense) if is_directory(dense) else None  # type: ignore[arg-type]
    out = in_directory(dense, out, sharded=max_shard_size is not None)
    check_shard_size(out, max_shard_size)
    sources: list[Checkpoint] = []
    with contextlib.ExitStack() as stack:

        def opened(source: CheckpointLike) -> Checkpoint:
            checkpoint = open_checkpoint(source)
            stack.callback(checkpoint.close)
            sources.append(checkpoint)
            return checkpoint

        if options.calibrate is not None and not isinstance(dense, Calibration):
            dense = open_calibration(dense, options.calibrate, options.calibration)
        network = opened(dense)
        if template is not None:
            _check_template(network, template, out, force)
        choice = choose_tensors(network, options, folder)
        assignment: Assignment
        levels: list[Checkpoint] = []
        if isinstance(network, Calibration):
            assignment = SolvedLevels(network)
        elif options.patterns:
            assignment = PatternLevels(network, options.patterns, choice.axes)
        elif options.one_shot:
            scope = options.scope_of(folder)
            assignment = MagnitudeLevels(network, options.fractions, scope, any_order=is_index(out))
        elif options.counters is not None:
            given = opened(options.counters)
            others = network.tensors.keys() - given.tensors.keys()
            choice = choice.without(dict.fromkeys(others, "no counters given"))
            assignment = GivenCounters(network, given, choice.nested, options.known_count)
        else:
            levels = [opened(level) for level in options.checkpoints]
            assignment = NestedCheckpoints(network, levels)
            _check_shared(network, levels, choice)
        specs = _named(assignment.specs, options.level_names)
        job = _Job(network, options, assignment, levels, choice, specs)
        job.check()
        groups = job.groups(max_shard_size) if is_index(out) else [job.infos]
        left = out.not_copied if isinstance(out, DirectoryTarget) else []
        with open_writer(out, groups, job.contents, force=force) as writer:
            job.run(writer, progress, jobs)
            for checkpoint in sources:
                checkpoint.check_unchanged()
            profile = writer.finish(progress, assignment.measured)
        if template is not None:
            network.write_template(template, os.fspath(out), force=force)  # type: ignore[arg-type]
        return job.report(profile, folder, left)


def _of_calibration(
    calibration: Calibration, options: PackOptions | None, fields: PackFields
) -> PackOptions:
    """The options of a calibration that is ready to be solved."""
    if options is not None or fields.keys() - {"names", "digests"}:
        raise ConflictingOptions(
            f"{calibration.path}: a calibration has options of its own",
            "beside it, {names} and {digests} can be given",
        )
    asked = PackOptions(sparsities=calibration.levels, calibrate=calibration)
    return replace(asked, **fields)


def _check_template(
    network: Checkpoint, template: str | os.PathLike[str], out: Target, force: bool
) -> None:
    """Refuse before packing what writing the template could fail for."""
    if not isinstance(out, str | os.PathLike):
        raise ConflictingOptions("a template points into a file, and the output is a stream")
    if is_url(os.fspath(out)):
        raise InvalidOption("a template points into a file beside it, and the output is in a store")
    network.check_template(template, out)
    if not force and os.path.exists(template):
        exists = f"{os.fspath(template)}: exists already"
        raise OutputExists(exists, "{force} replaces it", force=True)


def _named(specs: list[LevelSpec], names: Sequence[str] | None) -> list[LevelSpec]:
    if not 1 <= len(specs) <= MAX_LEVELS:
        raise InfeasibleLevels(f"{len(specs)} levels, expected 1..{MAX_LEVELS}")
    if names is not None:
        if len(names) != len(specs):
            raise InfeasibleLevels(f"{len(names)} names for {len(specs)} levels")
        for name in names:
            if not is_text(name):
                raise InfeasibleLevels(f"level name {name!r}: expected UTF-8")
        specs = [replace(spec, name=name) for spec, name in zip(specs, names, strict=True)]
    refuse_same_names([spec.name for spec in specs])
    return specs


@dataclass(frozen=True)
class _Job:
    """A checkpoint, and all that was decided about it."""

    network: Checkpoint
    options: PackOptions
    assignment: Assignment
    levels: list[Checkpoint]
    """The checkpoints of the levels, if these are given so."""
    choice: TensorChoice
    specs: list[LevelSpec]

    @property
    def bits(self) -> int:
        return bits_for(len(self.specs))

    @cached_property
    def nested(self) -> dict[str, TensorInfo]:
        return {name: self.network.tensors[name] for name in self.choice.nested}

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
    def contents(self) -> Contents:
        """What is written, besides the tensors."""
        contents = Contents(
            self.bits,
            self.specs,
            frozenset(self.choice.nested),
            self.choice.per_level,
            self.network.metadata,
            digests=self.options.digests,
            extra_metadata=self.network.extra_metadata,
        )
        return contents.unmeasured(self.assignment.metrics)

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
        self.assignment.solve(writer.append, progress)
        nested = list(self.nested.values())
        passes = self.assignment.passes * sum(info.nbytes for info in nested)
        meter = Meter(progress, passes + sum(info.nbytes for info in self.infos))
        self.assignment.prepare(nested, meter.tick)

        def write_shard(shard: ShardWriter) -> None:
            for name in shard.tensors:
                if shard.taken(name):  # it was solved
                    continue
                for block in self._blocks(*shard.variants.get(name, (name, 0))):
                    shard.append(name, block)
                    meter.tick(block.nbytes)

        meter.run(write_shard, writer.shards, jobs)

    def _blocks(self, name: str, level: int) -> Iterator[Words]:
        if name in self.nested:
            return self._embedded(self.nested[name])
        checkpoint = self.levels[level - 1] if level and self.levels else self.network
        return checkpoint.blocks(name, BLOCK)

    def _embedded(self, info: TensorInfo) -> Iterator[Words]:
        embedding = Embedding(info.dtype, self.bits, len(self.specs), self.options.rounding)
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

    def report(self, profile: Profile, folder: Path | None, not_copied: list[str]) -> PackReport:
        """What was packed."""
        sizes = {name: info.elements for name, info in self.nested.items()}
        return PackReport(
            profile,
            self.choice.nested,
            sum(sizes.values()),
            self.choice.shared,
            tuple(self._notes(profile, sizes, folder, not_copied)),
            self.options.defaults(folder) + self.assignment.defaults,
            sum(info.elements for info in self.network.tensors.values()),
            estimated_downloads({info.name: info for info in self.infos}, profile),
        )

    def _notes(
        self,
        profile: Profile,
        sizes: Mapping[str, int],
        folder: Path | None,
        not_copied: list[str],
    ) -> Iterator[str]:
        yield from self.assignment.notes
        # Measured: in BF16, 3 counter bits cost about a point of accuracy and 4 cost eight.
        narrow = [info for info in self.nested.values() if info.dtype.mantissa - self.bits < 5]
        if narrow:
            yield (
                f"{self.bits}-bit counters leave {narrow[0].dtype.mantissa - self.bits} mantissa "
                f"bits in {narrow[0].dtype.name} ({len(narrow)} tensors); check the accuracy, or "
                "pack from float32"
            )
        names = [level.name for level in profile.levels]
        advice = self.assignment.empty_layers_advice
        yield from empty_layers(profile.nested, sizes, names, advice=advice)
        yield from one_shot_notes(self.options.one_shot, folder or self.network.path)
        if not_copied:
            few = ", ".join(map(repr, not_copied[:4]))
            more = f", … {len(not_copied) - 4} more" if len(not_copied) > 4 else ""
            yield f"not copied, as they hold weights: {few}{more}"
        if self.options.one_shot and folder is None and not self.options.include:
            scope = self.options.scope is None and not self.options.patterns
            yield from transformer_notes(self.nested.values(), scope=scope)


def _check_shared(network: Checkpoint, levels: list[Checkpoint], choice: TensorChoice) -> None:
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
