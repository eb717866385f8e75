"""Levels measured with a function of their weights."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import elsa_format
from elsa_format import Incomplete, InvalidOption, Metric


def nonzero(weights: dict[str, Any]) -> dict[str, Any]:
    return {"nonzero": (int(np.count_nonzero(weights["dense/kernel"])), "lower")}


def test_every_level_and_the_dense_network(rich: Path) -> None:
    with elsa_format.open(rich) as file:
        expected = [
            int(np.count_nonzero(file.tensor("dense/kernel", n))) for n in (1, 2, 3, "dense")
        ]
        opened = elsa_format.evaluate(file, nonzero)
        file.tensor("dense/kernel", 1)  # still open
    found = elsa_format.evaluate(rich, nonzero)
    assert list(found) == [1, 2, 3, "dense"]
    assert [found[n]["nonzero"] for n in found] == [Metric(n, "lower") for n in expected]
    assert opened == found


def test_a_function_that_writes_into_the_weights_changes_nothing_else(rich: Path) -> None:
    """Not the next level, which shares tensors with it, and not the file."""
    before, sums = rich.read_bytes(), []

    def spoil(weights: dict[str, Any]) -> dict[str, Any]:
        sums.append({name: float(array.sum()) for name, array in weights.items()})
        for array in weights.values():
            array[...] = 0
        return {"loss": 1.0}

    elsa_format.evaluate(rich, spoil)
    assert rich.read_bytes() == before
    with elsa_format.open(rich) as file:
        for level, found in zip((1, 2, 3, "dense"), sums, strict=True):
            weights = file.load(level)
            assert found == {name: float(array.sum()) for name, array in weights.items()}


def test_the_levels_of_a_delivery_file_that_are_downloaded(rich: Path, tmp_path: Path) -> None:
    whole = tmp_path / "ship.safetensors"
    elsa_format.ship(rich, whole)
    with elsa_format.open(whole) as file:
        two, head = file.downloads[2], file.downloads[1]
    (tmp_path / "two.safetensors").write_bytes(whole.read_bytes()[:two])
    found = elsa_format.evaluate(tmp_path / "two.safetensors", nonzero)
    assert found == {n: elsa_format.evaluate(rich, nonzero)[n] for n in (1, 2)}
    (tmp_path / "none.safetensors").write_bytes(whole.read_bytes()[: head - 1])
    with pytest.raises(Incomplete, match="no level is downloaded"):
        elsa_format.evaluate(tmp_path / "none.safetensors", nonzero)


def test_numbers_of_all_kinds_are_metrics(rich: Path) -> None:
    given = {
        "accuracy": np.float32(0.5),
        "loss": 2,
        "agreement": np.array(0.25),
        "mine": (np.int64(3), "lower"),
        "sure": Metric(0.1, "lower", samples=7, error=0.01),
    }
    assert elsa_format.evaluate(rich, lambda weights: given)["dense"] == {
        "accuracy": Metric(0.5, "higher"),
        "loss": Metric(2.0, "lower"),
        "agreement": Metric(0.25, "higher"),
        "mine": Metric(3.0, "lower"),
        "sure": Metric(0.1, "lower", 7, 0.01),
    }


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (None, "level 1: the function returned a NoneType"),
        ({}, "level 1: the function returned {}"),
        (0.93, "level 1: the function returned a float"),
        ({"accuracy": float("nan")}, "level 1: metric 'accuracy' is nan"),
        ({"loss": np.float64("inf")}, "level 1: metric 'loss' is inf"),
        ({"loss": 10**400}, "level 1: metric 'loss' is nan"),
        ({"loss": np.ones(3)}, "level 1: metric 'loss' is nan"),
        ({"loss": "1.5"}, "level 1: metric 'loss' is nan"),
        ({"mine": 0.5}, "metric 'mine' needs a direction; return"),
        ({"mine": (0.5, "up")}, "metric 'mine' needs a direction, not 'up'"),
        ({"mine": Metric(0.5, "")}, "metric 'mine' needs a direction, not ''"),
        ({3: 0.5}, "a metric called 3"),
    ],
)
def test_what_is_no_metric_is_refused_at_the_first_level(
    rich: Path, returned: Any, words: str
) -> None:
    calls = []
    with pytest.raises(InvalidOption) as error:
        elsa_format.evaluate(rich, lambda weights: calls.append(1) or returned)
    assert words in str(error.value)
    assert len(calls) == 1


def test_what_is_no_function_is_refused_before_a_file_is_opened() -> None:
    with pytest.raises(InvalidOption, match="expected a function of a level's weights"):
        elsa_format.evaluate("nothing.safetensors", "net.py")  # type: ignore[arg-type]
