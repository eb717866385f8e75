"""The columns that a layer multiplies: the patches of a convolution, the rows of a matrix."""

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elsa_converters.onnx._calibrate.layers import Product

Array = NDArray[Any]
DEPTHWISE = 4
"""A channel by itself has so few weights that it needs only one of so many places."""


def columns(product: Product, x: Array, most: int, seed: int, seen: Array | None = None) -> Array:
    """Columns (places, groups, columns) in float32, at most so many of them.

    The places depend on the shape, the layer's name and the seed alone. `seen` is zero where the
    inputs are padding: (samples, positions).
    """
    if product.depthwise:
        most = -(-most // DEPTHWISE)
    if product.conv:
        return _patches(product, x, most, seed)
    if product.attributes.get("transA", 0):
        x = x.T
    rows = x.reshape(-1, x.shape[-1])
    if seen is not None and x.ndim > 2 and x.shape[:2] == seen.shape:
        each = len(rows) // seen.size
        rows = rows[np.flatnonzero(np.repeat(seen.reshape(-1) != 0, each))]
    chosen = rows[places(len(rows), most, product.weight.name, seed)].astype(np.float32)
    alpha = product.attributes.get("alpha", 1.0)
    return (chosen if alpha == 1 else chosen * np.float32(alpha))[:, None]


def places(count: int, most: int, name: str, seed: int) -> NDArray[np.intp]:
    """Some of so many places, in order: one drawn from each of as many stretches of equal length.

    >>> places(3, 5, "w", 0).tolist()
    [0, 1, 2]
    >>> len(places(100, 5, "w", 0))
    5
    """
    if count <= most:
        return np.arange(count)
    rng = np.random.default_rng([zlib.crc32(name.encode()), seed])
    found = (np.arange(most) + rng.random(most)) * (count / most)
    return np.minimum(found.astype(np.intp), count - 1)


def _patches(product: Product, x: Array, most: int, seed: int) -> Array:
    kernel = product.shape[2:]
    sides = len(kernel)
    ones = [1] * sides
    strides = product.attributes.get("strides", ones)
    dilations = product.attributes.get("dilations", ones)
    before, after = padding(product, x.shape[2:])
    padded = [size + a + b for size, a, b in zip(x.shape[2:], before, after, strict=True)]
    out = [
        (size - (k - 1) * d - 1) // s + 1
        for size, k, d, s in zip(padded, kernel, dilations, strides, strict=True)
    ]
    # Channels last, so that each place of a patch is a copy of neighbours.
    turned = np.zeros((x.shape[0], *padded, x.shape[1]), np.float32)
    inner = tuple(slice(a, a + size) for a, size in zip(before, x.shape[2:], strict=True))
    turned[(slice(None), *inner)] = np.moveaxis(x, 1, -1)
    flat = turned.reshape(-1, x.shape[1])
    count = x.shape[0] * int(np.prod(out))
    sample, *at = np.unravel_index(
        places(count, most, product.weight.name, seed), (x.shape[0], *out)
    )
    corner = [place * stride for place, stride in zip(at, strides, strict=True)]
    first = np.ravel_multi_index([sample, *corner], (x.shape[0], *padded))
    found = np.empty((product.kernel, len(first), x.shape[1]), np.float32)
    for one, offset in zip(found, np.ndindex(*kernel), strict=True):
        steps = [o * d for o, d in zip(offset, dilations, strict=True)]
        flat.take(first + np.ravel_multi_index([0, *steps], (1, *padded)), axis=0, out=one)
    by_group = found.reshape(product.kernel, len(first), product.groups, -1).transpose(2, 1, 3, 0)
    return by_group.reshape(product.groups, len(first), -1).transpose(1, 0, 2)


def padding(product: Product, sizes: Sequence[int]) -> tuple[list[int], list[int]]:
    """What a convolution pads its inputs with, before and after each side."""
    kernel, values = product.shape[2:], product.attributes
    sides = len(kernel)
    kind = values.get("auto_pad", b"NOTSET")
    if kind == b"VALID":
        return [0] * sides, [0] * sides
    if kind in (b"SAME_UPPER", b"SAME_LOWER"):
        strides, dilations = (
            values.get("strides", [1] * sides),
            values.get("dilations", [1] * sides),
        )
        total = [
            max(0, (-(-size // stride) - 1) * stride + (k - 1) * dilation + 1 - size)
            for size, stride, k, dilation in zip(sizes, strides, kernel, dilations, strict=True)
        ]
        less, more = [one // 2 for one in total], [one - one // 2 for one in total]
        return (less, more) if kind == b"SAME_UPPER" else (more, less)
    pads = list(values.get("pads", [0] * 2 * sides))
    return pads[:sides], pads[sides:]
