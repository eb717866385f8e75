"""The CSR layout: row ends, column numbers and values of a matrix (spec §9.3)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elsa_format import _kernels
from elsa_format._container import TensorInfo
from elsa_format._container.dtypes import DTYPES, Dtype
from elsa_format._counters import csr
from elsa_format._errors import InvalidLayout, UnsupportedFeature
from elsa_format._layouts.base import (
    Decoder,
    Elements,
    Encoder,
    Layout,
    Piece,
    Room,
    TensorMask,
    empty_array,
    part_name,
    refuse_zeros,
)

MAX_EMPTY_ROWS = 1 << 20
"""Rows without columns cost a file nothing, but row ends in CSR: a kilobyte could ask for 2^60."""


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """The matrix a tensor is stored as in CSR: first dimension × the rest.

    >>> matrix_shape((64, 3, 7, 7)), matrix_shape((10,)), matrix_shape(())
    ((64, 147), (1, 10), (1, 1))
    """
    if len(shape) < 2:
        return 1, math.prod(shape)
    return shape[0], math.prod(shape[1:])


def index_dtype(kept: int, cols: int) -> Dtype:
    """I32 wherever it suffices: half the size, and what scipy prefers."""
    return DTYPES["I32" if max(kept, cols) <= 2**31 - 1 else "I64"]


@dataclass(frozen=True)
class Csr:
    """A sparse tensor as rows; `scipy.sparse.csr_array((data, indices, indptr), matrix_shape)`.

    >>> values, columns = np.array([1.5, 2.5], np.float32), np.array([1, 1], np.int32)
    >>> tensor = Csr(values, columns, np.array([0, 1, 2], np.int32), (2, 2))
    >>> tensor.matrix_shape, tensor.to_dense().tolist()
    ((2, 2), [[0.0, 1.5], [0.0, 2.5]])
    """

    data: NDArray[Any]
    indices: NDArray[Any]
    indptr: NDArray[Any]
    shape: tuple[int, ...]

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """Rows and columns: the first dimension × the rest."""
        return matrix_shape(self.shape)

    def to_dense(self) -> NDArray[Any]:
        """The tensor with zeros; raises InvalidLayout if the indices are not a CSR matrix's."""
        dense = empty_array(self.shape, self.data.dtype)
        words = np.dtype(f"<u{dense.itemsize}")
        flat, values = dense.reshape(-1).view(words), self.data.view(words)
        _expand(self.indptr, self.indices, values, self.matrix_shape[1], flat)
        return dense


def _expand(
    indptr: NDArray[Any],
    indices: NDArray[Any],
    values: NDArray[Any],
    cols: int,
    words: NDArray[Any],
) -> None:
    try:
        _kernels.expand_csr(indptr, indices, values, cols, words)
    except ValueError as error:
        raise InvalidLayout(f"csr: {error}") from None


class CsrEncoder(Encoder):
    """Counts along the rows."""

    def __init__(self, tensor: TensorMask, buffer: Room | None = None) -> None:
        super().__init__(tensor, buffer)
        self.rows, self.cols = matrix_shape(tensor.info.shape)
        if not self.cols and self.rows > MAX_EMPTY_ROWS:
            raise UnsupportedFeature(
                f"{tensor.where}: tensor {self.name!r}: {self.rows} rows without a column; csr "
                f"would store more than {MAX_EMPTY_ROWS} row ends for nothing, use bitmask"
            )
        self.index = index_dtype(tensor.expected, self.cols).numpy

    def encode(self, words: NDArray[Any]) -> list[Piece]:
        row, column = divmod(self.position, self.cols)
        ended, rest = divmod(column + words.size, self.cols)
        before = self.kept
        # Rows are counted from the block's first, so that memory does not grow with rows.
        indptr = self.buffer("indptr", row, ended + 1 + (rest > 0), self.index)
        indices = self.buffer("indices", before, words.size, self.index)
        values = self.buffer("values", before, words.size, words.dtype)
        try:
            place, parts = (column, self.cols, before), (indptr, indices, values)
            kept = csr(words, self.bits, self.level, place, parts)
        except ValueError:
            self.refuse(words)
        start = 1
        if self.position == 0:
            start = indptr[0] = 0
        self.took(words, kept)
        return [
            (part_name("indptr", self.name), indptr[start : ended + 1]),
            (part_name("indices", self.name), indices[:kept]),
            (part_name("values", self.name), values[:kept]),
        ]

    def finish(self) -> list[Piece]:
        super().finish()
        if self.position:
            return []
        ends = self.buffer("indptr", 0, self.rows + 1, self.index)
        ends[:] = 0
        return [(part_name("indptr", self.name), ends)]


