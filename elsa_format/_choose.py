"""Pick the level for a device: by number, by sparsity, by the size it may have, by its metrics."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from elsa_format._errors import ConflictingOptions, InvalidOption, NoLevelGiven, NoSuchLevel
from elsa_format._layouts import LAYOUT_NAMES, LayoutName
from elsa_format._level_header import LevelSizes
from elsa_format._network import Network
from elsa_format._options import check_int, one_of
from elsa_format._profile import MOST_NAMES, Level, LevelLike, LevelNumber, plain_number
from elsa_format.levels import Sparsity, zeros_of

TOLERANCE = 5e-4
"""A level made for 90 % keeps whole weights, so its sparsity may fall short by a rounding."""

Metrics = Mapping[str, float]
"""Metrics by their names."""

_CHOOSE = "give one of {level}, {sparsity} and {max_size}"


@dataclass(frozen=True, kw_only=True)
class LevelChoice:
    """Which level is wanted, checked once.

    By sparsity (percent, a fraction below 1, or N:M): the densest level with at least that many
    zeros. By size: the densest level that takes no more bytes. By metrics: the sparsest level that
    has at least those of `min` and at most those of `max`; together with a size, of the levels that
    satisfy all, the one that is best in the first of these metrics, or the sparsest of those that
    equal it within their standard errors.

    >>> LevelChoice(min={"accuracy": 0.9}, max_size=1000).measured
    True
    """

    level: LevelLike | None = None
    sparsity: Sparsity | None = None
    max_size: int | None = None
    min: Metrics | None = None
    max: Metrics | None = None

    def __post_init__(self) -> None:
        within = self.max_size is not None or self.measured
        if (self.level is not None) + (self.sparsity is not None) + within > 1:
            raise ConflictingOptions(
                "several ways to choose a level", f"{_CHOOSE}; {{min}} and {{max}} go with a size"
            )
        if self.max_size is not None:
            object.__setattr__(self, "max_size", check_int("max_size", self.max_size, low=0))
        for keyword, bounds in (("min", self.min), ("max", self.max)):
            for name, bound in (bounds or {}).items():
                number = plain_number(bound)
                if not isinstance(name, str) or type(number) not in (int, float):
                    raise TypeError(f"{keyword} {bounds!r}, expected a mapping of names to numbers")
                if not -math.inf < number < math.inf:
                    raise ValueError(f"{keyword} of {name!r}: {number}, expected a finite number")

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> "LevelChoice":
        """What options say of it, among others."""
        return cls(**{field.name: options.get(field.name) for field in fields(cls)})

    @property
    def given(self) -> bool:
        """Whether anything is said of the level."""
        single = (self.level, self.sparsity, self.max_size)
        return self.measured or any(wish is not None for wish in single)

    @property
    def measured(self) -> bool:
        """Whether it is about metrics."""
        return bool(self.min or self.max)

    @cached_property
    def _bounds(self) -> Sequence["_Bound"]:
        pairs = [*(self.min or {}).items()], [*(self.max or {}).items()]
        return [
            _Bound(name, float(plain_number(value)), sign)
            for sign, found in zip((1, -1), pairs, strict=True)
            for name, value in found
        ]

    def satisfying(self, network: Network) -> Sequence[LevelNumber]:
        """The levels that have the metrics, sparsest first; at least one."""
        for bound in self._bounds:
            bound.check(network)
        found = [n for n in network.levels if all(b.allows(network, n) for b in self._bounds)]
        if not found:
            wanted = " and ".join(map(str, self._bounds))
            known = "; ".join(bound.known(network) for bound in self._bounds)
            raise NoSuchLevel(f"{network.name}: no level has {wanted}: {known}")
        return found

    def best(self, network: Network, levels: Sequence[LevelNumber]) -> LevelNumber:
        """The best of levels, sparsest first, or the sparsest that equals it within the error."""
        bound = self._bounds[0]
        found = {number: bound.of(network, number) for number in levels}
        top, error = max(found.values(), key=lambda pair: bound.sign * pair[0])
        return next(n for n, (x, e) in found.items() if abs(x - top) <= math.hypot(e, error))

    def within(
        self, network: Network, takes: Callable[[LevelNumber], float], most: float, unit: str
    ) -> LevelNumber:
        """The best level that has the metrics, and takes no more than `most` of something."""
        satisfying = self.satisfying(network)
        costs = {number: takes(number) for number in satisfying}
        fitting = [number for number in satisfying if costs[number] <= most]
        if not fitting:
            wanted = " and ".join(map(str, self._bounds))
            least = min(satisfying, key=lambda number: costs[number])
            raise NoSuchLevel(
                f"{network.name}: no level with {wanted} takes {most:.10g} {unit} or less; "
                f"{_called(least)} takes {costs[least]:.10g}"
            )
        return self.best(network, fitting)


@dataclass(frozen=True)
class _Bound:
    """What a metric may be: at least a value (sign 1), or at most one (-1)."""

    name: str
    value: float
    sign: int

    def __str__(self) -> str:
        return f"{self.name} {'>=' if self.sign > 0 else '<='} {self.value:.10g}"

    def check(self, network: Network) -> None:
        """Refuse a metric that no level has, and one of which other values are the better ones."""
        about, wrong = network.profile.metrics.get(self.name), ("lower", "min", "max")
        if self.sign < 0:
            wrong = ("higher", "max", "min")
        if about is not None and about.better == wrong[0]:
            raise InvalidOption(
                f"{network.name}: {wrong[0]} {self.name} is better; "
                f"{{{wrong[1]}}} would choose the worst level",
                f"use {{{wrong[2]}}}",
            )
        if not any(True for _ in self.values(network)):
            raise NoSuchLevel(
                f"{network.name}: no level records {self.name}", "record it with {record()}"
            )

    def values(self, network: Network) -> Iterator[tuple[LevelNumber, float]]:
        """What each level has that has it."""
        for number in network.levels:
            if self.name in metrics_of(network, number)[0]:
                yield number, self.of(network, number)[0]

    def of(self, network: Network, number: LevelNumber) -> tuple[float, float]:
        """A level's value and its standard error."""
        metrics, errors = metrics_of(network, number)
        return metrics[self.name], errors.get(self.name, 0)

    def allows(self, network: Network, number: LevelNumber) -> bool:
        """Whether a level has it."""
        value = metrics_of(network, number)[0].get(self.name)
        return value is not None and self.sign * value >= self.sign * self.value

    def known(self, network: Network) -> str:
        """What the levels have, for messages."""
        found = [f"{_called(number)} has {value:.10g}" for number, value in self.values(network)]
        if len(found) > MOST_NAMES:
            found = [*found[: MOST_NAMES - 1], "…", found[-1]]
        return f"{self.name}: {', '.join(found)}"


