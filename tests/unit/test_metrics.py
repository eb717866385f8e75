"""What files say of their metrics: written, read, and refused before anything is written."""

import io
from typing import Any

import numpy as np
import pytest

import elsa_format as elsa

INFO = elsa.MetricInfo("lower", 1000, "elsa-format 0.3.0")


def write(found: Any = None, errors: Any = None, **changes: Any) -> io.BytesIO:
    """A network of one level that has metrics."""
    target = io.BytesIO()
    tensors = {"w": np.asarray([0x3F800001, 0x3F800000], "<u4").view(np.float32)}
    levels = [elsa.LevelSpec("50%", metrics=found or {}, errors=errors or {})]
    elsa.write(target, tensors, levels=levels, nested=["w"], **changes)
    target.seek(0)
    return target


def test_errors_and_how_metrics_were_measured_come_back() -> None:
    file = write(
        {"loss": np.float32(0.5), "__proto__": 1},
        {"loss": np.float64(0.25)},
        dense_metrics={"loss": 0.125},
        dense_errors={"loss": 0},
        metrics={"loss": INFO},
    )
    profile = elsa.open(file).profile
    assert profile.levels[0].metrics == {"loss": 0.5, "__proto__": 1}
    assert profile.levels[0].errors == {"loss": 0.25}
    assert (profile.dense_errors, profile.metrics) == ({"loss": 0}, {"loss": INFO})
    found = elsa.inspect(file)
    assert found["levels"][0]["errors"] == {"loss": 0.25}
    assert found["metrics"]["loss"] == INFO.to_json()


def test_an_elsa_file_of_fewer_levels_keeps_them() -> None:
    file, kept = write({"loss": 0.5}, {"loss": 0.25}, metrics={"loss": INFO}), io.BytesIO()
    elsa.extract(file, kept, level=1, keep_levels=True)
    profile = elsa.open(kept).profile
    assert profile.levels[0].errors == profile.dense_errors == {"loss": 0.25}
    assert profile.metrics == {"loss": INFO}


@pytest.mark.parametrize(
    "fields",
    [
        {"errors": {"loss": 0.1}},
        {"found": {"loss": 1}, "errors": {"loss": -0.1}},
        {"found": {"loss": 1}, "errors": {"loss": float("nan")}},
        {"found": {"loss": 1}, "errors": {"loss": 10**400}},
        {"found": {"loss": 1}, "errors": {"loss": "0.1"}},
        {"dense_errors": {"loss": 0.1}},
        {"dense_metrics": {"loss": 1}, "dense_errors": {"loss": float("inf")}},
    ],
)
def test_errors_that_no_reader_accepts_are_not_written(fields: dict[str, Any]) -> None:
    with pytest.raises(elsa.InvalidProfile, match="error"):
        write(**fields)


@pytest.mark.parametrize(
    "info",
    [
        elsa.MetricInfo("larger"),  # type: ignore[arg-type]
        elsa.MetricInfo("lower", -1),
        elsa.MetricInfo("lower", 10**400),
        elsa.MetricInfo("lower", 1.0),  # type: ignore[arg-type]
        elsa.MetricInfo("lower", recorded=3),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_way_to_measure_is_not_written(info: elsa.MetricInfo) -> None:
    with pytest.raises(elsa.InvalidProfile, match=r"profile metric 'loss' \w+: "):
        write({"loss": 1}, metrics={"loss": info})
