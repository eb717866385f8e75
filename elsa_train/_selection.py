"""The so many largest scores of whole tensors, exactly, for all levels in one search.

Tensors are put together as one vector of integers in the order of their scores. The K-th largest is
found without a sort: by counting what reaches a number, bit by bit; on a CPU, which counts into
tables faster than it compares, by the upper and then the lower half of the integers. Of those that
equal it the first are kept. What is split over devices, or too large to be copied, is ranked by
`_sharded.ranking`, which keeps the same.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from elsa_train._method import UNSIGNED

PyTree = Any
Leaves = list[Any]
Score = Callable[[PyTree, PyTree], PyTree]
WHOLE = 1 << 28
"""Weights that are ranked as one vector."""
BLOCK = 1 << 16
"""Numbers that half a word holds, and weights whose ties are counted together."""


class Whole(NamedTuple):
    """What a ranking is compiled for."""

    score: Score
    shardings: tuple[NamedSharding | None, ...]
    """Where the results are to be: with their weights. None leaves it to the compiler."""


class Cut(NamedTuple):
    """Where each level's budget ends: a score, how many are above it, and how many reach it."""

    score: jax.Array
    above: jax.Array
    reached: jax.Array


def fits(leaves: Sequence[Any], shardings: Sequence[NamedSharding | None]) -> bool:
    """Tell whether tensors can be ranked as one vector on each device."""
    unsplit = all(s is None or s.is_fully_replicated for s in shardings)
    return unsplit and sum(leaf.size for leaf in leaves) <= WHOLE


def keys(score: Score, params: Leaves, grads: Leaves | None, n: Leaves) -> Leaves:
    """Map |scores| to integers in the same order, frozen weights above all, NaN just below."""
    scores = score(params, grads)
    dtype = jnp.result_type(*scores)
    word = np.dtype(UNSIGNED[np.dtype(dtype).itemsize])
    frozen = word.type(np.iinfo(word).max)

    def key(score: jax.Array, n: jax.Array) -> jax.Array:
        bits = lax.bitcast_convert_type(score.astype(dtype), word)
        return jnp.where(n > 0, frozen, bits & (frozen >> 1))

    return [key(*pair) for pair in zip(scores, n, strict=True)]


@partial(jax.jit, static_argnums=0)
def rank_whole(
    request: Whole, params: Leaves, grads: Leaves | None, n: Leaves, budgets: jax.Array
) -> Leaves:
    """Return the first level whose budget covers a weight's rank, 0 if none does.

    Budgets are of one group of tensors and don't fall from level to level.
    """
    found = keys(request.score, params, grads, n)
    flat = jnp.concatenate([key.reshape(-1) for key in found])
    budgets = jnp.minimum(budgets, np.uint32(flat.size))
    if flat.dtype.itemsize > 4:
        cut = cut_by_bits(flat, budgets)
    else:
        cut = lax.platform_dependent(flat, budgets, cpu=cut_by_tables, default=cut_by_bits)
    spare = budgets - cut.above
    ends = lax.cond(
        jnp.all(cut.reached - cut.above <= spare),
        lambda: jnp.full_like(budgets, flat.size),
        lambda: _ends(flat, cut.score, spare),
    )
    ranks, start = [], 0
    for key, sharding in zip(found, request.shardings, strict=True):
        index = start + lax.iota(jnp.uint32, key.size).reshape(key.shape)
        start += key.size
        having = jnp.zeros(key.shape, jnp.uint8)
        for t in range(len(budgets)):
            tied = (key == cut.score[t]) & (index < ends[t])
            having += ((key > cut.score[t]) | tied).astype(jnp.uint8)
        rank = jnp.where(having == 0, 0, jnp.uint8(len(budgets) + 1) - having).astype(jnp.uint8)
        if sharding is not None:
            rank = lax.with_sharding_constraint(rank, sharding)  # type: ignore[no-untyped-call]
        ranks.append(rank)
    return ranks


def cut_by_bits(flat: jax.Array, budgets: jax.Array) -> Cut:
    """Find the cuts a bit at a time, from the highest: a pass over all for each."""
    word = np.dtype(flat.dtype).type
    bits = 8 * flat.dtype.itemsize

    def count(test: jax.Array) -> jax.Array:
        return jnp.sum(test, axis=1, dtype=jnp.uint32)

    def bit(i: jax.Array, score: jax.Array) -> jax.Array:
        higher = score | (word(1) << (bits - 1 - i).astype(flat.dtype))
        return jnp.where(count(flat[None] >= higher[:, None]) >= budgets, higher, score)

    score = lax.fori_loop(0, bits, bit, jnp.zeros(budgets.shape, flat.dtype))
    return Cut(score, count(flat[None] > score[:, None]), count(flat[None] >= score[:, None]))


def cut_by_tables(flat: jax.Array, budgets: jax.Array) -> Cut:
    """Find the cuts by counting how often each half of a word occurs: two passes over all."""
    halves = flat.dtype.itemsize // 2
    high = (flat >> (16 * (halves - 1))).astype(jnp.int32)
    upper = _cuts(_table(high, BLOCK)[None], budgets)
    if halves == 1:
        return Cut(upper.score.astype(flat.dtype), upper.above, upper.reached)
    # Weights of the halves just found are told apart; all others are counted in a last table.
    last = len(budgets)
    numbers = jnp.full(BLOCK, last, jnp.int32).at[upper.score].min(jnp.arange(last, dtype="int32"))
    low = (flat & (BLOCK - 1)).astype(jnp.int32)
    tables = _table(numbers[high] * BLOCK + low, (last + 1) * BLOCK).reshape(-1, BLOCK)
    lower = _cuts(tables[numbers[upper.score]], budgets - upper.above)
    score = (upper.score.astype(flat.dtype) << 16) | lower.score.astype(flat.dtype)
    return Cut(score, upper.above + lower.above, upper.above + lower.reached)


def _table(numbers: jax.Array, size: int) -> jax.Array:
    table = jnp.zeros(size, jnp.uint32)
    return table.at[numbers].add(np.uint32(1), mode="promise_in_bounds")


def _cuts(tables: jax.Array, budgets: jax.Array) -> Cut:
    """Find in each table, or the only one, the largest number that so many reach."""
    reached = jnp.cumsum(tables[:, ::-1], axis=1, dtype=jnp.uint32)[:, ::-1]
    score = jnp.sum(reached >= budgets[:, None], axis=1, dtype=jnp.int32) - 1
    own = lax.iota(jnp.int32, len(budgets)) % len(tables)
    found = reached[own, score]
    return Cut(score, found - tables[own, score], found)


def _ends(flat: jax.Array, scores: jax.Array, spare: jax.Array) -> jax.Array:
    """Return for each level before which place so many weights have its score."""
    blocks = jnp.pad(flat, (0, -flat.size % BLOCK)).reshape(-1, BLOCK)

    def end(each: tuple[jax.Array, jax.Array]) -> jax.Array:
        score, wanted = each
        before = jnp.cumsum(jnp.sum(blocks == score, axis=1, dtype=jnp.uint32), dtype=jnp.uint32)
        block = jnp.sum(before < wanted, dtype=jnp.int32)
        left = wanted - jnp.where(block > 0, before[block - 1], np.uint32(0))
        tied = jnp.cumsum(blocks[block] == score, dtype=jnp.uint32)
        place = jnp.sum(tied < left, dtype=jnp.uint32)
        return jnp.where(wanted == 0, 0, block.astype(jnp.uint32) * BLOCK + place + 1)

    return jnp.asarray(lax.map(end, (scores, spare)))
