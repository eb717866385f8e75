"""Level sequences: parsing, and the checks that make infeasible ones an error before training.

What a sparsity keeps, and which levels nest, is `elsa_format`'s to say; here is what training adds.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from elsa_format import BitsTooWide, InfeasibleLevels
from elsa_format import levels as rules
from elsa_format.levels import Pattern
from elsa_train._errors import InfeasibleTraining


@dataclass(frozen=True)
class Level:
    """A sparsity asked for: the fraction of zeros, or N:M.

    >>> Level("95%", 0.95).density, Level("2:4", 0.5, Pattern(2, 4)).density
    (Fraction(1, 20), Fraction(1, 2))
    """

    name: str
    target: float
    pattern: Pattern | None = None

    @property
    def density(self) -> Fraction:
        """Return the fraction of prunable weights to keep, exactly."""
        return 1 - (self.pattern.sparsity if self.pattern else Fraction(str(self.target)))


def parse_levels(text: str | Sequence[str | float]) -> tuple[Level, ...]:
    """Read levels: percentages, fractions below 1, N:M patterns, ranges of whole percent.

    >>> [level.name for level in parse_levels("95, 0.9, 80")]
    ['95%', '90%', '80%']
    >>> [level.name for level in parse_levels("1:8,1:4,2:4")]
    ['1:8', '1:4', '2:4']
    >>> len(parse_levels("99..50"))
    50
    """
    words = text.split(",") if isinstance(text, str) else text
    return tuple(level for word in words for level in _parse(str(word).strip()))


def _parse(word: str) -> Iterator[Level]:
    if match := re.fullmatch(r"([0-9]{1,2})\.\.([0-9]{1,2})", word):
        first, last = map(int, match.groups())
        if first < last:
            raise InfeasibleTraining(f"range {word!r} rises; sparsities must fall")
        for percent in range(first, last - 1, -1):
            yield from _parse(f"{percent}%")
        return
    with _refusing():
        found = rules.parse_sparsity(word)
        rules.check_levels([found])
    sparsity = found.sparsity if isinstance(found, Pattern) else found
    if sparsity == 0:
        raise InfeasibleTraining(f"level {word!r}: keeps every weight, as the dense network does")
    pattern = found if isinstance(found, Pattern) else None
    yield Level(rules.level_name(found), float(sparsity), pattern)


@contextmanager
def _refusing() -> Iterator[None]:
    """Say it as an error of the trainer, before training."""
    try:
        yield
    except (InfeasibleLevels, BitsTooWide) as error:
        raise InfeasibleTraining(str(error)) from None


def check_levels(
    levels: Sequence[Level],
    *,
    bits: int | None = None,
    dtype: str = "float32",
    pattern_scope: bool | None = None,
) -> int:
    """Refuse a sequence that can't be nested or stored, and return tau.

    >>> check_levels(parse_levels("95,90,80"))
    2
    >>> check_levels(parse_levels("90,95"))
    Traceback (most recent call last):
    elsa_train._errors.InfeasibleTraining: level 95% after 90%: sparsities must fall
    """
    for level in levels:
        if pattern_scope is not None and (level.pattern is not None) != pattern_scope:
            wanted = "N:M patterns" if pattern_scope else "sparsities"
            raise InfeasibleTraining(f"level {level.name}: this scope takes {wanted}")
    with _refusing():
        return rules.check_levels(
            [level.pattern or 1 - level.density for level in levels],
            bits=bits,
            dtype=np.dtype(dtype),
        )


def check_blocks(shapes: Mapping[str, Sequence[int]], levels: Sequence[Level], axis: int) -> None:
    """Refuse tensors that an N:M pattern can't divide into blocks."""
    for level in levels:
        if level.pattern is None:
            continue
        for name, shape in shapes.items():
            if not -len(shape) <= axis < len(shape):
                raise InfeasibleTraining(f"{name}: shape {list(shape)} has no axis {axis}")
            if shape[axis] % level.pattern.m:
                raise InfeasibleTraining(
                    f"{name}: axis {axis} of shape {list(shape)} is not divisible by "
                    f"{level.pattern.m} ({level.name}); exclude it"
                )
