"""Level sequences that can't be trained are refused, with the reason."""

import pytest

from elsa_train._errors import InfeasibleTraining
from elsa_train._levels import check_levels, parse_levels


@pytest.mark.parametrize(
    ("levels", "reason"),
    [
        ("80,90", "must fall"),
        ("90,90", "must fall"),
        ("1:4,1:8", "must fall"),
        ("2:8,1:4", "must fall"),
        ("3:8,2:4", "may hold 3"),
        ("1:4,2:7", "may hold 3"),
        ("90,2:4", "mix"),
        ("100", "below 100"),
        ("0", "above 0"),
        ("4:4", "M-1"),
        ("50..99", "rises"),
        ("many", "neither"),
    ],
)
def test_infeasible_sequences(levels, reason):
    with pytest.raises(InfeasibleTraining, match=reason):
        check_levels(parse_levels(levels))


@pytest.mark.parametrize(
    ("levels", "bits"),
    [("95", 1), ("95,90,80", 2), ("1:8,1:4,2:4", 2), ("1:4,2:6", 2), ("99..50", 6)],
)
def test_feasible_sequences_need_so_many_bits(levels, bits):
    assert check_levels(parse_levels(levels)) == bits


def test_too_many_levels_for_the_type():
    levels = parse_levels([str(99.9 - 0.5 * i) for i in range(130)])
    with pytest.raises(InfeasibleTraining, match="bfloat16"):
        check_levels(levels, dtype="bfloat16")
    assert check_levels(levels, dtype="float32") == 8


def test_bits_below_what_levels_need():
    with pytest.raises(InfeasibleTraining, match="need 2 bits"):
        check_levels(parse_levels("95,90,80"), bits=1)
