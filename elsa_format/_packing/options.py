"""What is asked of `pack`, checked once, and what becomes of each tensor by it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from fractions import Fraction
from os import PathLike
from pathlib import Path
from typing import Any, Literal, TypedDict, cast, get_args

from elsa_format._container import TensorInfo
from elsa_format._counters import MAX_LEVELS, ROUNDINGS, Rounding
from elsa_format._errors import ConflictingOptions, NoSuchTensor
from elsa_format._options import check_int, one_of, strings
from elsa_format._packing import Checkpoint, CheckpointLike
from elsa_format._packing.calibration import (
    Calibration,
    CalibrationOptions,
    Favour,
    KeepDense,
    not_chosen,
)
from elsa_format._packing.layers import common_group, input_axes, uneven, unpruned
from elsa_format.levels import Pattern, Sparsity, check_levels, parse_sparsities

Scope = Literal["auto", "global", "uniform"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
OF_CALIBRATION = (
    "samples",
    "length",
    "keep_dense",
    "favour",
    "all_classes",
    "max_memory",
    "threads",
)
"""Fields that mean something with `calibrate` alone, and that `CalibrationOptions` has, too."""


class PackFields(TypedDict, total=False):
    """The fields of `PackOptions` as keywords, for type checkers."""

    sparsities: Sparsity | Iterable[Sparsity] | None
    levels: CheckpointLike | Iterable[CheckpointLike] | None
    counters: CheckpointLike | None
    calibrate: Any
    level_count: int | None
    scope: Scope | None
    axis: int | None
    include: str | Iterable[str]
    exclude: str | Iterable[str]
    nest_all: bool
    per_level: str | Iterable[str]
    names: str | Iterable[str] | None
    rounding: Rounding
    digests: bool
    samples: int | None
    length: int | None
    keep_dense: KeepDense | None
    favour: Favour | None
    all_classes: bool
    max_memory: int | None
    threads: int | None


@dataclass(frozen=True, kw_only=True)
class PackOptions:
    """Which levels `pack` nests into which tensors, and how; every field is a keyword of it, too.

    Exactly one of `sparsities`, `levels` and `counters` says which weights each level keeps.

    >>> options = PackOptions(sparsities="95,90", include="layer*", names=["small", "large"])
    >>> from elsa_format import pack
    >>> report = pack("dense.safetensors", "new.safetensors", options)
    >>> [level.name for level in report.profile.levels]
    ['small', 'large']

    Args:
        sparsities: Levels by magnitude, or calibrated ones, sparsest first: percent, fractions
            below 1, or N:M patterns such as "2:4".
        levels: Nested sparse checkpoints, sparsest first.
        counters: The paper's N, integers under the names of the tensors: t is frozen at level t, 0
            in the dense network only.
        calibrate: Samples of the network's inputs, by which calibration chooses masks and adapts
            the weights: a path, or what else the kind of network takes.
        level_count: How many levels the counters have, if not as many as the largest of them says.
            One more than that is in the dense network only, too.
        scope: Compare magnitudes over all tensors ("global") or within each ("uniform"); with
            `calibrate`, "auto" gives layers shares by what they cost the outputs. Default: auto
            with `calibrate`, uniform for a model directory, else global.
        axis: The axis N:M groups lie along. Default: each layer's inputs in a model directory, else
            the last.
        include: Shell patterns of tensor names; only these are nested.
        exclude: Shell patterns of tensor names that are not nested.
        nest_all: Nest embeddings, positions, norms, routers and output heads of a model directory.
        per_level: Shell patterns of tensor names that are stored once per level, from `levels`.
        names: Names of the levels.
        rounding: How a counter enters a weight: "nearest", or "overwrite" as in the paper.
        digests: Compute the digest of each level.
        samples: Calibrate with at most so many samples.
        length: Tokens of each sample of text.
        keep_dense: What becomes of the dense network: "bounded", its outputs move little, or
            "exact", its weights stay but for the counters. Default: bounded.
        favour: Whom a trade between levels and dense network serves: "sparse" or "dense".
        all_classes: Weigh all classes alike, however often the samples show them.
        max_memory: Bytes of activations that stay in memory; more go to temporary files.
        threads: Threads of the calibration, whose result is the same with any number. Default: as
            many as there are cores.
    """

    sparsities: Sparsity | Iterable[Sparsity] | None = None
    levels: CheckpointLike | Iterable[CheckpointLike] | None = None
    counters: CheckpointLike | None = None
    calibrate: Any = None
    level_count: int | None = None
    scope: Scope | None = None
    axis: int | None = None
    include: str | Iterable[str] = ()
    exclude: str | Iterable[str] = ()
    nest_all: bool = False
    per_level: str | Iterable[str] = ()
    names: str | Iterable[str] | None = None
    rounding: Rounding = "nearest"
    digests: bool = True
    samples: int | None = None
    length: int | None = None
    keep_dense: KeepDense | None = None
    favour: Favour | None = None
    all_classes: bool = False
    max_memory: int | None = None
    threads: int | None = None

    def __post_init__(self) -> None:
        if sum(way is not None for way in (self.sparsities, self.levels, self.counters)) != 1:
            ways = "give one of {sparsities}, {levels} and {counters}"
            raise ConflictingOptions("levels come from one source", ways)
        if self.level_count is not None:
            if self.counters is None:
                raise ConflictingOptions(
                    "only counters have a number of levels", "{level_count} needs {counters}"
                )
            self._set("level_count", check_int("level_count", self.level_count, 1, MAX_LEVELS))
        for name in ("include", "exclude", "per_level", "names"):
            if (value := getattr(self, name)) is not None:
                self._set(name, tuple(strings(name, value)))
        if self.per_level and self.levels is None:
            raise NoSuchTensor("no level has per-level tensors", "{per_level} needs {levels}")
        if self.sparsities is not None:
            self._set("sparsities", tuple(parse_sparsities(self.sparsities)))
            check_levels(self.wanted)
        if isinstance(self.levels, str | PathLike | Mapping | Checkpoint):
            self._set("levels", (self.levels,))
        elif self.levels is not None:
            self._set("levels", tuple(self.levels))
        if self.scope is not None:
            one_of("scope", self.scope, SCOPES)
        if self.axis is not None:
            self._set("axis", check_int("axis", self.axis))
        one_of("rounding", self.rounding, ROUNDINGS)
        self._check_calibration()

    def _check_calibration(self) -> None:
        if self.calibrate is None:
            if self.scope == "auto":
                raise ConflictingOptions(
                    "only samples tell what each layer needs",
                    "{scope} needs {calibrate}",
                    scope="auto",
                )
            for name in OF_CALIBRATION:
                if getattr(self, name) not in (None, False):
                    raise ConflictingOptions(
                        "levels are not calibrated", f"{{{name}}} needs {{calibrate}}"
                    )
            return
        if self.sparsities is None:
            raise ConflictingOptions(
                "calibration makes levels of its own", "{calibrate} needs {sparsities}"
            )
        for name, default in (("axis", None), ("rounding", "nearest")):
            if getattr(self, name) != default:
                raise ConflictingOptions(
                    "calibration decides that by itself", f"{{calibrate}} excludes {{{name}}}"
                )
        _ = self.calibration

    def _set(self, name: str, checked: object) -> None:
        object.__setattr__(self, name, checked)

    @property
    def wanted(self) -> Sequence[Fraction | Pattern]:
        """The sparsities, as they were parsed."""
        return cast("Sequence[Fraction | Pattern]", self.sparsities or ())

    @property
    def one_shot(self) -> Sequence[Fraction | Pattern]:
        """The sparsities, if magnitudes alone decide."""
        return self.wanted if self.calibrate is None else ()

    @property
    def calibration(self) -> CalibrationOptions:
        """What is asked of the calibration."""
        given = {name: getattr(self, name) for name in OF_CALIBRATION}
        given = {name: value for name, value in given.items() if value is not None}
        return CalibrationOptions(
            levels=self.wanted,
            scope=self.scope,
            include=tuple(self.include),
            exclude=tuple(self.exclude),
            nest_all=self.nest_all,
            **given,
        )

    @property
    def fractions(self) -> list[Fraction]:
        """The sparsities, if they are no patterns."""
        return [level for level in self.one_shot if isinstance(level, Fraction)]

    @property
    def patterns(self) -> list[Pattern]:
        """The sparsities, if they are N:M patterns."""
        return [level for level in self.one_shot if isinstance(level, Pattern)]

    @property
    def checkpoints(self) -> Sequence[CheckpointLike]:
        """The levels, several even if there is one."""
        return cast("Sequence[CheckpointLike]", self.levels or ())

    @property
    def level_names(self) -> Sequence[str] | None:
        """The names, if there are any."""
        return cast("Sequence[str] | None", self.names)

    @property
    def known_count(self) -> int | None:
        """How many levels given counters have, if that is said."""
        names = self.level_names
        return len(names) if self.level_count is None and names is not None else self.level_count

    def scope_of(self, folder: Path | None) -> Scope:
        """The scope, or its default in a model directory or elsewhere."""
        return self.scope or ("uniform" if folder else "global")

    def layers_only(self, folder: Path | None) -> bool:
        """Whether tensors of a model directory are left out because of what they are."""
        return folder is not None and not (self.nest_all or self.include)

    def defaults(self, folder: Path | None) -> tuple[str, ...]:
        """What is chosen for one-shot levels because no option says otherwise, and why.

        >>> PackOptions(sparsities=90).defaults(None)
        ('--scope global, as DENSE is not a model directory',)
        """
        if not self.one_shot:
            return ()
        why = f"as DENSE is {'' if folder else 'not '}a model directory"
        found = []
        if not self.patterns and self.scope is None:
            found.append(f"--scope {self.scope_of(folder)}, {why}")
        if self.patterns and self.axis is None:
            along = "the inputs of each layer" if folder else "axis -1"
            found.append(f"N:M along {along}, {why}")
        if self.layers_only(folder):
            found.append(f"layers only, {why}; --nest-all nests all kinds of tensors")
        return tuple(found)


@dataclass(frozen=True)
class TensorChoice:
    """What is to become of each tensor."""

    nested: tuple[str, ...]
    per_level: frozenset[str]
    shared: dict[str, str]
    """Tensors that carry no counters, and why."""
    axes: Mapping[str, int] = field(default_factory=dict)
    """Along which axis of each tensor N:M patterns lie."""

    def without(self, reasons: Mapping[str, str]) -> "TensorChoice":
        """The same, but some tensors are not nested, if they were, and why."""
        dropped = {name: reasons[name] for name in self.nested if name in reasons}
        kept = tuple(name for name in self.nested if name not in reasons)
        return replace(self, nested=kept, shared=self.shared | dropped)


def choose_tensors(network: Checkpoint, options: PackOptions, folder: Path | None) -> TensorChoice:
    """What the options, and what a model directory tells, make of each tensor."""

    for pattern in (*options.include, *options.exclude, *options.per_level):
        if not any(fnmatchcase(name, pattern) for name in network.tensors):
            raise NoSuchTensor.of(network.path, "no tensor matches", pattern, network.tensors)
    if isinstance(network, Calibration):
        return _calibrated(network)
    nested, varying, shared = [], [], {}
    for name, info in network.tensors.items():
        if any(fnmatchcase(name, pattern) for pattern in options.per_level):
            varying.append(name)
        elif not info.dtype.nestable:
            shared[name] = _no_layer(info)
        elif why := not_chosen(name, options.include, options.exclude):
            shared[name] = why
        elif not options.include and not network.nestable(name):
            shared[name] = _no_layer(info)
        else:
            nested.append(name)
    choice = TensorChoice(tuple(nested), frozenset(varying), shared)
    if options.one_shot and folder and options.layers_only(folder):
        choice = choice.without(unpruned(network.tensors, folder))
    if options.patterns:
        axes = dict.fromkeys(network.tensors, -1 if options.axis is None else options.axis)
        inputs = folder is not None and options.axis is None
        if inputs:
            axes |= input_axes({name: info.shape for name, info in network.tensors.items()})
        choice = replace(choice, axes=axes)
        if folder:
            group, what = common_group(options.patterns), "inputs" if inputs else ""
            found = {n: uneven(network.tensors[n], axes[n], group, what) for n in choice.nested}
            choice = choice.without({name: why for name, why in found.items() if why})
    return choice


def _calibrated(network: Calibration) -> TensorChoice:
    """What a calibration has decided."""
    decided = {*network.nested, *network.per_level}
    shared = {
        name: network.left.get(name) or _no_layer(info)
        for name, info in network.tensors.items()
        if name not in decided
    }
    return TensorChoice(tuple(network.nested), frozenset(network.per_level), shared)


def _no_layer(info: TensorInfo) -> str:
    """Why a tensor is nothing that carries counters."""
    if not info.dtype.nestable:
        return f"dtype {info.dtype.name}"
    few = len(info.shape) < 2
    return f"{len(info.shape)}-dimensional" if few else "not a layer's weight"
