"""The former name of `elsa_converters.sparse`, kept for one more release."""

from typing import Any
from warnings import warn

from elsa_converters import sparse

__all__ = ["find_library", "instructions"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    text = f"elsa_converters.onnx_sparse.{name} is now elsa_converters.sparse.{name}"
    warn(text, DeprecationWarning, stacklevel=2)
    return getattr(sparse, name)