class CsrDecoder(Decoder):
    """Whole rows at once where the words hold them, else a stretch of one row."""

    def __init__(self, info: TensorInfo, parts: Mapping[str, Elements]) -> None:
        _, self.cols = matrix_shape(info.shape)
        self._indptr, self._indices, self._values = (
            parts[name] for name in ("indptr", "indices", "values")
        )
        self._column, self._last = 0, -1
        self._done = self._end = 0
        """Kept words before this place, and before the end of the row that was begun."""
        if self._ends(1)[0] != 0:
            raise InvalidLayout("csr: indptr does not begin with 0")

    def decode(self, words: NDArray[Any]) -> None:
        while words.size:
            rows = words.size // self.cols if self._column == 0 else 0
            size = rows * self.cols or min(words.size, self.cols - self._column)
            part, words = words[:size], words[size:]
            if rows:
                self._rows(rows, part)
            else:
                self._stretch(part)

    def _rows(self, rows: int, words: NDArray[Any]) -> None:
        ends = self._ends(rows)
        if ends[-1] - self._done > words.size:
            raise InvalidLayout("csr: more weights in a row than columns")
        indptr = np.empty(rows + 1, ends.dtype)
        indptr[0], indptr[1:] = 0, ends - self._done
        indices, values = self._take(int(indptr[-1]))
        _expand(indptr, indices, values, self.cols, words)

    def _stretch(self, words: NDArray[Any]) -> None:
        if self._column == 0:
            self._end, self._last = int(self._ends(1)[0]), -1
        self._column += words.size
        words[:] = 0
        columns = self._indices.peek(min(self._end - self._done, words.size))
        here = int(np.searchsorted(columns, self._column))
        columns, values = self._take(here)
        places = columns.astype(np.int64)
        if here and (places[0] <= self._last or np.any(places[1:] <= places[:-1])):
            raise InvalidLayout("csr: indices: columns do not rise within a row")
        if here:
            self._last = int(places[-1])
            first = self._column - words.size
            if places[0] < first or places[-1] >= self._column:
                raise InvalidLayout(f"csr: indices: a column is not in 0..{self.cols - 1}")
            words[places - first] = values
        if self._column == self.cols:
            if self._done != self._end:
                raise InvalidLayout(f"csr: indices: a column is not in 0..{self.cols - 1}")
            self._column = 0

    def _ends(self, rows: int) -> NDArray[Any]:
        """Where the next rows end, which is not before the ones before them."""
        ends = self._indptr.take(rows)
        if ends[0] < self._done or np.any(ends[1:] < ends[:-1]):
            raise InvalidLayout("csr: indptr does not rise")
        if ends[-1] - self._done > self._values.left:
            raise InvalidLayout("csr: indptr: more weights than values")
        return ends

    def _take(self, count: int) -> tuple[NDArray[Any], NDArray[Any]]:
        indices, values = self._indices.take(count), self._values.take(count)
        refuse_zeros(values)
        self._done += count
        return indices, values

    def finish(self) -> None:
        while self._indptr.left:  # of rows without columns
            if self._ends(min(self._indptr.left, 1 << 16))[-1] != self._done:
                raise InvalidLayout("csr: weights in rows without columns")
        if self._values.left:
            raise InvalidLayout(f"csr: indptr ends with {self._done}, not with all values")


class CsrLayout(Layout):
    """Three parts: row ends, columns, values."""

    encoder, decoder = CsrEncoder, CsrDecoder

    def parts(self, info: TensorInfo, kept: int) -> list[TensorInfo]:
        rows, cols = matrix_shape(info.shape)
        index = index_dtype(kept, cols)
        return [
            TensorInfo(part_name("indptr", info.name), index, (rows + 1,)),
            TensorInfo(part_name("indices", info.name), index, (kept,)),
            TensorInfo(part_name("values", info.name), info.dtype, (kept,)),
        ]

    def loaded(self, parts: list[NDArray[Any]], shape: tuple[int, ...]) -> Csr:
        indptr, indices, values = parts
        return Csr(values, indices, indptr, shape)
