"""Weights in the form that the layers take: CSR, or n values in each m columns."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

MOST_COLUMNS = 1 << 16
"""Of a row: indices have 16 bits."""
PART_COLUMNS = 4096
"""Of a product that is cut: so many inputs, 16 kB, stay in the first-level cache while the weights
stream past them. 11008 at once took twice the time."""
MOST_KERNEL = 32
"""Rows and columns of a convolution's kernel."""
PATTERNS = ((1, 8), (1, 4), (2, 4))
"""(n, m), sparsest first."""
_FILLED = 0.7
"""Of a pattern's places; with fewer, compressed rows are smaller: any sparse matrix is 2:4."""
_VALUES_AT_ONCE = 16  # the kernels for n:m take so many of a row
_COLUMNS_AT_ONCE = 8 * _VALUES_AT_ONCE  # then every pattern has such a multiple


@dataclass(frozen=True)
class Csr:
    """A matrix in compressed rows; each has at least one value, if need be a zero."""

    values: NDArray[Any]
    indices: NDArray[np.uint16]
    indptr: NDArray[np.int32]


@dataclass(frozen=True)
class Pattern:
    """A matrix with n values in each m columns, and the place of each among the m."""

    n: int
    m: int
    values: NDArray[Any]
    codes: NDArray[np.uint8]

    @property
    def scales(self) -> list[int]:
        """What each code in a byte is multiplied by."""
        return [1, 4, 16, 64] if self.m == 4 else [1, 16]


def parts_of(columns: int) -> list[tuple[int, int]]:
    """Where to cut a wide product into several that add up; N:M patterns are not cut apart.

    >>> parts_of(4096), parts_of(11008)
    ([(0, 4096)], [(0, 3712), (3712, 7424), (7424, 11008)])
    """
    count = -(-columns // PART_COLUMNS)
    width = -(-columns // count)
    if count > 1:
        width = -(-width // _COLUMNS_AT_ONCE) * _COLUMNS_AT_ONCE
    return [(start, min(start + width, columns)) for start in range(0, columns, width)]


def to_csr(matrix: NDArray[Any]) -> Csr:
    """Compress a matrix of at most 65,536 columns.

    >>> to_csr(np.array([[0, 5, 6], [0, 0, 0]], np.float32)).indices.tolist()
    [1, 2, 0]
    """
    assert matrix.shape[1] <= MOST_COLUMNS
    kept = is_kept(matrix)
    kept[~kept.any(1), 0] = True
    rows, columns = np.nonzero(kept)
    ends = np.cumsum(np.bincount(rows, minlength=len(matrix)))
    return Csr(
        np.ascontiguousarray(matrix[kept]),
        columns.astype(np.uint16),
        np.concatenate([[0], ends]).astype(np.int32),
    )


def to_pattern(matrix: NDArray[Any]) -> Pattern | None:
    """Compress a matrix that is n:m sparse along its rows, by the sparsest pattern that fits.

    >>> to_pattern(np.tile(np.array([0, 0, 1, 0], np.float32), (3, 32))).m
    4
    """
    rows, columns = matrix.shape
    kept = is_kept(matrix)
    for n, m in PATTERNS:
        if columns % m or columns // m * n % _VALUES_AT_ONCE:
            continue
        groups = kept.reshape(rows, -1, m)
        counts = groups.sum(2)
        if counts.max(initial=0) > n or counts.sum() < _FILLED * n * counts.size:
            continue
        # The n places that are kept, or else free, in ascending order.
        places = np.sort(np.argsort(~groups, axis=2, kind="stable")[..., :n], axis=2)
        values = np.take_along_axis(matrix.reshape(rows, -1, m), places, axis=2)
        bits = 2 if m == 4 else 4
        digits = places.reshape(-1, 8 // bits) << np.arange(0, 8, bits)
        return Pattern(n, m, values.reshape(-1), digits.sum(1).astype(np.uint8))
    return None


def is_kept(array: NDArray[Any]) -> NDArray[np.bool_]:
    """What is neither 0 nor -0, by its bits: a denormal is kept, whatever the processor's mode."""
    words: NDArray[Any] = array.view(np.uint16 if array.dtype.itemsize == 2 else np.uint32)
    return np.asarray(words << 1 != 0)
