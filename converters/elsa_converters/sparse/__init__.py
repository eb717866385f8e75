"""Layers that skip the zeros of their weights: a library in C, and weights as it takes them.

It registers with ONNX Runtime as the operators elsa.SparseMatMul, SparseConv and NMMatMul.
"""

import ctypes
from pathlib import Path

__all__ = ["find_library", "instructions"]

NAMES = ("libelsa_sparse.so", "libelsa_sparse.dylib", "elsa_sparse.dll")


def find_library() -> Path | None:
    """The library, None where it was not built as there was no compiler."""
    for folder in __path__:
        for name in NAMES:
            if (path := Path(folder) / "lib" / name).is_file():
                return path.resolve()
    return None


def instructions() -> str:
    """What the layers run on here: `avx512`, `avx2`, `base` (SSE2, NEON), or `none`."""
    path = find_library()
    if path is None:
        return "none"
    isa = ctypes.CDLL(str(path)).elsa_sparse_isa
    isa.restype = ctypes.c_char_p
    return str(isa().decode())
