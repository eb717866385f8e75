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


def measured(**changes: Any) -> io.BytesIO:
    """A network of three levels, of which two and the dense network have an accuracy."""
    target = io.BytesIO()
    words = np.asarray([1, 2, 2, 3, 3, 3] + [0] * 58, "<u4") | 0x3F800000
    metrics = [{"loss": 3.0}, {"accuracy": 0.8, "loss": 2.0}, {"accuracy": 0.82, "loss": 1.0}]
    errors = [{}, {"accuracy": 0.03}, {"accuracy": 0.03}]
    fields = {
        "levels": [
            elsa.LevelSpec(name, metrics=found, errors=error)
            for name, found, error in zip("abc", metrics, errors, strict=True)
        ],
        "dense_metrics": {"accuracy": 0.9, "loss": 0.5},
        "dense_errors": {"accuracy": 0.03},
        "metrics": {"accuracy": elsa.MetricInfo("higher")},
    }
    elsa.write(target, {"w": words.view(np.float32)}, nested=["w"], **fields | changes)
    target.seek(0)
    return target


@pytest.mark.parametrize(
    ("wanted", "level"),
    [
        ({"min": {"accuracy": 0.7}}, 2),
        ({"min": {"accuracy": np.float64(0.81)}}, 3),
        ({"min": {"accuracy": 0.9}}, "dense"),
        ({"max": {"loss": 3}}, 1),
        ({"min": {"accuracy": 0.1}, "max": {"loss": 1.5}}, 3),
        ({"min": {"loss": 3}}, 1),  # no direction is recorded, and none is guessed (ELSA-R-106)
        # The best that fits is the dense network; 2 and 3 differ from it by more than their errors.
        ({"min": {"accuracy": 0.7}, "max_size": 10**6}, "dense"),
        ({"max": {"loss": 3}, "max_size": 10**6}, "dense"),
        # 2 and 3 are equal within their errors, their losses are not.
        ({"min": {"accuracy": 0.7}, "max_size": 10**6, "layout": "bitmask"}, 2),
        ({"max": {"loss": 3}, "max_size": 10**6, "layout": "csr"}, 3),
    ],
)
def test_level_by_its_metrics(wanted: dict[str, Any], level: int | str) -> None:
    with elsa.open(measured()) as file:
        assert file.choose(**wanted) == level
    assert elsa.extract(measured(), io.BytesIO(), **wanted) == level


def test_size_limits_what_metrics_allow() -> None:
    with elsa.open(measured()) as file:
        size = file.size(3, "csr")
        wanted: Any = {"max": {"loss": 2}, "layout": "csr"}
        assert size > file.size(2, "csr")
        assert file.choose(max_size=size, **wanted) == 3
        assert file.choose(max_size=size - 1, **wanted) == 2
        with pytest.raises(elsa.NoSuchLevel, match=r"no level with loss <= 2 takes 9 bytes as csr"):
            file.choose(max_size=9, **wanted)


def test_why_no_level_is_chosen() -> None:
    with elsa.open(measured()) as file:
        with pytest.raises(elsa.NoSuchLevel) as none:
            file.choose(min={"accuracy": 0.95}, max={"loss": 0.75})
        assert str(none.value).endswith(
            ": no level has accuracy >= 0.95 and loss <= 0.75: "
            "accuracy: level 2 has 0.8, level 3 has 0.82, dense has 0.9; "
            "loss: level 1 has 3, level 2 has 2, level 3 has 1, dense has 0.5"
        )
        with pytest.raises(elsa.NoSuchLevel, match="no level records f1; record it with elsa_"):
            file.choose(min={"f1": 0.5})
        with pytest.raises(elsa.InvalidOption, match=r"higher accuracy is better; .* use min=…"):
            file.choose(max={"accuracy": 0.5})


@pytest.mark.parametrize(
    ("wanted", "error"),
    [
        ({"level": 1, "min": {"loss": 1}}, elsa.ConflictingOptions),
        ({"sparsity": 90, "max": {"loss": 1}}, elsa.ConflictingOptions),
        ({"restore": True, "max": {"loss": 1}}, TypeError),
        ({"min": {"loss": float("nan")}}, ValueError),
        ({"min": {"loss": "1"}}, TypeError),
        ({"min": {"loss": True}}, TypeError),
        ({"min": {1: 1}}, TypeError),
    ],
)
def test_wishes_that_mean_nothing(wanted: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        elsa.extract(measured(), io.BytesIO(), **wanted)
