"""The inner loops over weights: the C module where it is built, numpy elsewhere, the same bits.

`ELSA_PURE_PYTHON=1` forces numpy. All functions are described in `_pure`.
"""

from __future__ import annotations

import os

import numpy as np
from numpy.typing import NDArray

from ._pure import Words

try:
    if os.environ.get("ELSA_PURE_PYTHON") == "1":
        raise ImportError("numpy asked for")
    from . import _native as _found
except ImportError:
    from . import _pure as _found  # type: ignore[no-redef]

ISA = getattr(_found, "ISA", "numpy")
NATIVE = ISA != "numpy"

__all__ = [
    "NATIVE",
    "assign",
    "compact",
    "count",
    "csr",
    "embed",
    "expand",
    "expand_csr",
    "find_unpackable",
    "histogram",
    "kernels",
    "mask",
    "nest",
]

assign = _found.assign
compact = _found.compact
csr = _found.csr
embed = _found.embed
expand = _found.expand
expand_csr = _found.expand_csr
find_unpackable = _found.find_unpackable
histogram = _found.histogram
mask = _found.mask
nest = _found.nest


def kernels() -> str:
    """Which kernels run here: `C, AVX2`, `plain C`, or `numpy` where the C module is not built.

    >>> import elsa_format
    >>> elsa_format.kernels() in ("C, AVX2", "plain C", "numpy")
    True
    """
    return {"avx2": "C, AVX2", "plain": "plain C"}.get(ISA, ISA)


def count(src: Words, bits: int) -> NDArray[np.int64]:
    """Return the number of words with each counter, 0 first."""
    out = np.zeros(1 << bits, np.int64)
    _found.count(src, bits, out)
    return out
