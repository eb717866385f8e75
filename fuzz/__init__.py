"""Fuzz targets: properties that must hold for any bytes whatsoever."""

import importlib.util
import os
import sys


def _use_native(path: str) -> None:
    """Let elsa_format use another build of its C module, such as one with sanitizers."""
    spec = importlib.util.spec_from_file_location("elsa_format._native", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules["elsa_format._native"] = module


if "ELSA_TEST_NATIVE" in os.environ:
    _use_native(os.environ["ELSA_TEST_NATIVE"])
