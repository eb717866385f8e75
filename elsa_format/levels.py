"""Levels as people ask for them: sparsities or N:M, what each keeps, and which can be nested."""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np

from elsa_format._container.dtypes import of_array
from elsa_format._counters import MAX_BITS, MAX_LEVELS, bits_for
from elsa_format._errors import BitsTooWide, InfeasibleLevels

__all__ = [
    "Pattern",
    "Sparsity",
    "bits_for",
    "check_levels",
    "kept_count",
    "level_name",
    "parse_sparsities",
    "parse_sparsity",
    "zeros_of",
]


@dataclass(frozen=True)
class Pattern:
    """N:M: at most N of every M neighbouring weights.

    >>> str(Pattern(2, 4)), Pattern(2, 4).sparsity
    ('2:4', Fraction(1, 2))
    """

    n: int
    m: int

    @property
    def sparsity(self) -> Fraction:
        """The fraction of zeros."""
        return 1 - Fraction(self.n, self.m)

    def __str__(self) -> str:
        return f"{self.n}:{self.m}"


Sparsity = str | float | Fraction | Pattern
"""A sparsity as users write it: percent (90 or "90%"), a fraction below 1, or N:M."""

_ENDLESS = re.compile(r"e[-+]?[0-9_]{4}", re.IGNORECASE)
"""An exponent that would make a Fraction of gigabytes."""


def parse_sparsity(value: Sparsity) -> Fraction | Pattern:
    """The level that is meant: the fraction of zeros, exactly, or N:M.

    Commands and Python read sparsities here and nowhere else; what it returns, it takes again.

    >>> parse_sparsity("95"), parse_sparsity(0.9), str(parse_sparsity("2:4"))
    (Fraction(19, 20), Fraction(9, 10), '2:4')
    """
    text = str(value).strip()
    found = re.fullmatch(r"([0-9]{1,18}) *: *([0-9]{1,18})", text, re.ASCII)
    if found:
        pattern = Pattern(int(found[1]), int(found[2]))
        if not 1 <= pattern.n <= pattern.m:
            raise InfeasibleLevels(f"pattern {text!r}: expected N:M with 1 ≤ N ≤ M")
        return pattern
    try:
        if _ENDLESS.search(text):
            raise ValueError
        number = Fraction(text.removesuffix("%"))
    except (ValueError, ZeroDivisionError):
        raise InfeasibleLevels(f"sparsity {text!r}: expected percent, a fraction, or N:M") from None
    if number == 1 and not text.endswith("%"):
        raise InfeasibleLevels(f"sparsity {text!r}: write 1% or 0.01; no level is all zeros")
    if number > 1 or text.endswith("%"):
        number /= 100
    if not 0 <= number < 1:
        raise InfeasibleLevels(f"sparsity {text!r}: expected at least 0 and below 100 percent")
    return number


def zeros_of(value: Sparsity) -> Fraction:
    """The fraction of zeros that is meant, that of an N:M pattern, too.

    >>> zeros_of("90%"), zeros_of("2:4")
    (Fraction(9, 10), Fraction(1, 2))
    """
    return _zeros(parse_sparsity(value))


def parse_sparsities(values: Sparsity | Iterable[Sparsity]) -> list[Fraction | Pattern]:
    """Several levels, or a text with commas, or a lone one.

    >>> parse_sparsities("95, 90") == parse_sparsities([95, 0.9])
    True
    """
    if isinstance(values, str):
        values = values.split(",")
    elif not isinstance(values, Iterable):
        values = [values]
    return [parse_sparsity(value) for value in values]


def kept_count(sparsity: Fraction, weights: int) -> int:
    """How many of so many weights a level keeps: the nearest whole number, at least one.

    Halves go to the even number. The nearest, in each tensor, is what gives the sparsities in the
    paper's tables; halves and "at least one", on which they are silent, are as in jaxpruner, with
    which they were made. A tensor without any weight would cut the network in two.

    >>> kept_count(Fraction(95, 100), 1000), kept_count(Fraction(1, 2), 5)
    (50, 2)
    >>> kept_count(Fraction(95, 100), 3), kept_count(Fraction(95, 100), 0)
    (1, 0)
    """
    return max(round((1 - sparsity) * weights), min(weights, 1))


