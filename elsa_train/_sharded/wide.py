"""Counts beyond 32 bits where JAX has no longer integers: two words, high and low."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

WORD = 1 << 32
"""What a word can't count."""


class Wide(NamedTuple):
    """Numbers below 2**64, as arrays of their two words."""

    high: jax.Array
    low: jax.Array


def wide(numbers: Sequence[int]) -> Wide:
    """Split Python's numbers.

    >>> wide([5, (7 << 32) + 1]).high.tolist()
    [0, 7]
    """
    high, low = zip(*(divmod(number, 1 << 32) for number in numbers), strict=True)
    return Wide(jnp.asarray(np.array(high, np.uint32)), jnp.asarray(np.array(low, np.uint32)))


def whole(number: Wide) -> int:
    """Return one number as Python's.

    >>> whole(Wide(jnp.uint32(7), jnp.uint32(1))) == (7 << 32) + 1
    True
    """
    return (int(number.high) << 32) + int(number.low)


def add(a: Wide, b: Wide) -> Wide:
    """Add word by word, with the carry."""
    low = a.low + b.low
    return Wide(a.high + b.high + (low < a.low).astype(jnp.uint32), low)


def subtract(a: Wide, b: Wide) -> Wide:
    """Take a number from one that is not smaller."""
    return Wide(a.high - b.high - (a.low < b.low).astype(jnp.uint32), a.low - b.low)


def at_most(a: Wide, b: Wide) -> jax.Array:
    """Tell where a <= b."""
    return (a.high < b.high) | ((a.high == b.high) & (a.low <= b.low))


def where(test: jax.Array, a: Wide, b: Wide) -> Wide:
    """Choose between two numbers."""
    return Wide(jnp.where(test, a.high, b.high), jnp.where(test, a.low, b.low))


def smaller(a: Wide, b: Wide) -> Wide:
    """Return the smaller of two numbers."""
    return where(at_most(a, b), a, b)


def stack(numbers: Sequence[Wide]) -> Wide:
    """Make one vector of single numbers."""
    return Wide(jnp.stack([n.high for n in numbers]), jnp.stack([n.low for n in numbers]))


def one_word_axes(shape: Sequence[int]) -> int:
    """Return the first axis from which on a word counts all elements.

    >>> one_word_axes((80, 8192, 28672)), one_word_axes((8192, 28672))
    (1, 0)
    """
    first, size = len(shape), 1
    while first and size * shape[first - 1] < WORD:
        first -= 1
        size *= shape[first]
    return first


def count(test: jax.Array) -> Wide:
    """Count what is true, however large the array; over shards, only the sums travel.

    >>> whole(count(jnp.array([True, False, True])))
    2
    """
    first = one_word_axes(test.shape)
    rows = jnp.sum(test, axis=tuple(range(first, test.ndim)), dtype=jnp.uint32)
    if first == 0:
        return Wide(jnp.zeros_like(rows), rows)
    zero = np.uint32(0)
    # Slow for an element each, so only the sums of rows go this way.
    high, low = lax.reduce(
        (jnp.zeros_like(rows), rows), (zero, zero), _add_pairs, tuple(range(first))
    )
    return Wide(high, low)


def _add_pairs(a: Any, b: Any) -> tuple[jax.Array, jax.Array]:
    return tuple(add(Wide(*a), Wide(*b)))  # type: ignore[return-value]
