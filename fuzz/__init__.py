"""Fuzz targets: properties that must hold for any bytes whatsoever."""

import importlib.util
import os
import sys
from pathlib import Path


def _use_native(path: str) -> None:
    """Let elsa_format use another build of its C module, such as one with sanitizers."""
    spec = importlib.util.spec_from_file_location("elsa_format._native", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules["elsa_format._native"] = module


sys.path.append(str(Path(__file__).parents[1] / "tests"))
import internals  # noqa: E402, F401 - where private names are; from now on others import it

sys.path.pop()

if "ELSA_TEST_NATIVE" in os.environ:
    _use_native(os.environ["ELSA_TEST_NATIVE"])
