"""Both implementations of the kernels, so that tests run each of them explicitly."""

import importlib
import importlib.util
import os
import shutil
from types import ModuleType

import pytest
from internals import _pure

HAVE_COMPILER = any(shutil.which(name) for name in ("cc", "gcc", "clang"))


def _load_native() -> ModuleType | None:
    if path := os.environ.get("ELSA_TEST_NATIVE"):  # another build: sanitizers, or without AVX2
        return load_build(path)
    try:
        return importlib.import_module("elsa_format._native")
    except ImportError:
        return None


def load_build(path: str) -> ModuleType:
    """A build of the C module that is not the installed one."""
    spec = importlib.util.spec_from_file_location("elsa_format._native", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


NATIVE = _load_native()

each_implementation = pytest.mark.parametrize(
    "kernels",
    [
        pytest.param(_pure, id="pure"),
        pytest.param(
            NATIVE,
            id="native",
            marks=pytest.mark.skipif(NATIVE is None, reason="the C module is not built"),
        ),
    ],
)
