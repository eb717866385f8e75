"""Arguments of the Python API: a value that is not allowed is an error, never another meaning."""

import io
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bits import same_bits
from internals import PackFields

import elsa_format as elsa

Network = dict[str, np.ndarray]


@pytest.mark.parametrize(
    ("options", "error", "allowed"),
    [
        ({"rounding": "Nearest"}, ValueError, "'nearest', 'overwrite'"),
        ({"rounding": None}, TypeError, "'nearest', 'overwrite'"),
        ({"scope": "layer"}, ValueError, "'global', 'uniform'"),
        ({"axis": 1.0}, TypeError, "whole number"),
        ({"jobs": 0}, ValueError, "from 1"),
        ({"jobs": -1}, ValueError, "from 1"),
        ({"jobs": 1.5}, TypeError, "from 1"),
        ({"jobs": True}, TypeError, "from 1"),
        ({"max_shard_size": 0}, ValueError, "from 1"),
        ({"max_shard_size": 100}, TypeError, "index.json"),
        ({"include": ["w*", 3]}, TypeError, "strings"),
        ({"names": [1]}, TypeError, "strings"),
        ({"level_count": 1}, TypeError, "counters"),
    ],
)
def test_pack(network: Network, options: Any, error: type[Exception], allowed: str) -> None:
    with pytest.raises(error, match=allowed):
        elsa.pack(network, io.BytesIO(), sparsities=[50], **options)


def test_options_are_the_keywords_of_pack(network: Network) -> None:
    assert PackFields.__annotations__.keys() == {field.name for field in fields(elsa.PackOptions)}
    options = elsa.PackOptions(sparsities="90,50", exclude="conv*", names=["small", "large"])
    outs = [io.BytesIO() for _ in range(3)]
    elsa.pack(network, outs[0], options)
    elsa.pack(network, outs[1], sparsities=[90, 50], exclude=["conv*"], names=["small", "large"])
    assert outs[0].getvalue() == outs[1].getvalue()
    elsa.pack(network, outs[2], options, names=["a", "b"], rounding="overwrite")
    assert [level.name for level in elsa.open(outs[2]).levels] == ["a", "b"]
    assert set(elsa.open(outs[2]).nested) == {"dense/kernel"}


@pytest.mark.parametrize("options", [{}, {"sparsities": 90, "counters": {}}])
def test_levels_come_from_one_source(network: Network, options: Any) -> None:
    with pytest.raises(elsa.ConflictingOptions, match=r"one of sparsities=…, levels=… and count"):
        elsa.pack(network, io.BytesIO(), **options)


def test_what_is_no_checkpoint_is_not_packed() -> None:
    with pytest.raises(TypeError, match="expected a path, a URL, named arrays or a Checkpoint"):
        elsa.pack(["w"], io.BytesIO(), sparsities=90)  # type: ignore[arg-type]


def test_a_lone_value_is_one_value(network: Network, tmp_path: Path) -> None:
    def packed(**options: Any) -> bytes:
        out = io.BytesIO()
        elsa.pack(network, out, **options)
        return out.getvalue()

    several: dict[str, Any] = {
        "sparsities": [90],
        "include": ["dense*"],
        "exclude": ["*bias"],
        "names": ["small"],
    }
    lone = {"sparsities": 90, "include": "dense*", "exclude": "*bias", "names": "small"}
    assert packed(**lone) == packed(**several)
    assert packed(sparsities="90, 50") == packed(sparsities=[90, 0.5])
    level = {name: array.copy() for name, array in network.items()}
    level["conv/kernel"][0] = 0
    assert packed(levels=level) == packed(levels=[level])
    assert packed(sparsities=np.array([90, 80])) == packed(sparsities=[90, 80])


@pytest.mark.parametrize(
    "call",
    [
        lambda file: file.load(1, layout="coo"),
        lambda file: file.size(1, "zip"),
        lambda file: file.choose(sparsity=0.5, layout="coo"),
        lambda file: elsa.extract(file.path, io.BytesIO(), level=1, layout="zip"),
    ],
)
def test_layouts(packed: Path, call: Callable[[Any], object]) -> None:
    with elsa.open(packed) as file, pytest.raises(ValueError, match="'dense', 'bitmask', 'csr'"):
        call(file)


