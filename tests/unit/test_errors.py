"""Errors: who is at fault, and advice in the words of whoever reads it."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import elsa_format as elsa


def test_what_the_options_got_wrong_is_no_fault_of_the_file() -> None:
    for kind in (elsa.NoSuchLevel, elsa.InfeasibleLevels, elsa.NoSuchTensor, elsa.NoGraph):
        assert issubclass(kind, elsa.InvalidOption)
        assert issubclass(kind, ValueError)
        assert kind.exit_code == 2
    for kind in (elsa.TensorMismatch, elsa.InvalidCheckpoint, elsa.CounterOutOfRange):
        assert kind.exit_code == 3
    # What caught them before still does.
    assert issubclass(elsa.InfeasibleLevels, elsa.FormatError)
    assert issubclass(elsa.NoSuchTensor, elsa.TensorMismatch)
    assert issubclass(elsa.NoGraph, elsa.InvalidCheckpoint)
    assert issubclass(elsa.MissingExtra, ImportError)


def test_python_is_told_in_python(network: dict[str, np.ndarray], tmp_path: Path) -> None:
    out = tmp_path / "net.safetensors"
    elsa.pack(network, out, sparsities=[90])
    other = {**network, "bn/mean": network["bn/mean"] + 1}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"sparsities": [90]}, "; force=True replaces it"),
        ({"sparsities": ["2:4"]}, "; exclude='dense/kernel' leaves it out"),
        ({"levels": [other]}, "; per_level='bn/mean' stores one for each level"),
        ({"sparsities": [90], "exclude": ["*"]}, "; include=… names others"),
    ]
    for options, advice in cases:
        with pytest.raises(elsa.ElsaError) as caught:
            elsa.pack(network, out if "force" in advice else tmp_path / "new", **options)
        assert str(caught.value).endswith(advice)
        assert "--" not in str(caught.value)
    elsa.extract(out, tmp_path / "dense.safetensors", level="dense")
    with pytest.raises(elsa.NotElsa, match=r"; elsa_format\.pack\(\) makes an ELSA file"):
        elsa.verify(tmp_path / "dense.safetensors")


def test_a_hostile_name_is_still_one_short_line() -> None:
    error = elsa.InfeasibleLevels("a" * 9999, "{exclude} leaves it out", exclude="b\n\x1b" * 9999)
    for text in (str(error), error.worded(lambda name, value: f"--{name} {value}", str)):
        assert text.isprintable()
        assert len(text) < 2000


def test_braces_in_a_message_are_no_options() -> None:
    error = elsa.OutputExists("{force}{pack()}: exists", "{force} replaces it", force=True)
    assert str(error) == "{force}{pack()}: exists; force=True replaces it"


def test_errors_can_be_sent_to_other_processes() -> None:
    error = elsa.OutputExists("x: exists already", "{force} replaces it", force=True)
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert (
        again.worded(lambda name, value: f"--{name}", str)
        == "x: exists already; --force replaces it"
    )


def test_a_broken_package_is_not_called_missing() -> None:
    for error, text in {
        ModuleNotFoundError("No module", name="onnx.helper"): "it needs onnx; pip install ",
        ImportError("libfoo.so: cannot open shared object", name="onnx"): "it: libfoo.so: cannot ",
    }.items():
        assert str(elsa.MissingExtra.of(error, "it", "onnx")).startswith(text)
