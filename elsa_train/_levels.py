"""Level sequences: parsing, and the checks that make infeasible ones an error before training."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from elsa_train._errors import InfeasibleTraining

MANTISSA_BITS = {"float32": 23, "bfloat16": 7, "float16": 10, "float64": 52}


@dataclass(frozen=True)
class Level:
    """A sparsity asked for: the fraction of zeros, or N:M.

    >>> Level("95%", 0.95).density, Level("2:4", 0.5, (2, 4)).density
    (Fraction(1, 20), Fraction(1, 2))
    """

    name: str
    target: float
    pattern: tuple[int, int] | None = None

    @property
    def density(self) -> Fraction:
        """Return the fraction of prunable weights to keep, exactly."""
        if self.pattern:
            return Fraction(*self.pattern)
        return 1 - Fraction(repr(self.target))


def parse_levels(text: str | Sequence[str | float]) -> tuple[Level, ...]:
    """Read levels: percentages, fractions below 1, N:M patterns, ranges of whole percent.

    >>> [level.name for level in parse_levels("95, 0.9, 80")]
    ['95%', '90%', '80%']
    >>> [level.name for level in parse_levels("1:8,1:4,2:4")]
    ['1:8', '1:4', '2:4']
    >>> len(parse_levels("99..50"))
    50
    """
    words = text.split(",") if isinstance(text, str) else [str(word) for word in text]
    levels: list[Level] = []
    for word in map(str.strip, words):
        if match := re.fullmatch(r"(\d+)\.\.(\d+)", word):
            first, last = map(int, match.groups())
            if first < last:
                raise InfeasibleTraining(f"range {word!r} rises; sparsities must fall")
            levels += [_unstructured(str(p)) for p in range(first, last - 1, -1)]
        elif match := re.fullmatch(r"(\d+):(\d+)", word):
            n, m = map(int, match.groups())
            if not 0 < n < m:
                raise InfeasibleTraining(f"pattern {word!r}: N must be from 1 to M-1")
            levels.append(Level(f"{n}:{m}", 1 - n / m, (n, m)))
        else:
            levels.append(_unstructured(word))
    return tuple(levels)


def _unstructured(word: str) -> Level:
    try:
        value = Fraction(word.removesuffix("%"))
    except ValueError:
        raise InfeasibleTraining(f"level {word!r}: found neither a sparsity nor N:M") from None
    percent = value * 100 if value < 1 and not word.endswith("%") else value
    if not 0 < percent < 100:
        raise InfeasibleTraining(f"level {word!r}: a sparsity is above 0 and below 100 %")
    return Level(f"{float(percent):g}%", float(percent / 100))


def bits_for(levels: Sequence[Level]) -> int:
    """Return tau = ceil(log2(T + 1))."""
    return max(1, math.ceil(math.log2(len(levels) + 1)))


def budget(level: Level, size: int) -> int:
    """Return how many of `size` prunable weights a level keeps."""
    return max(1, round(size * level.density))


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
    if not levels:
        raise InfeasibleTraining("no level is asked for")
    for level in levels:
        if pattern_scope is not None and (level.pattern is not None) != pattern_scope:
            wanted = "N:M patterns" if pattern_scope else "sparsities"
            raise InfeasibleTraining(f"level {level.name}: this scope takes {wanted}")
    for sparser, denser in pairwise(levels):
        if denser.density <= sparser.density:
            raise InfeasibleTraining(
                f"level {denser.name} after {sparser.name}: sparsities must fall"
            )
        if (sparser.pattern is None) != (denser.pattern is None):
            raise InfeasibleTraining(
                f"level {denser.name} after {sparser.name}: N:M and unstructured levels don't mix"
            )
        if sparser.pattern and denser.pattern:
            most = _most_frozen(sparser.pattern, denser.pattern[1])
            if most > denser.pattern[0]:
                raise InfeasibleTraining(
                    f"level {denser.name} after {sparser.name}: a block of {denser.pattern[1]} may "
                    f"hold {most} frozen weights, more than {denser.pattern[0]}"
                )
    needed = bits_for(levels)
    bits = needed if bits is None else bits
    if bits < needed:
        raise InfeasibleTraining(f"{len(levels)} levels need {needed} bits, found {bits}")
    widest = min(8, MANTISSA_BITS[dtype])
    if bits > widest:
        raise InfeasibleTraining(f"{bits} bits are more than {dtype} can carry, {widest}")
    return bits


def _most_frozen(pattern: tuple[int, int], block: int) -> int:
    """Return the most weights that N:M can leave in an aligned block of another length."""
    n, m = pattern
    worst = 0
    for start in range(0, math.lcm(m, block), block):
        stop = start + block
        held = 0
        for piece in range(start // m * m, stop, m):
            held += min(n, min(stop, piece + m) - max(start, piece))
        worst = max(worst, held)
    return worst


def check_blocks(shapes: Mapping[str, Sequence[int]], levels: Sequence[Level], axis: int) -> None:
    """Refuse tensors that an N:M pattern can't divide into blocks."""
    for level in levels:
        if level.pattern is None:
            continue
        for name, shape in shapes.items():
            if not -len(shape) <= axis < len(shape):
                raise InfeasibleTraining(f"{name}: shape {list(shape)} has no axis {axis}")
            if shape[axis] % level.pattern[1]:
                raise InfeasibleTraining(
                    f"{name}: axis {axis} of shape {list(shape)} is not divisible by "
                    f"{level.pattern[1]} ({level.name}); exclude it"
                )
