"""Operators that skip the zeros: elsa.SparseMatMul, elsa.SparseConv and elsa.NMMatMul.

They are a library in C for any ONNX Runtime, and functions of stock operators for everything else.
"""

import ctypes
from pathlib import Path

__all__ = ["find_library", "instructions"]

NAMES = ("libelsa_sparse.so", "libelsa_sparse.dylib", "elsa_sparse.dll")


def find_library() -> Path | None:
    """The operators' library, None where it was not built as there was no compiler."""
    for folder in __path__:
        for name in NAMES:
            if (path := Path(folder) / "lib" / name).is_file():
                return path.resolve()
    return None


def instructions() -> str:
    """What the operators run on here: `avx512`, `avx2`, `base` (SSE2, NEON), or `none`."""
    path = find_library()
    if path is None:
        return "none"
    isa = ctypes.CDLL(str(path)).elsa_sparse_isa
    isa.restype = ctypes.c_char_p
    return str(isa().decode())
