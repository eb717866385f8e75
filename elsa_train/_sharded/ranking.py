"""The so many largest scores, exactly, wherever they are.

The K-th largest score is found bit by bit on the integer patterns of the scores; of those that
equal it the first are kept, in the order of the whole tensors, wherever these are split. Devices
look at their own shards, slab by slab, and add up counts: a network that fills them leaves no room
for copies of it.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from elsa_train._selection import Leaves, Score, keys
from elsa_train._sharded import wide
from elsa_train._sharded.wide import Wide

PyTree = Any
SLAB = 1 << 16
"""Weights looked at in one go: they stay in the cache."""


class Ranking(NamedTuple):
    """What a selection is compiled for."""

    score: Score
    together: bool
    """Whether all tensors share one budget."""
    shardings: tuple[NamedSharding | None, ...]
    """How the tensors are split, None if nobody knows or they are not."""


def select_largest(
    ranking: Ranking, params: Leaves, grads: Leaves | None, n: Leaves, budgets: Sequence[int]
) -> Leaves:
    """Return masks of the largest scores, as many as the budgets say, split as the weights are."""
    masks: Leaves = _select(ranking, params, grads, n, wide.wide(budgets))
    return masks


@partial(jax.jit, static_argnums=0)
def _select(
    ranking: Ranking, params: Leaves, grads: Leaves | None, n: Leaves, budgets: Wide
) -> Leaves:
    types = jax.eval_shape(partial(keys, ranking.score), params, grads, n)
    shapes = [p.shape for p in params]
    meshes: list[Any] = list({None if s is None else s.mesh for s in ranking.shardings})
    mesh = meshes[0] if len(meshes) == 1 else None
    if mesh is None:  # one device, or arrays of which the compiler alone knows where they are
        specs = [PartitionSpec()] * len(params)  # type: ignore[no-untyped-call]
        masks = _Shards(ranking, shapes, specs, {}, types[0].dtype).select(
            params, grads, n, budgets
        )
        return [
            m if s is None else lax.with_sharding_constraint(m, s)  # type: ignore[no-untyped-call]
            for m, s in zip(masks, ranking.shardings, strict=True)
        ]
    specs = [s.spec for s in ranking.shardings if s is not None]
    shards = _Shards(ranking, shapes, specs, dict(mesh.shape), types[0].dtype)
    everywhere = PartitionSpec()  # type: ignore[no-untyped-call]
    select = jax.shard_map(
        shards.select,
        mesh=mesh,
        in_specs=(specs, grads and specs, specs, everywhere),
        out_specs=specs,
        check_vma=False,  # counts are the same on all devices, which the checker can't see
    )
    found: Leaves = select(params, grads, n, budgets)
    return found


class _Shards:
    """What one device does with its shards of all tensors."""

    def __init__(
        self,
        ranking: Ranking,
        shapes: Sequence[tuple[int, ...]],
        specs: Sequence[Any],
        mesh: dict[str, int],
        dtype: Any,
    ) -> None:
        self.ranking, self.shapes, self.mesh, self.dtype = ranking, shapes, mesh, dtype
        self.leaves = range(len(shapes))
        self.group = [0 if ranking.together else j for j in self.leaves]
        self.split = [[_axes(part) for part in spec] for spec in specs]
        self.first = [wide.one_word_axes(shape) for shape in shapes]
        """Of each tensor, the axes before which number its rows, and the others places in them."""

    def select(self, params: Leaves, grads: Leaves | None, n: Leaves, budgets: Wide) -> Leaves:
        """Keep what is above a threshold, and of what equals it the first so many."""
        self.params, self.grads, self.n = params, grads, n
        group = self.group
        threshold, ties, above = self.threshold(budgets)
        spare = wide.subtract(budgets, self.grouped(above))
        if self.ranking.together:
            spare = _deal(spare, ties)

        def early(j: int, key: jax.Array, at: list[Any], row: jax.Array, place: jax.Array) -> Any:
            """Tell which ties come before a row, or a place in it."""
            before = self.index(j, key, at, self.first[j], key.ndim) < place[j]
            if self.first[j]:
                rows = self.index(j, key, at, 0, self.first[j])
                before = (rows < row[j]) | ((rows == row[j]) & before)
            return (key == threshold[group[j]]) & before

        def search() -> tuple[jax.Array, jax.Array]:
            row = none
            if any(self.first):
                row = _largest(
                    lambda x: wide.at_most(
                        self.count(lambda j, key, at: early(j, key, at, x, none)), spare
                    ),
                    len(none),
                    jnp.uint32,
                )
            place = _largest(
                lambda x: wide.at_most(
                    self.count(lambda j, key, at: early(j, key, at, row, x)), spare
                ),
                len(none),
                jnp.uint32,
            )
            return row, place

        none = jnp.zeros(len(self.leaves), jnp.uint32)
        row, place = lax.cond(jnp.all(wide.at_most(ties, spare)), lambda: (~none, ~none), search)
        kept: Leaves = []
        for j in self.leaves:
            key = self.key(j, lambda x: x)
            at = [0] * key.ndim
            kept.append((key > threshold[group[j]]) | early(j, key, at, row, place))
        return kept

    def threshold(self, budgets: Wide) -> tuple[jax.Array, Wide, Wide]:
        """Find the smallest score of each budget; count its ties and what is above, by tensor."""
        group = np.array(self.group)

        def bit(i: jax.Array, found: tuple[jax.Array, Wide, Wide]) -> tuple[jax.Array, Wide, Wide]:
            x, reached, above = found
            candidate = _set_bit(x, i)
            counts = self.count(lambda j, key, at: key >= candidate[group[j]])
            enough = wide.at_most(budgets, self.grouped(counts))
            each = enough[group]
            return (
                jnp.where(enough, candidate, x),
                wide.where(each, counts, reached),
                wide.where(each, above, counts),
            )

        lowest = jnp.zeros(max(self.group) + 1, self.dtype)
        sizes = wide.wide([math.prod(shape) for shape in self.shapes])
        start = lowest, sizes, wide.wide([0] * len(group))
        threshold, reached, above = lax.fori_loop(0, _bits(self.dtype), bit, start)
        # The last candidate that was too high is the score right above the threshold.
        return threshold, wide.subtract(reached, above), above

    def key(self, j: int, cut: Callable[[Any], Any]) -> jax.Array:
        """Make the keys of some of a tensor."""
        grads = None if self.grads is None else [cut(self.grads[j])]
        (found,) = keys(self.ranking.score, [cut(self.params[j])], grads, [cut(self.n[j])])
        return jnp.asarray(found, self.dtype)

    def count(self, test: Callable[[int, jax.Array, list[Any]], jax.Array]) -> Wide:
        """Count in each tensor, on all devices, where a test holds."""
        own = wide.stack([self.count_own(j, partial(test, j)) for j in self.leaves])
        return _sum_devices(own, list(self.mesh)) if self.mesh else own

    def count_own(self, j: int, test: Callable[[jax.Array, list[Any]], jax.Array]) -> Wide:
        """Count in this device's shard; of equal shards, one device's counts."""
        shape = self.params[j].shape
        nothing = Wide(jnp.uint32(0), jnp.uint32(0))
        axis = int(np.argmax(shape)) if shape else 0
        length = shape[axis] if shape else 1
        step = max(1, min(length, SLAB * length // math.prod(shape)))

        def slab(i: jax.Array, sum: Wide) -> Wide:
            start = jnp.minimum(i * step, length - step)  # the last may overlap the one before
            at: list[Any] = [0] * len(shape)
            if shape:
                at[axis] = start
            key = self.key(j, (lambda x: _slice(x, start, step, axis)) if shape else lambda x: x)
            found = test(key, at)
            if length % step:
                found &= lax.broadcasted_iota(jnp.int32, key.shape, axis) + start >= i * step
            return wide.add(sum, Wide(jnp.uint32(0), jnp.sum(found, dtype=jnp.uint32)))

        counted: Wide = lax.fori_loop(0, -(-length // step), slab, nothing)
        used = {name for names in self.split[j] for name in names}
        for name in self.mesh.keys() - used:
            first = lax.axis_index(name) == 0
            counted = Wide(*(jnp.where(first, word, jnp.uint32(0)) for word in counted))
        return counted

    def index(self, j: int, key: jax.Array, at: list[Any], first: int, stop: int) -> jax.Array:
        """Number weights in the order of some axes of the whole tensor."""
        index, stride = jnp.zeros(key.shape, jnp.uint32), 1
        for axis in reversed(range(first, stop)):
            start = jnp.asarray(at[axis], jnp.uint32)
            if axis < len(self.split[j]) and self.split[j][axis]:
                part = jnp.uint32(0)
                for name in self.split[j][axis]:
                    part = part * self.mesh[name] + lax.axis_index(name).astype(jnp.uint32)
                start += part * jnp.uint32(self.params[j].shape[axis])
            index += (lax.broadcasted_iota(jnp.uint32, key.shape, axis) + start) * jnp.uint32(
                stride
            )
            stride *= self.shapes[j][axis]
        return index

    def grouped(self, counts: Wide) -> Wide:
        """Add up what shares a budget."""
        if not self.ranking.together:
            return counts
        numbers = [Wide(counts.high[j : j + 1], counts.low[j : j + 1]) for j in self.leaves]
        return reduce(wide.add, numbers)


def _slice(x: jax.Array, start: jax.Array, size: int, axis: int) -> jax.Array:
    if x.dtype.itemsize != 2:
        return lax.dynamic_slice_in_dim(x, start, size, axis)
    # As words: a compiler without bfloat16 takes slices of a float32 copy of all of it, in which
    # NaNs change. The barrier keeps the words from being a copy, too, made once before the loop.
    x, start = lax.optimization_barrier((x, start))  # type: ignore[no-untyped-call]
    word = lax.bitcast_convert_type(x, jnp.uint16)
    part = lax.dynamic_slice_in_dim(word, start, size, axis)
    return lax.bitcast_convert_type(part, x.dtype)


def _axes(part: Any) -> tuple[str, ...]:
    return () if part is None else (part,) if isinstance(part, str) else tuple(part)


def _sum_devices(counts: Wide, axes: list[str]) -> Wide:
    """Add up the counts of all devices, in halves of words so that no sum overflows."""
    halves = (counts.low & 0xFFFF, counts.low >> 16, counts.high)
    low, middle, high = lax.psum(halves, axes)  # type: ignore[no-untyped-call]
    return wide.add(Wide(jnp.zeros_like(low), low), Wide(high + (middle >> 16), middle << 16))


def _deal(spare: Wide, ties: Wide) -> Wide:
    """Give what may still be kept of ties to the first tensors that have some."""
    dealt, left = [], Wide(spare.high[0], spare.low[0])
    for high, low in zip(ties.high, ties.low, strict=True):
        dealt.append(wide.smaller(Wide(high, low), left))
        left = wide.subtract(left, dealt[-1])
    return wide.stack(dealt)


def _largest(holds: Callable[[jax.Array], jax.Array], count: int, dtype: Any) -> jax.Array:
    """Find the largest numbers for which something holds that also holds for all smaller ones."""

    def bit(i: jax.Array, x: jax.Array) -> jax.Array:
        candidate = _set_bit(x, i)
        return jnp.where(holds(candidate), candidate, x)

    return jnp.asarray(lax.fori_loop(0, _bits(dtype), bit, jnp.zeros(count, dtype)))


def _bits(dtype: Any) -> int:
    return 8 * int(np.dtype(dtype).itemsize)


def _set_bit(x: jax.Array, i: jax.Array) -> jax.Array:
    """Set bit i, counted from the highest."""
    return x | (jnp.ones((), x.dtype) << (_bits(x.dtype) - 1 - i).astype(x.dtype))