def test_the_dense_network_has_no_sparse_layout(packed: Path) -> None:
    with elsa.open(packed) as file:
        with pytest.raises(elsa.NoSuchLevel, match="no layout csr"):
            file.load("dense", layout="csr")
        with pytest.raises(elsa.NoSuchLevel, match="no layout bitmask"):
            file.size("dense", "bitmask")
    with pytest.raises(elsa.NoSuchLevel, match="no layout csr"):
        elsa.extract(packed, io.BytesIO(), level="dense", layout="csr")


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"level": 1, "jobs": 0}, ValueError),
        ({"level": 1, "max_shard_size": 100}, TypeError),
        ({"level": 1, "keep_levels": True, "layout": "csr"}, TypeError),
        ({"max_size": 10**9, "keep_levels": True}, TypeError),
        ({"max_size": 1.5}, TypeError),
        ({"max_size": -1}, ValueError),
        ({"level": 1, "sparsity": 90}, TypeError),
    ],
)
def test_extract(packed: Path, tmp_path: Path, options: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        elsa.extract(packed, tmp_path / "level.safetensors", **options)
    assert [path.name for path in tmp_path.iterdir()] == [packed.name]


def test_verify(packed: Path) -> None:
    with pytest.raises(ValueError, match="jobs 0"):
        elsa.verify(packed, jobs=0)


def test_sparsity_is_percent_as_in_pack(packed: Path) -> None:
    for wish in (90, "90", "90%", 0.9, np.float32(90)):
        assert elsa.extract(packed, io.BytesIO(), sparsity=wish) == 2
    with elsa.open(packed) as file:
        assert file.choose(sparsity=90) == 2


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda w: elsa.embed_counters(w, np.array([1.7, 0.2]), 2), TypeError),
        (lambda w: elsa.embed_counters(w, np.array([True, False]), 2), TypeError),
        (lambda w: elsa.embed_counters(w, np.array([1, 0]), 2, rounding="up"), ValueError),  # type: ignore[arg-type]
        (lambda w: elsa.mask_level(w, 2, 0), ValueError),
        (lambda w: elsa.mask_level(w, 2, 4), ValueError),
        (lambda w: elsa.mask_level(w, 2, 1.5), TypeError),  # type: ignore[arg-type]
        (lambda w: elsa.read_counters(w, 2.5), TypeError),  # type: ignore[arg-type]
    ],
)
def test_counters(call: Callable[[Any], object], error: type[Exception]) -> None:
    with pytest.raises(error):
        call(np.ones(2, np.float32))


def level_specs(**changes: Any) -> list[elsa.LevelSpec]:
    return [elsa.LevelSpec(**({"name": "small"} | changes)), elsa.LevelSpec("large")]


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"levels": level_specs(name="")}, elsa.InvalidProfile),
        ({"levels": level_specs(name=7)}, elsa.InvalidProfile),
        ({"levels": level_specs(name="large")}, elsa.InvalidProfile),
        ({"levels": level_specs(target=1.5)}, elsa.InvalidProfile),
        ({"levels": level_specs(target=float("nan"))}, elsa.InvalidProfile),
        ({"levels": level_specs(pattern="2/4")}, elsa.InvalidProfile),
        ({"levels": level_specs(pattern="4:2")}, elsa.InvalidProfile),
        ({"levels": level_specs(metrics={"loss": float("inf")})}, elsa.InvalidProfile),
        ({"levels": level_specs(metrics={"loss": "low"})}, elsa.InvalidProfile),
        ({"levels": level_specs(metrics={"ok": True})}, elsa.InvalidProfile),
        ({"levels": level_specs(metrics={"steps": 2**53})}, elsa.InvalidProfile),
        ({"levels": level_specs(metrics={1: 2.0})}, elsa.InvalidProfile),
        ({"levels": level_specs(name="\ud800")}, elsa.InvalidJson),
        ({"dense_metrics": {"loss": np.float32("nan")}}, elsa.InvalidProfile),
        ({"metadata": {"format": 1}}, elsa.InvalidHeader),
        ({"metadata": {1: "one"}}, elsa.InvalidHeader),
        ({"metadata": {"elsa": "{}"}}, elsa.InvalidHeader),
        ({"metadata": {"elsa_level": "{}"}}, elsa.InvalidHeader),
        ({"metadata": {"format": "\udfff"}}, elsa.InvalidJson),
        ({"bits": 2.0}, TypeError),
        ({"bits": 9}, ValueError),
        ({"nested": ["w", 3]}, TypeError),
    ],
)
def test_what_the_profile_forbids_is_not_written(
    tmp_path: Path, changes: Any, error: type[Exception]
) -> None:
    weights = elsa.embed_counters(np.ones(2, np.float32), np.array([1, 2]), bits=2)
    options: dict[str, Any] = {"levels": level_specs(), "nested": ["w"]} | changes
    with pytest.raises(error):
        elsa.write(tmp_path / "net.safetensors", {"w": weights}, **options)
    assert list(tmp_path.iterdir()) == []


def test_numbers_of_numpy_are_numbers() -> None:
    weights = elsa.embed_counters(np.ones(2, np.float32), np.array([1, 2]), bits=2)
    out = io.BytesIO()
    specs = level_specs(
        target=np.float32(0.5), metrics={"a": np.float32(0.25), "n": np.int64(3), "z": np.array(1)}
    )
    elsa.write(out, {"w": weights}, levels=specs, nested="w", bits=np.int8(2))
    elsa.verify(io.BytesIO(out.getvalue()))
    level = elsa.open(out).levels[0]
    assert (level.target, level.metrics) == (0.5, {"a": 0.25, "n": 3, "z": 1})


def test_pack_refuses_one_name_for_two_levels(network: Network) -> None:
    with pytest.raises(elsa.ElsaError, match="name 'a' is that of another level"):
        elsa.pack(network, io.BytesIO(), sparsities=[90, 80], names=["a", "a"])
    with pytest.raises(elsa.InvalidProfile, match="non-empty"):
        elsa.pack(network, io.BytesIO(), sparsities=[90, 80], names=["a", ""])


def test_keep_levels_of_a_file_made_elsewhere(rich: Path) -> None:
    out = io.BytesIO()
    elsa.extract(rich, out, level=2, keep_levels=True)
    assert same_bits(elsa.open(out).load(1), elsa.open(rich).load(1))
