"""Bitmasks against compressed-tensors' on a matrix with 90 % zeros."""

from typing import Any

import numpy as np
from internals import _kernels

import elsa_format as elsa
from benchmarks._files import LEVEL, Files, packed_layer
from benchmarks._rows import MIB, Race, Unavailable, row
from benchmarks.load import torch_module

BITS = 2
SIDE = 4096


def compressed_tensors() -> Any:
    """Their compressor, where it is installed."""
    name = "compressed_tensors.compressors.sparse_compressors.sparse_bitmask"
    return torch_module(name).BitmaskTensor


def encode(words: Any, bitmask: Any, values: Any) -> elsa.Bitmask:
    """A level's bitmask and values into fresh memory, as a load makes them."""
    kept = _kernels.compact(words, BITS, LEVEL, bitmask, values)
    return elsa.Bitmask(bitmask, values[:kept].view(np.float32), (SIDE, words.size // SIDE))


def operands(files: Files) -> tuple[Any, Any, Any, int]:
    """The weights that carry counters, their 90 % level, theirs of it, and how many are kept."""
    layer = packed_layer(min(files.size, 128 * MIB)).reshape(SIDE, -1)
    level = elsa.mask_level(layer, BITS, LEVEL)
    dense = torch_module().from_numpy(level)
    theirs = compressed_tensors().from_dense(dense)
    kept = int(np.count_nonzero(level.view(np.uint32)))
    ours = encode(*buffers(layer, kept))
    # A byte of their bitmask is a byte of ours, as rows are a multiple of 8 long.
    same = np.array_equal(theirs.bitmask.numpy().reshape(-1), ours.bitmask)
    values = theirs.compressed.numpy().view(np.uint32)
    if not same or not np.array_equal(values, ours.values.view(np.uint32)):
        raise Unavailable("compressed-tensors gives other bits")
    return layer, dense, theirs, kept


def buffers(layer: Any, kept: int) -> tuple[Any, Any, Any]:
    """The words, and fresh memory for what is kept of them."""
    words = layer.reshape(-1).view(np.uint32)
    return words, np.empty(words.size // 8, np.uint8), np.empty(kept, np.uint32)


@row("encode a level as bitmask + values", "compressed-tensors 0.14.0", target="≥ 5 × faster")
def bitmask_encode(files: Files) -> Race:
    """Ours reads the counters, theirs the zeros; the results are equal to the bit."""
    layer, dense, _, kept = operands(files)
    compressor = compressed_tensors()
    return Race(
        lambda: encode(*buffers(layer, kept)), lambda: compressor.from_dense(dense), layer.nbytes
    )


@row("decode bitmask + values", "compressed-tensors 0.14.0", target="≥ 5 × faster")
def bitmask_decode(files: Files) -> Race:
    """Both to a fresh dense matrix."""
    layer, _, theirs, kept = operands(files)
    ours = encode(*buffers(layer, kept))
    if not np.array_equal(ours.to_dense(), theirs.decompress().numpy()):
        raise Unavailable("compressed-tensors gives other bits")
    return Race(ours.to_dense, theirs.decompress, layer.nbytes)