def metrics_of(network: Network, number: LevelNumber) -> tuple[Metrics, Metrics]:
    """The metrics of a level and their standard errors."""
    profile = network.profile
    if number == "dense":
        return profile.dense_metrics, profile.dense_errors
    level = profile.level(number)
    return level.metrics, level.errors


def _called(number: LevelNumber) -> str:
    return "dense" if number == "dense" else f"level {number}"


def choose_level(
    network: Network,
    choice: LevelChoice | None = None,
    *,
    level: LevelLike | None = None,
    sparsity: Sparsity | None = None,
    max_size: int | None = None,
    min: Metrics | None = None,
    max: Metrics | None = None,
    layout: LayoutName = "dense",
) -> LevelNumber:
    """The level that is wanted, or "dense"; sizes are those of files in a layout."""
    choice = choice or LevelChoice(
        level=level, sparsity=sparsity, max_size=max_size, min=min, max=max
    )
    one_of("layout", layout, LAYOUT_NAMES)
    if not choice.given:
        if len(network.levels) > 1:
            count = len(network.profile.levels)
            raise NoLevelGiven(f"{network.name}: holds {count} levels", _CHOOSE)
        return network.levels[0]
    if choice.level is not None:
        return network.level_number(choice.level)
    if choice.sparsity is not None:
        return _sparse_enough(network, choice.sparsity)
    if choice.max_size is None:
        return choice.satisfying(network)[0]
    if not choice.measured:
        return _small_enough(network, choice.max_size, layout)
    sizes = LevelSizes(network)

    def takes(number: LevelNumber) -> float:
        if number == "dense" and layout != "dense":
            return math.inf
        return sizes.size(number, layout)

    return choice.within(network, takes, choice.max_size, f"bytes as {layout}")


def _sparse_enough(network: Network, sparsity: Sparsity) -> int:
    wanted = float(zeros_of(sparsity))
    levels = network.profile.levels
    found = [_sparsity(network, level) for level in levels]
    for level, zeros in zip(reversed(levels), reversed(found), strict=True):
        if zeros is not None and zeros >= wanted - TOLERANCE:
            return level.number
    if found[0] is None:
        raise NoSuchLevel(f"{network.name}: does not tell how sparse its level is", "give {level}")
    raise NoSuchLevel(
        f"{network.name}: no level is {wanted:.4%} sparse; the sparsest has {found[0]:.4%}"
    )


def _sparsity(network: Network, level: Level) -> float | None:
    """The fraction of nested weights that a level zeroes: as asked for, else as counted."""
    return network.sparsity(level.number) if level.target is None else level.target


def _small_enough(network: Network, max_size: int, layout: LayoutName) -> LevelNumber:
    sizes, numbers = LevelSizes(network), [level.number for level in network.profile.levels]
    dense = layout == "dense" and "dense" in network.levels
    if dense and sizes.size("dense", "dense") <= max_size:
        return "dense"
    for number in reversed(numbers):
        if sizes.size(number, layout) <= max_size:
            return number
    smallest = ", ".join(f"{sizes.size(numbers[0], name)} as {name}" for name in LAYOUT_NAMES)
    raise NoSuchLevel(
        f"{network.name}: no level fits {max_size} bytes as {layout}; "
        f"level {numbers[0]} takes {smallest}"
    )


def check_layout(network: Network, level: LevelNumber, layout: LayoutName) -> None:
    """Refuse a sparse layout of the dense network."""
    if one_of("layout", layout, LAYOUT_NAMES) != "dense" and level == "dense":
        raise NoSuchLevel(
            f"{network.name}: the dense network has no layout {layout}, "
            f"expected a level 1..{len(network.profile.levels)}"
        )
