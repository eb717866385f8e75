import numpy as np
from numpy.typing import NDArray

from ._pure import Indices, Words

ISA: str

def mask(src: Words, dst: Words, bits: int, level: int) -> int: ...
def count(src: Words, bits: int, out: NDArray[np.int64]) -> None: ...
def compact(
    src: Words, bits: int, level: int, bitmask: NDArray[np.uint8], values: Words
) -> int: ...
def csr(
    src: Words,
    bits: int,
    level: int,
    start: int,
    cols: int,
    kept: int,
    indptr: Indices,
    indices: Indices,
    values: Words,
) -> int: ...
def expand(bitmask: NDArray[np.uint8], values: Words, dst: Words) -> int: ...
def expand_csr(indptr: Indices, indices: Indices, values: Words, cols: int, dst: Words) -> None: ...
def embed(
    src: Words,
    counters: NDArray[np.uint8],
    dst: Words,
    bits: int,
    inf: int,
    levels: int,
    nearest: bool,
) -> int: ...
def find_unpackable(
    src: Words, counters: NDArray[np.uint8] | None, inf: int, levels: int
) -> int: ...
def nest(dense: Words, sparse: Words, level: int, counters: NDArray[np.uint8]) -> int: ...
def histogram(
    src: Words, shift: int, width: int, prefixes: NDArray[np.uint64], out: NDArray[np.uint64]
) -> None: ...
def assign(
    src: Words,
    thresholds: NDArray[np.uint64],
    ties: NDArray[np.int64],
    counters: NDArray[np.uint8],
) -> None: ...
def delivery_memory(n: int, itemsize: int) -> tuple[int, int]: ...
def decode_nested(
    data: NDArray[np.uint8],
    sizes: NDArray[np.int64],
    first: int,
    words: Words,
    mantissa: int,
    bits: int,
    levels: int,
    scratch: NDArray[np.uint8],
) -> bool: ...
def decode_plain(
    data: NDArray[np.uint8], words: Words, mantissa: int, scratch: NDArray[np.uint8]
) -> None: ...
def encode_nested(
    words: Words,
    mantissa: int,
    bits: int,
    levels: int,
    out: NDArray[np.uint8],
    sizes: NDArray[np.int64],
    scratch: NDArray[np.uint8],
) -> int: ...
def encode_plain(
    words: Words, mantissa: int, out: NDArray[np.uint8], scratch: NDArray[np.uint8]
) -> int: ...
