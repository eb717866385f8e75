"""Levels as people ask for them: what is read, kept and refused, here and by the trainer."""

import io
import json
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from internals import _most_kept, main
from safetensors.numpy import save_file

import elsa_format as elsa
from elsa_format.levels import Pattern, check_levels, kept_count, parse_sparsity, zeros_of


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
        ([(1, 4), (1, 8)], "sparsities must fall, as in 1:8,1:4$"),
        ([(1, 4), (1, 4)], "sparsities must fall$"),
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


NET = {"w": np.random.default_rng(3).standard_normal((20, 50)).astype(np.float32)}
SAME = [90, 90.0, 0.9, "90", "90%", " 90 % ", "0.9", "9/10", Fraction(9, 10), np.float32(0.9)]
PATTERNS = ["2:4", Pattern(2, 4), "50%"]
REFUSED = [100, "100", "100%", 1, 1.0, "1", "1.0", 150, -5, "-0.1", "-5%", math.nan, math.inf]
REFUSED += ["nan", "many", "", "%", "4:2", "0:4", "2:4%", True, Fraction(1), Fraction(-1, 2)]


def python_routes(folder: Path) -> dict[str, Any]:
    """Every function that takes a sparsity, as a function of it that gives the level."""
    net, ship = folder / "net.safetensors", folder / "ship.safetensors"
    elsa.pack(NET, net, sparsities=[95, 90, 50])
    elsa.ship(net, ship)
    out = folder / "out"

    def fetched(value: Any) -> Any:
        out.unlink(missing_ok=True)
        return elsa.fetch(ship, out, sparsity=value).level

    return {
        "extract": lambda value: elsa.extract(net, out, sparsity=value, force=True),
        "choose": lambda value: elsa.open(net).choose(sparsity=value),
        "fetch": fetched,
        "parse": lambda value: 2 if zeros_of(value) == Fraction(9, 10) else 3,
    }


def command_routes(folder: Path) -> dict[str, Any]:
    """Every command that takes one, in the same way."""
    net, ship, out = folder / "net.safetensors", folder / "ship.safetensors", folder / "out"

    def run(*arguments: str) -> Any:
        out.unlink(missing_ok=True)
        result = CliRunner().invoke(main, [*arguments, "-o", str(out), "--json"])
        if result.exit_code:
            assert result.exit_code == 2, result.output
            assert not out.exists()
            raise elsa.InfeasibleLevels(result.output)
        return json.loads(result.stdout)["level"]

    return {
        "elsa extract": lambda value: run("extract", str(net), f"--sparsity={value!s}"),
        "elsa fetch": lambda value: run("fetch", str(ship), f"--sparsity={value!s}"),
    }


def test_all_who_take_a_sparsity_take_the_same_words(tmp_path: Path) -> None:
    for route, level in (python_routes(tmp_path) | command_routes(tmp_path)).items():
        for value in SAME:
            assert level(value) == 2, (route, value)
        for value in PATTERNS:
            assert level(value) == 3, (route, value)
        for value in REFUSED:
            with pytest.raises(elsa.InfeasibleLevels, match=r"sparsity|pattern"):
                level(value)


def test_levels_are_packed_by_the_same_words(tmp_path: Path) -> None:
    out = tmp_path / "net.safetensors"
    save_file(NET, tmp_path / "dense.safetensors")
    pack = ["pack", str(tmp_path / "dense.safetensors"), "-o", str(out), "-f", "-q"]
    for value in SAME:
        elsa.pack(NET, out, sparsities=[value], force=True)
        expected = out.read_bytes()
        assert elsa.open(out).levels[0].name == "90%"
        result = CliRunner().invoke(main, [*pack, f"--sparsities={value!s}"])
        assert result.exit_code == 0, result.output
        assert out.read_bytes() == expected
    out.unlink()
    for value in REFUSED:
        with pytest.raises(elsa.InfeasibleLevels, match=r"sparsity|pattern"):
            elsa.pack(NET, out, sparsities=[value])
        result = CliRunner().invoke(main, [*pack, f"--sparsities={value!s}"])
        assert result.exit_code == 2, (value, result.output)
        assert not out.exists()


def test_levels_in_the_wrong_order_are_told_in_the_right_one() -> None:
    with pytest.raises(elsa.InfeasibleLevels, match=r"must fall, as in 95,92\.5,80$"):
        elsa.pack({"w": np.ones((4, 4))}, io.BytesIO(), sparsities="80,92.5,95")
