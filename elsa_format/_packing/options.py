"""What is asked of `pack`, checked once, and what becomes of each tensor by it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from fractions import Fraction
from os import PathLike
from pathlib import Path
from typing import Literal, TypedDict, cast, get_args

from elsa_format._counters import MAX_LEVELS, ROUNDINGS, Rounding
from elsa_format._errors import ConflictingOptions, NoSuchTensor
from elsa_format._options import check_int, one_of, strings
from elsa_format._packing.checkpoint import Checkpoint, CheckpointLike
from elsa_format._packing.layers import common_group, input_axes, uneven, unpruned
from elsa_format.levels import Pattern, Sparsity, check_levels, parse_sparsities

Scope = Literal["global", "uniform"]
SCOPES: tuple[Scope, ...] = get_args(Scope)


class PackFields(TypedDict, total=False):
    """The fields of `PackOptions` as keywords, for type checkers."""

    sparsities: Sparsity | Iterable[Sparsity] | None
    levels: CheckpointLike | Iterable[CheckpointLike] | None
    counters: CheckpointLike | None
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
        sparsities: One-shot levels by magnitude, sparsest first: percent, fractions below 1, or N:M
            patterns such as "2:4".
        levels: Nested sparse checkpoints, sparsest first.
        counters: The paper's N, integers under the names of the tensors: t is frozen at level t, 0
            in the dense network only.
        level_count: How many levels the counters have, if not as many as the largest of them says.
            One more than that is in the dense network only, too.
        scope: Compare magnitudes over all tensors ("global") or within each ("uniform"). Default:
            uniform for a model directory, else global.
        axis: The axis N:M groups lie along. Default: each layer's inputs in a model directory, else
            the last.
        include: Shell patterns of tensor names; only these are nested.
        exclude: Shell patterns of tensor names that are not nested.
        nest_all: Nest embeddings, positions, norms, routers and output heads of a model directory.
        per_level: Shell patterns of tensor names that are stored once per level, from `levels`.
        names: Names of the levels.
        rounding: How a counter enters a weight: "nearest", or "overwrite" as in the paper.
        digests: Compute the digest of each level.
    """

    sparsities: Sparsity | Iterable[Sparsity] | None = None
    levels: CheckpointLike | Iterable[CheckpointLike] | None = None
    counters: CheckpointLike | None = None
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
            check_levels(self.one_shot)
        if isinstance(self.levels, str | PathLike | Mapping | Checkpoint):
            self._set("levels", (self.levels,))
        elif self.levels is not None:
            self._set("levels", tuple(self.levels))
        if self.scope is not None:
            one_of("scope", self.scope, SCOPES)
        if self.axis is not None:
            self._set("axis", check_int("axis", self.axis))
        one_of("rounding", self.rounding, ROUNDINGS)

    def _set(self, name: str, checked: object) -> None:
        object.__setattr__(self, name, checked)

    @property
    def one_shot(self) -> Sequence[Fraction | Pattern]:
        """The sparsities, as they were parsed."""
        return cast("Sequence[Fraction | Pattern]", self.sparsities or ())

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

    def matches(name: str, patterns: Iterable[str]) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in patterns)

    for pattern in (*options.include, *options.exclude, *options.per_level):
        if not any(fnmatchcase(name, pattern) for name in network.tensors):
            raise NoSuchTensor.of(network.path, "no tensor matches", pattern, network.tensors)
    nested, varying, shared = [], [], {}
    for name, info in network.tensors.items():
        if matches(name, options.per_level):
            varying.append(name)
        elif not info.dtype.nestable:
            shared[name] = f"dtype {info.dtype.name}"
        elif matches(name, options.exclude):
            shared[name] = "excluded"
        elif options.include and not matches(name, options.include):
            shared[name] = "not included"
        elif not options.include and not network.nestable(name):
            few = len(info.shape) < 2
            shared[name] = f"{len(info.shape)}-dimensional" if few else "not a layer's weight"
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
