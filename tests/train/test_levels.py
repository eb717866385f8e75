"""Level sequences that can't be trained are refused, with the reason."""

import io

import numpy as np
import pytest
from internals import InfeasibleTraining, check_levels

import elsa_format
from elsa_train import Scope, parse_levels


@pytest.mark.parametrize(
    ("levels", "reason"),
    [
        ("80,90", "must fall"),
        ("90,90", "must fall"),
        ("1:4,1:8", "must fall"),
        ("2:8,1:4", "must fall"),
        ("3:8,2:4", "3 of 4 weights may be frozen"),
        ("1:4,2:7", "3 of 7 weights may be frozen"),
        ("90,2:4", "mixed"),
        ("100", "below 100"),
        ("0", "dense network"),
        ("4:4", "dense network"),
        ("4:2", "1 ≤ N ≤ M"),
        ("50..99", "rises"),
        ("many", "expected percent"),
        ("1/0", "expected percent"),
        ("nan", "expected percent"),
        ("1e999999999", "expected percent"),
        ("999999999999..1", "expected percent"),
        ("", "expected percent"),
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
    with pytest.raises(InfeasibleTraining, match="2 to 8 counter bits"):
        check_levels(parse_levels("95,90,80"), bits=1)


@pytest.mark.parametrize("scope", ["global", "uniform"])
def test_a_budget_is_what_packing_keeps(scope):
    rng = np.random.default_rng(0)
    shapes = {"a": (5, 1), "b": (7, 3), "c": (1, 1), "d": (35, 5)}
    network = {
        name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()
    }
    percents = [99, 90, 70, 50, 10]
    elsa_format.pack(network, out := io.BytesIO(), sparsities=percents, scope=scope)
    packed = np.array(list(elsa_format.open(out).nested.values()))
    packed = packed.sum(0, keepdims=True) if scope == "global" else packed
    levels = parse_levels([str(percent) for percent in percents])
    trained = [Scope(scope, prune="").budgets(network, level) for level in levels]
    assert packed.T.tolist() == [list(budgets) for budgets in trained]
