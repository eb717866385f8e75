"""Errors: who is at fault, and advice in the words of whoever reads it."""

import copy
import pickle
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from internals import TemplateMismatch, _errors, _installed
from internals import _converters_errors as converters_errors
from internals import _train_errors as train_errors

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


def kinds_of_error(kind: type[elsa.ElsaError]) -> list[type[elsa.ElsaError]]:
    found = [kind]
    for one in kind.__subclasses__():
        found += kinds_of_error(one)
    return list(dict.fromkeys(found))


def made(kind: type[elsa.ElsaError]) -> elsa.ElsaError:
    """An error of a kind, with all that it takes."""
    rows = [("w", "F32 [3]", "nothing"), ("b", "nothing", "F32 [3]")]
    if kind is TemplateMismatch:
        return TemplateMismatch("net.onnx", rows)
    return kind("x: {is} wrong", "{force} replaces it", force=True)


@pytest.mark.parametrize("kind", kinds_of_error(elsa.ElsaError), ids=lambda kind: kind.__name__)
def test_every_error_can_be_sent_and_copied(kind: type[elsa.ElsaError]) -> None:
    """With the same text, hint and attributes; in the words of a command, too."""
    error = made(kind)
    error.add_note("seen")
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(again) is kind
        assert str(again) == str(error)
        assert repr(again) == repr(error)
        assert again.args == error.args
        assert vars(again) == vars(error)
        assert getattr(again, "msg", None) == getattr(error, "msg", None)
        for words in (str, lambda name, value=None: f"--{name}"):
            assert again.worded(lambda name, value: f"--{name}", words) == error.worded(
                lambda name, value: f"--{name}", words
            )


def test_all_errors_of_all_packages_are_among_them() -> None:
    found = set(kinds_of_error(elsa.ElsaError))
    for module in (_errors, converters_errors, train_errors):
        own = {kind for kind in vars(module).values() if isinstance(kind, type)}
        assert {kind for kind in own if issubclass(kind, elsa.ElsaError)} <= found


def test_a_tensor_that_is_not_there_is_told_with_similar_names(packed: Path) -> None:
    with elsa.open(packed) as file:
        for name, similar in {
            "dense/kernels": "similar names: 'dense/kernel', ",
            "conv.kernel": "similar names: 'conv/kernel', ",
            "xyz": "some names: ",
            "": "some names: ",
        }.items():
            with pytest.raises(elsa.NoSuchTensor) as caught:
                file.tensor(name)
            assert f"{packed}: no tensor {name!r}; {similar}" in str(caught.value)
            assert isinstance(caught.value, KeyError)
        with pytest.raises(elsa.NoSuchTensor, match="no tensor 3;"):
            file.tensor(3)
        with pytest.raises(KeyError):
            file.tensor("nope", level=1)
    with pytest.raises(elsa.NoSuchTensor, match="no tensor matches 'dense/kernl'; similar names"):
        elsa.pack({"dense/kernel": np.eye(4)}, packed, sparsities=[50], include="dense/kernl")


def test_a_broken_package_is_not_called_missing() -> None:
    for error, text in {
        ModuleNotFoundError("No module", name="onnx.helper"): "it needs onnx; run: pip install ",
        ImportError("libfoo.so: cannot open shared object", name="onnx"): "it: libfoo.so: cannot ",
    }.items():
        assert str(elsa.MissingExtra.of(error, "it", "onnx")).startswith(text)


@pytest.mark.parametrize(
    ("origin", "expected"),
    [
        ("", "pip install 'elsa-format[torch]'"),
        ('{"dir_info":{},"url":"CLONE"}', "pip install 'PATH[torch]'"),
        ('{"dir_info":{"editable":true},"url":"CLONE"}', "pip install -e 'PATH[torch]'"),
        ('{"dir_info":{},"url":"CLONE/gone"}', "pip install 'elsa-format[torch]'"),
        (
            '{"archive_info":{},"url":"https://host/elsa_format.whl"}',
            "pip install 'elsa-format[torch] @ https://host/elsa_format.whl'",
        ),
        (
            '{"url":"https://host/elsa","vcs_info":{"vcs":"git","commit_id":"a1"}}',
            "pip install 'elsa-format[torch] @ git+https://host/elsa@a1'",
        ),
        ("not JSON", "pip install 'elsa-format[torch]'"),
        ("[]", "pip install 'elsa-format[torch]'"),
    ],
)
def test_the_advice_fits_how_it_was_installed(
    origin: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clone = tmp_path / "a clone"
    clone.mkdir()
    folder = tmp_path / "elsa_format-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: elsa-format\nVersion: 1.0\n")
    if origin:
        (folder / "direct_url.json").write_text(origin.replace("CLONE", clone.as_uri()))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert _installed.install_command("torch") == expected.replace("PATH", str(clone))


def test_a_clone_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    root = Path(elsa.__file__).parents[1]
    assert _installed.install_command("onnx") == f"pip install '{root}[onnx]'"
    assert _installed.install_command("x", "acme") == "pip install 'acme[x]'"


def test_an_extra_of_another_package_is_not_called_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    class Acme(metadata.Distribution):
        def read_text(self, filename: str) -> str | None:
            return "Name: acme-elsa\n" if filename == "METADATA" else None

        def locate_file(self, path: Any) -> Any:
            raise NotImplementedError

    entry = metadata.EntryPoint("acme", "no_such_module:Kind", "elsa.checkpoints")
    vars(entry)["dist"] = Acme()
    monkeypatch.setattr(metadata, "entry_points", lambda **wanted: [entry])
    with pytest.raises(elsa.MissingExtra, match=r"run: pip install 'acme-elsa\[acme\]'$"):
        elsa.pack("weights.acme", "net.safetensors", sparsities=[50])
