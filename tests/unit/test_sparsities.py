"""Levels as people ask for them: what is read, kept and refused, here and by the trainer."""

import io
import math
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import elsa_format as elsa
from elsa_format.levels import Pattern, _most_kept, check_levels, kept_count, parse_sparsity


@pytest.mark.parametrize(
    ("text", "expected"),
    [("95", Fraction(19, 20)), (0.9, Fraction(9, 10)), ("0.5%", Fraction(1, 200)), ("0", 0)],
)
def test_sparsities_as_people_write_them(text: Any, expected: Fraction) -> None:
    assert parse_sparsity(text) == expected


@pytest.mark.parametrize("text", ["1e999999999", "1e-99999", "nan", "inf", "1/0", "1:2:3", "-5"])
def test_no_sparsity_is_refused_at_once(text: str) -> None:
    with pytest.raises(elsa.InfeasibleLevels, match="expected"):
        parse_sparsity(text)


@pytest.mark.parametrize(
    ("percent", "weights", "kept"),
    [
        (50, 5, 2),  # 2.5: halves go to the even number
        (50, 7, 4),
        (90, 5, 1),  # 0.5 would be none
        (90, 25, 2),
        (95, 147, 7),
        (99, 8, 1),
        (99, 0, 0),
        (0, 9, 9),
        (90, 2**40 + 1, 109951162778),
    ],
)
def test_a_level_keeps_the_nearest_count_and_at_least_one(
    percent: int, weights: int, kept: int
) -> None:
    assert kept_count(Fraction(percent, 100), weights) == kept


def test_uniform_levels_leave_no_tensor_empty() -> None:
    network = {"a": np.ones((2, 2), np.float32), "b": np.ones((5, 1), np.float32)}
    out = io.BytesIO()
    elsa.pack(network, out, sparsities=[99, 50], scope="uniform")
    assert elsa.open(out).nested == {"a": (1, 2), "b": (1, 2)}


@pytest.mark.parametrize(
    ("patterns", "problem"),
    [
        ([(1, 4), (1, 8)], "sparsities must fall"),
        ([(1, 4), (1, 4)], "sparsities must fall"),
        ([(2, 8), (3, 4)], None),
        ([(3, 8), (2, 4)], "3 of 4 weights may be frozen"),
        ([(1, 8), (1, 4), (2, 4)], None),
        ([(0, 4)], "1 ≤ N ≤ M"),
        ([(1, 3), (1, 2)], "2 of 2 weights may be frozen"),
    ],
)
def test_patterns_that_cannot_nest_are_refused(
    patterns: list[tuple[int, int]], problem: str | None
) -> None:
    made = [Pattern(*pattern) for pattern in patterns]
    if problem is None:
        check_levels(made)
    else:
        with pytest.raises(elsa.InfeasibleLevels, match=problem):
            check_levels(made)


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 80))
def test_the_worst_block_is_found_without_looking_at_all(n: int, m: int, size: int) -> None:
    n = min(n, m)
    worst = 0
    for start in range(0, math.lcm(m, size), size):
        pieces = range(start // m * m, start + size, m)
        held = sum(min(n, min(start + size, at + m) - max(start, at)) for at in pieces)
        worst = max(worst, held)
    assert _most_kept(Pattern(n, m), size) == worst


def test_blocks_of_any_size_are_compared_at_once() -> None:
    with pytest.raises(elsa.InfeasibleLevels, match="may be frozen"):
        check_levels([Pattern(10**9, 10**12), Pattern(10**9, 10**12 - 1)])


@pytest.mark.parametrize(
    ("levels", "options", "error", "problem"),
    [
        ([], {}, elsa.InfeasibleLevels, "0 levels"),
        ([Fraction(1, t) for t in range(2, 258)], {}, elsa.InfeasibleLevels, "256 levels"),
        ([Fraction(3, 2)], {}, elsa.InfeasibleLevels, "below 1"),
        ([Fraction(1, 2), Fraction(1, 2)], {}, elsa.InfeasibleLevels, "must fall"),
        ([Fraction(1, 2), Pattern(1, 4)], {}, elsa.InfeasibleLevels, "mixed"),
        ([Fraction(1, t) for t in (2, 3)], {"bits": 1}, elsa.InfeasibleLevels, "2 to 8"),
        ([Fraction(1, 2)], {"bits": 9}, elsa.InfeasibleLevels, "1 to 8"),
        (
            [Fraction(1, 2)],
            {"bits": 8, "dtype": np.dtype(ml_dtypes.bfloat16)},
            elsa.BitsTooWide,
            "carry 7",
        ),
        ([Fraction(1, 2)], {"dtype": np.dtype(np.int8)}, elsa.BitsTooWide, "carry 0"),
    ],
)
def test_levels_that_cannot_be_made_are_refused(
    levels: list[Any], options: dict[str, Any], error: type[Exception], problem: str
) -> None:
    with pytest.raises(error, match=problem):
        check_levels(levels, **options)