def check_levels(
    levels: Sequence[Fraction | Pattern],
    *,
    bits: int | None = None,
    dtype: "np.dtype[Any] | None" = None,
) -> int:
    """Refuse levels that cannot be nested in this order, sparsest first, or stored; return τ.

    >>> check_levels([Fraction(95, 100), Fraction(9, 10), Fraction(8, 10)])
    2
    >>> check_levels([Pattern(1, 4), Pattern(1, 8)])
    Traceback (most recent call last):
    elsa_format._errors.InfeasibleLevels: level 1:8 after 1:4: sparsities must fall, as in 1:8,1:4
    """
    if not 1 <= len(levels) <= MAX_LEVELS:
        raise InfeasibleLevels(f"{len(levels)} levels, expected 1..{MAX_LEVELS}")
    for level in levels:
        if isinstance(level, Pattern) and not 1 <= level.n <= level.m:
            raise InfeasibleLevels(f"pattern {level}: expected N:M with 1 ≤ N ≤ M")
        if not 0 <= _zeros(level) < 1:
            raise InfeasibleLevels(f"sparsity {level}: expected at least 0 and below 1")
    for sparser, denser in pairwise(levels):
        if isinstance(sparser, Pattern) != isinstance(denser, Pattern):
            raise InfeasibleLevels("percentages and N:M patterns cannot be mixed")
        after = f"level {level_name(denser)} after {level_name(sparser)}"
        if _zeros(denser) >= _zeros(sparser):
            raise InfeasibleLevels(f"{after}: sparsities must fall{_in_order(levels)}")
        if isinstance(sparser, Pattern) and isinstance(denser, Pattern):
            worst = _most_kept(sparser, denser.m)
            if worst > denser.n:
                raise InfeasibleLevels(
                    f"{after}: {worst} of {denser.m} weights may be frozen, but {denser} keeps "
                    f"{denser.n}"
                )
    needed = bits_for(len(levels))
    bits = needed if bits is None else bits
    if not needed <= bits <= MAX_BITS:
        raise InfeasibleLevels(
            f"{len(levels)} levels take {needed} to {MAX_BITS} counter bits, found {bits}"
        )
    if dtype is not None and bits > of_array(dtype).mantissa:
        raise BitsTooWide(
            f"{bits}-bit counters do not fit {dtype}, which can carry {of_array(dtype).mantissa}"
        )
    return bits


def level_name(level: Fraction | Pattern) -> str:
    """A level's name where none is given.

    >>> level_name(Fraction(9, 10)), level_name(Pattern(2, 4))
    ('90%', '2:4')
    """
    return str(level) if isinstance(level, Pattern) else f"{float(level * 100):.6g}%"


def _in_order(levels: Sequence[Fraction | Pattern]) -> str:
    """What to type instead, unless two levels are alike."""
    if len(set(map(_zeros, levels))) < len(levels):
        return ""
    names = [level_name(level) for level in sorted(levels, key=_zeros, reverse=True)]
    return f", as in {','.join(name.removesuffix('%') for name in names)}"


def _zeros(level: Fraction | Pattern) -> Fraction:
    return level.sparsity if isinstance(level, Pattern) else level


def _most_kept(pattern: Pattern, size: int) -> int:
    """The most weights that N:M can leave in an aligned block of another size.

    >>> _most_kept(Pattern(3, 8), 4), _most_kept(Pattern(1, 4), 7)
    (3, 3)
    """
    n, m = pattern.n, pattern.m

    def held(offset: int) -> int:
        """The most in a block that starts so far into a block of M."""
        first = min(m - offset, size)
        whole, rest = divmod(size - first, m)
        return min(n, first) + whole * n + min(n, rest)

    # Linear between the offsets at which the first or last piece is full or empty: one of these,
    # or the possible offset next to it, has the most.
    step = math.gcd(m, size)
    turns = (0, m - n, -size % m, (n - size) % m)
    near = {turn // step * step + extra for turn in turns for extra in (0, step)}
    return max(held(offset % m) for offset in near)
