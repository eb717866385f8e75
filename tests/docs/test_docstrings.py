"""The examples in docstrings run, and everything public has one."""

import doctest
import inspect
import pkgutil
import shutil
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from safetensors.numpy import save_file

import elsa_format

PACKAGES = ("elsa_format", "elsa_report", "elsa_train", "elsa_converters")
PUBLIC = (
    "elsa_format",
    "elsa_format.levels",
    "elsa_report",
    "elsa_train",
    "elsa_converters.onnx",
    "elsa_converters.flax_onnx",
    "elsa_converters.torch",
    "elsa_converters.transformers",
    "elsa_train.torch",
    "elsa_train.torch.trainer",
)
OPTIONAL = {
    "elsa_converters.torch": "torch",
    "elsa_converters.transformers": "transformers",
    "elsa_train.torch": "torch",
    "elsa_train.torch.trainer": "transformers",
}
"""Packages that make test does without, and what they need."""
OWN = {
    "elsa_converters.flax_onnx": ["template_from_flax"],
    "elsa_train.torch.trainer": ["FinetuneCallback", "NestingCallback"],
}
WITHOUT = {
    "jaxpruner_rules": "needs jaxpruner, which is not on PyPI",
    "recalibrate": "needs a trained network; tests/train run it",
}


def modules() -> Iterator[str]:
    for package in PACKAGES:
        yield package
        found = pkgutil.walk_packages(import_module(package).__path__, f"{package}.")
        yield from (m.name for m in found if not m.name.endswith(("._native", ".__main__")))


def load(name: str) -> ModuleType:
    for package, needed in OPTIONAL.items():
        if f"{name}.".startswith(f"{package}.") and find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed (make test-torch)")
    return import_module(name)


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that examples read: a checkpoint, an ONNX model of it, and both packed."""
    folder = tmp_path_factory.mktemp("example")
    rng = np.random.default_rng(0)
    layer = rng.standard_normal((100, 100)).astype(np.float32)
    tensors = {"layer": layer, "bias": np.zeros(100, np.float32)}
    save_file(tensors, folder / "dense.safetensors")
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "layer"], ["product"]),
            helper.make_node("Add", ["product", "bias"], ["y"]),
        ],
        "linear",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["batch", 100])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["batch", 100])],
        [numpy_helper.from_array(array, name) for name, array in tensors.items()],
    )
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), folder / "model.onnx")
    elsa_format.pack(
        folder / "model.onnx",
        folder / "net.safetensors",
        sparsities=[95, 90, 80],
        template=folder / "net.onnx",
    )
    elsa_format.ship(folder / "net.safetensors", folder / "net.ship.safetensors")
    return folder


@pytest.mark.parametrize("name", list(modules()))
def test_examples_run(
    name: str, example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(example, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    assert doctest.testmod(load(name)).failed == 0


@pytest.mark.parametrize("name", PUBLIC)
def test_everything_public_has_an_example(name: str) -> None:
    module = load(name)
    lacking = [key for key, value in public(module) if ">>>" not in (inspect.getdoc(value) or "")]
    assert [key for key in lacking if key not in WITHOUT] == []
    assert "+SKIP" not in "".join(inspect.getdoc(value) or "" for _, value in public(module))


def public(module: ModuleType) -> Iterator[tuple[str, object]]:
    """What is exported and can be used: not errors, not protocols, not aliases of types."""
    for key in getattr(module, "__all__", OWN.get(module.__name__, [])):
        value = getattr(module, key)
        if inspect.isfunction(value) or (inspect.isclass(value) and is_usable(value)):
            yield key, value


def is_usable(value: type) -> bool:
    return not issubclass(value, Exception) and not getattr(value, "_is_protocol", False)
