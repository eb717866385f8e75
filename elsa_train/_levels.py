"""Level sequences, and when pruning reaches them: what can't be trained is an error before it is.

What a sparsity keeps, and which levels nest, is `elsa_format`'s to say; here is what training adds.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from elsa_format import BitsTooWide, InfeasibleLevels
from elsa_format import levels as rules
from elsa_format.levels import Pattern
from elsa_train._errors import InfeasibleTraining, MissedBudget

TOLERANCE = 0.001
"""Part of all weights by which a level may miss its budget."""
DENSE = 0
"""Stands for the dense network where a level's number is asked for."""
FAR = 0.01
"""Part of the weights by which a level may miss its sparsity where no budget is known."""


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
    elsa_train._errors.InfeasibleTraining: level 95% after 90%: sparsities must fall, as in 95,90
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


def check_growth(level: Level, nonzero: int, frozen: int) -> None:
    """Refuse a level that is the one before again: near sparsities differ by less than any slack.

    >>> check_growth(Level("50%", 0.5), 490, 490)
    Traceback (most recent call last):
    elsa_train._errors.MissedBudget: level 50%: adds no nonzero weights to the 490 that are \
frozen; train the weights that are not
    """
    if nonzero <= frozen:
        raise MissedBudget(
            f"level {level.name}: adds no nonzero weights to the {frozen} that are frozen; train "
            "the weights that are not"
        )


def check_budget(
    level: Level, nonzero: int, budget: int, size: int, tensors: int, advice: str
) -> None:
    """Refuse a level that misses its budget by more than rounding and a few zeros explain.

    >>> check_budget(Level("90%", 0.9), 101, 100, 1000, 1, "train longer")
    >>> check_budget(Level("90%", 0.9), 200, 100, 1000, 1, "train longer")
    Traceback (most recent call last):
    elsa_train._errors.MissedBudget: level 90%: has 200 nonzero prunable weights, expected 100; \
train longer
    """
    if abs(nonzero - budget) > max(TOLERANCE * size, tensors):
        raise MissedBudget(
            f"level {level.name}: has {nonzero} nonzero prunable weights, expected {budget}; "
            f"{advice}"
        )


def check_sparsity(level: Level, tensors: Sequence[tuple[Sequence[int], int]]) -> None:
    """Refuse a level that no scope explains, given the shape and nonzero weights of each tensor.

    Which tensors were to be pruned is unknown. They are at least those with zeros and at most all,
    so the level has its sparsity times the size of the former in zeros, or more, and no more than
    its sparsity times the size of all. Vectors don't count beside tensors of more dimensions: they
    are biases, which training leaves at zero here and there.

    >>> check_sparsity(Level("90%", 0.9), [((100, 10), 100), ((10, 10), 100), ((10,), 8)])
    >>> check_sparsity(Level("90%", 0.9), [((100, 10), 50)])
    Traceback (most recent call last):
    elsa_train._errors.MissedBudget: level 90%: has 950 zeros, expected about 900; densify must \
train the weights that are not frozen, or sparsify prune less, or give the scope= that it prunes by
    """
    found = [t for t in tensors if len(t[0]) > 1] or tensors
    sizes = [(math.prod(shape), math.prod(shape) - nonzero) for shape, nonzero in found]
    total, zeros = sum(size for size, _ in sizes), sum(zero for _, zero in sizes)
    pruned = sum(size for size, zero in sizes if zero > FAR * size)
    sparsity, slack = 1 - level.density, max(FAR * total, len(sizes))
    least, most = round(sparsity * pruned), round(sparsity * total)
    if pruned and least - slack <= zeros <= most + slack:
        return
    advice = "densify must train the weights that are not frozen, or sparsify prune less"
    if zeros <= least:
        advice = "sparsify must return the network with the weights that it prunes at zero"
    expected = f"{least} to {most}" if 0 < least < most else f"about {most}"
    raise MissedBudget(
        f"level {level.name}: has {zeros} zeros, expected {expected}; {advice}, or give the scope= "
        "that it prunes by"
    )


@dataclass(frozen=True)
class Schedule:
    """When the mask changes and how sparse it is then.

    Polynomial: target * (1 - (1 - progress)^power), from step `start` to step `end`; one-shot is
    start = end. There is always an update at `end` itself, so the target is met for any `every`.

    >>> schedule = Schedule(start=0, end=100, every=30)
    >>> [step for step in range(200) if schedule.updates_at(step)]
    [30, 60, 90, 100]
    >>> schedule.first, schedule.progress(50)
    (30, 0.875)
    """

    start: int
    end: int
    every: int
    power: int = 3

    @property
    def first(self) -> int:
        """Return the first step before which the mask changes."""
        return min(self.start + self.every, self.end)

    def updates_at(self, step: int) -> bool:
        """Tell whether the mask changes before this step."""
        if step == self.end:
            return True
        return self.start < step < self.end and (step - self.start) % self.every == 0

    def progress(self, step: int) -> float:
        """Return how far the sparsity has come, 0 to 1."""
        if step >= self.end:
            return 1.0
        done = (step - self.start) / (self.end - self.start)
        return 1.0 - (1.0 - min(max(done, 0.0), 1.0)) ** self.power


def usual_shares(levels: int) -> tuple[int, ...]:
    """Return how many steps of a round each level gets, the dense network last.

    Three eighths go to the sparsest level, which loses most when others move its weights, one to
    the dense network, and the rest to the levels between, the sparser the more.

    >>> usual_shares(3), usual_shares(1), usual_shares(0)
    ((8, 6, 4, 2), (3, 1), (1,))
    """
    if levels < 2:
        return (3, 1) if levels else (1,)
    between = [4 * levels // t for t in range(2, levels + 1)]
    return (round(0.75 * sum(between)), *between, max(1, round(0.25 * sum(between))))


def drawn(step: int, shares: Sequence[int], seed: Sequence[int]) -> int:
    """Return the level that a step trains, a function of step and seed alone.

    Each round of steps has every level as often as its share says, shuffled anew.

    >>> sorted(drawn(step, (4, 3, 1), seed=(0,)) for step in range(8))
    [0, 1, 1, 1, 1, 2, 2, 2]
    """
    round_, place = divmod(step, sum(shares))
    return int(_shuffled(tuple(shares), (*seed, round_))[place])


@lru_cache(maxsize=8)
def _shuffled(shares: tuple[int, ...], seed: tuple[int, ...]) -> NDArray[np.int64]:
    """Return the levels of one round."""
    numbers = [*range(1, len(shares)), DENSE]
    return np.random.default_rng(seed).permutation(np.repeat(numbers, shares))
