"""How a level's nested tensors are stored once extracted: dense, bitmask or CSR (spec §9).

An encoder turns the blocks of one tensor into the bytes of its parts; a part is a tensor of the
level file. The sparse classes are what `load(level, layout=...)` returns.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from elsa_format import _kernels
from elsa_format._dtypes import DTYPES, Dtype
from elsa_format._errors import CountMismatch, InvalidLayout, UnsupportedFeature
from elsa_format._header import TensorInfo
from elsa_format._profile import RESERVED, Profile

Layout = Literal["dense", "bitmask", "csr"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)

MAX_EMPTY_ROWS = 1 << 20
"""Rows without columns cost a file nothing, but row ends in CSR: a kilobyte could ask for 2^60."""

Piece = tuple[str, NDArray[Any]]
"""A part's name and the next of its content."""


def part_name(part: str, name: str) -> str:
    """The stored name of one part of a tensor."""
    return f"{RESERVED}{part}.{name}"


def parts(
    layout: Layout, name: str, dtype: Dtype, shape: tuple[int, ...], kept: int
) -> list[TensorInfo]:
    """The tensors a nested tensor becomes in a layout."""
    if layout == "dense":
        return [TensorInfo(name, dtype, shape)]
    values = TensorInfo(part_name("values", name), dtype, (kept,))
    if layout == "bitmask":
        mask_bytes = -(-math.prod(shape) // 8)
        return [TensorInfo(part_name("bitmask", name), DTYPES["U8"], (mask_bytes,)), values]
    rows, cols = matrix_shape(shape)
    index = index_dtype(kept, cols)
    return [
        TensorInfo(part_name("indptr", name), index, (rows + 1,)),
        TensorInfo(part_name("indices", name), index, (kept,)),
        values,
    ]


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


class Encoder(Protocol):
    """Encodes one nested tensor block by block."""

    def encode(self, words: NDArray[Any]) -> list[Piece]: ...
    def finish(self) -> list[Piece]: ...


@dataclass(frozen=True)
class Nested:
    """One nested tensor at one level, as the profile has it."""

    info: TensorInfo
    bits: int
    level: int
    expected: int
    """How many weights the level keeps."""
    where: str


def nested_at(profile: Profile, info: TensorInfo, level: int, where: str) -> Nested:
    """A nested tensor at a level."""
    return Nested(info, profile.bits, level, profile.nested[info.name][level - 1], where)


class _Kept:
    """The comparison of kept weights with the profile's count."""

    def __init__(self, tensor: Nested) -> None:
        self.tensor, self.expected = tensor, tensor.expected
        self.kept = 0

    def add(self, more: int) -> None:
        self.kept += more
        if self.kept > self.expected:
            self.mismatch("at least ")

    def finish(self) -> None:
        if self.kept != self.expected:
            self.mismatch("")

    def mismatch(self, qualifier: str) -> None:
        raise CountMismatch(
            f"{self.tensor.where}: tensor {self.tensor.info.name!r}: level {self.tensor.level} "
            f"keeps {qualifier}{self.kept} weights, expected {self.expected}"
        )


class LevelMask:
    """Zeroes in place what a level does not keep."""

    def __init__(self, tensor: Nested) -> None:
        self.words, self.bits, self.level = tensor.info.dtype.words, tensor.bits, tensor.level
        self._kept = _Kept(tensor)

    def apply(self, block: NDArray[np.uint8]) -> None:
        """Mask the tensor's next bytes."""
        self.mask(block.view(self.words))

    def mask(self, words: NDArray[Any]) -> None:
        """Mask the tensor's next weights."""
        self._kept.add(_kernels.mask(words, words, self.bits, self.level))

    def finish(self) -> None:
        """Raise CountMismatch unless the profile's number of weights was kept."""
        self._kept.finish()


class NoMask:
    """Leaves a tensor as it is."""

    def apply(self, block: NDArray[np.uint8]) -> None:
        """Do nothing."""

    def finish(self) -> None:
        """Do nothing."""


def mask_of(
    profile: Profile, info: TensorInfo, level: int | None, where: str
) -> LevelMask | NoMask:
    """What a level does to a stored tensor; None is the dense network."""
    if level is None or info.name not in profile.nested:
        return NoMask()
    return LevelMask(nested_at(profile, info, level, where))


Room = Callable[[str, int, int, Any], NDArray[Any]]
"""Memory for a part, the place of its next element, how many there may be, and their dtype.

It may be for fewer if the part has no more."""


class _Scratch:
    """Memory that is reused from block to block."""

    def __init__(self) -> None:
        self._held: dict[str, NDArray[Any]] = {}

    def __call__(self, part: str, start: int, size: int, dtype: Any) -> NDArray[Any]:
        held = self._held.get(part)
        if held is None or held.size < size:
            held = self._held[part] = np.empty(size, dtype)
        return held[:size]


class _SparseEncoder:
    """Where the next parts go, and the count of kept weights."""

    def __init__(self, tensor: Nested, room: Room | None = None) -> None:
        self.name, self.bits, self.level = tensor.info.name, tensor.bits, tensor.level
        self.kept = _Kept(tensor)
        self.position = 0
        self._room = room or _Scratch()

    def room(self, part: str, start: int, size: int, dtype: Any) -> NDArray[Any]:
        return self._room(part_name(part, self.name), start, size, dtype)

    def took(self, words: NDArray[Any], kept: int) -> None:
        self.kept.add(kept)
        self.position += words.size

    def refuse(self, words: NDArray[Any]) -> NoReturn:
        """There was no room for as many as these words keep."""
        self.kept.add(int(_kernels.count(words, self.bits)[1 : self.level + 1].sum()))
        raise AssertionError("room for fewer weights than expected")

    def finish(self) -> list[Piece]:
        self.kept.finish()
        return []


class DenseEncoder:
    """The tensor itself, masked in place."""

    def __init__(self, tensor: Nested) -> None:
        self.name, self._mask = tensor.info.name, LevelMask(tensor)

    def encode(self, words: NDArray[Any]) -> list[Piece]:
        self._mask.mask(words)
        return [(self.name, words)]

    def finish(self) -> list[Piece]:
        self._mask.finish()
        return []


class BitmaskEncoder(_SparseEncoder):
    """One bit per weight, then the kept values."""

    def encode(self, words: NDArray[Any]) -> list[Piece]:
        bitmask = self.room("bitmask", self.position // 8, -(-words.size // 8), np.uint8)
        values = self.room("values", self.kept.kept, words.size, words.dtype)
        try:
            kept = _kernels.compact(words, self.bits, self.level, bitmask, values)
        except ValueError:
            self.refuse(words)
        self.took(words, kept)
        return [
            (part_name("bitmask", self.name), bitmask),
            (part_name("values", self.name), values[:kept]),
        ]


class CsrEncoder(_SparseEncoder):
    """Row ends, column numbers, values."""

    def __init__(self, tensor: Nested, room: Room | None = None) -> None:
        super().__init__(tensor, room)
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
        before = self.kept.kept
        # Rows are counted from the block's first, so that memory does not grow with rows.
        indptr = self.room("indptr", row, ended + 1 + (rest > 0), self.index)
        indices = self.room("indices", before, words.size, self.index)
        values = self.room("values", before, words.size, words.dtype)
        try:
            kept = _kernels.csr(
                words, self.bits, self.level, column, self.cols, before, indptr, indices, values
            )
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
        ends = self.room("indptr", 0, self.rows + 1, self.index)
        ends[:] = 0
        return [(part_name("indptr", self.name), ends)]


def encoder(layout: Layout, tensor: Nested, room: Room | None = None) -> Encoder:
    """The encoder of a layout for one tensor at one level.

    Sparse parts go to the `room`, or to memory that the next block reuses.
    """
    if layout == "dense":
        return DenseEncoder(tensor)
    return BitmaskEncoder(tensor, room) if layout == "bitmask" else CsrEncoder(tensor, room)


def _empty(shape: tuple[int, ...], dtype: "np.dtype[Any]") -> NDArray[Any]:
    try:
        return np.empty(shape, dtype)
    except ValueError as error:
        raise UnsupportedFeature(f"{len(shape)} dimensions: {error}") from None


@dataclass(frozen=True)
class Bitmask:
    """A sparse tensor as one bit per element (least significant first) and the kept values.

    >>> tensor = Bitmask(np.array([0b1010], np.uint8), np.array([1.5, 2.5], np.float32), (2, 2))
    >>> tensor.to_dense().tolist()
    [[0.0, 1.5], [0.0, 2.5]]
    """

    bitmask: NDArray[np.uint8]
    values: NDArray[Any]
    shape: tuple[int, ...]

    def to_dense(self) -> NDArray[Any]:
        """The tensor with zeros; raises InvalidLayout if bits and values disagree."""
        dense = _empty(self.shape, self.values.dtype)
        words = np.dtype(f"<u{dense.itemsize}")
        try:
            used = _kernels.expand(
                self.bitmask, self.values.view(words), dense.reshape(-1).view(words)
            )
        except ValueError as error:
            raise InvalidLayout(f"bitmask: {error}") from None
        if used != self.values.size:
            raise InvalidLayout(f"bitmask: {used} bits set for {self.values.size} values")
        spare = dense.size % 8
        if spare and self.bitmask[-1] >> spare:
            raise InvalidLayout("bitmask: bits are set past the last element")
        return dense


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
        dense = _empty(self.shape, self.data.dtype)
        words = np.dtype(f"<u{dense.itemsize}")
        try:
            _kernels.expand_csr(
                self.indptr,
                self.indices,
                self.data.view(words),
                self.matrix_shape[1],
                dense.reshape(-1).view(words),
            )
        except ValueError as error:
            raise InvalidLayout(f"csr: {error}") from None
        return dense
