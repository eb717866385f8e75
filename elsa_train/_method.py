"""The primitives of Algorithms 1 and 2, as pure functions over pytrees.

Notation of the paper: theta the weights, N the counters, M = (N = 0) the learnable weights. Here
N holds what the file holds: t for a weight frozen at freeze step t, 0 for one that is not (the
paper's N counts these on to T+1). All tests and changes of frozen weights are on bit patterns,
since XLA flushes denormals in float arithmetic.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from elsa_train._sharded import wide
from elsa_train._sharded.wide import Wide

PyTree = Any
Rounding = Literal["nearest", "overwrite"]
UNSIGNED = {2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}


def _words(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, UNSIGNED[x.dtype.itemsize])


def _constants(dtype: Any) -> tuple[Any, Any, Any]:
    """Return sign bit, +Inf and the smallest normal number of a float type, as words."""
    word = np.dtype(UNSIGNED[np.dtype(dtype).itemsize])
    info = jnp.finfo(dtype)  # type: ignore[no-untyped-call]
    sign = word.type(1 << (info.bits - 1))
    inf = np.asarray(np.inf, dtype).view(word)[()]
    tiny = np.asarray(info.smallest_normal, dtype).view(word)[()]
    return sign, inf, tiny


def is_nonzero(x: jax.Array) -> jax.Array:
    """Tell where any bit but the sign is set."""
    sign, _, _ = _constants(x.dtype)
    nonzero: jax.Array = (_words(x) & ~sign) != 0
    return nonzero


def same_bits(a: jax.Array, b: jax.Array) -> jax.Array:
    """Compare element by element, as bit patterns."""
    return _words(a) == _words(b)


def counters(params: PyTree) -> PyTree:
    """N(0): nothing is frozen yet. Counters lie where their weights do.

    >>> counters({"kernel": jnp.array([0.5, -2.0])})["kernel"].tolist()
    [0, 0]
    """
    return jax.tree.map(lambda p: jnp.zeros_like(p, jnp.uint8), params)


def learnable(n: PyTree) -> PyTree:
    """M: 1 where a weight may still change.

    >>> learnable({"kernel": jnp.array([0, 1, 2])})["kernel"].tolist()
    [True, False, False]
    """
    return jax.tree.map(lambda n: n == 0, n)


def embed(
    weights: jax.Array, n: jax.Array | int, bits: int, rounding: Rounding = "nearest"
) -> jax.Array:
    """Write counters into the low bits of the weights (spec: embedding a counter).

    >>> stamped = embed(jnp.array([0.5, -2.0]), jnp.array([1, 3]), bits=2)
    >>> (_words(stamped) & 3).tolist()
    [1, 3]
    """
    sign, inf, _ = _constants(weights.dtype)
    word = _words(weights)
    one = word.dtype.type(1)
    step, half = one << bits, one << (bits - 1)
    c = jnp.asarray(n, word.dtype)
    magnitude = word & ~sign
    low = magnitude & (step - one)
    q = magnitude - low + c
    if rounding == "nearest":
        down = (c >= low + half) & (q >= step)
        up = (low > c + half) & (q + step < inf)
        q = jnp.where(down, q - step, jnp.where(up, q + step, q))
    return lax.bitcast_convert_type((word & sign) | q, weights.dtype)


def flush(weights: jax.Array, bits: int) -> jax.Array:
    """Turn -0, denormals and what a counter could make denormal into +0."""
    sign, _, tiny = _constants(weights.dtype)
    small = (_words(weights) & ~sign) < tiny + tiny.dtype.type(1 << bits)
    return jnp.where(small, jnp.zeros_like(weights), weights)


def freeze(
    params: PyTree,
    n: PyTree,
    t: int | jax.Array,
    *,
    bits: int,
    dtype: Any = None,
    rounding: Rounding = "nearest",
) -> tuple[PyTree, PyTree]:
    """Freeze what is non-zero: M <- M * 1(theta = 0), and write t into the bits just frozen.

    `dtype` is the type the weights will be stored in, if not their own: the frozen values are exact
    in it. Earlier frozen weights keep every bit.

    >>> params = {"kernel": jnp.array([0.0, -2.0, 3.0])}
    >>> params, n = freeze(params, counters(params), t=1, bits=2)
    >>> n["kernel"].tolist()
    [0, 1, 1]
    """

    def leaf(p: jax.Array, n: jax.Array) -> tuple[jax.Array, jax.Array]:
        stored = flush(p.astype(dtype or p.dtype), bits)
        free = n == 0
        new = free & is_nonzero(stored)
        stamped = embed(stored, jnp.asarray(t), bits, rounding).astype(p.dtype)
        theta = jnp.where(new, stamped, jnp.where(free, jnp.zeros_like(p), p))
        return theta, jnp.where(new, jnp.asarray(t, n.dtype), n)

    return _transpose(params, jax.tree.map(leaf, params, n))


def finish(
    params: PyTree, n: PyTree, *, bits: int, dtype: Any = None, rounding: Rounding = "nearest"
) -> PyTree:
    """Write 0 into the low bits of the weights that no level has: they are dense only.

    >>> done = finish({"kernel": jnp.array([0.1, -2.0])}, {"kernel": jnp.array([0, 1])}, bits=2)
    >>> (_words(done["kernel"])[0] & 3).item()
    0
    """

    def leaf(p: jax.Array, n: jax.Array) -> jax.Array:
        stored = flush(p.astype(dtype or p.dtype), bits)
        return jnp.where(n == 0, embed(stored, 0, bits, rounding).astype(p.dtype), p)

    return jax.tree.map(leaf, params, n)


def sparse(params: PyTree, n: PyTree, t: int | jax.Array) -> PyTree:
    """theta_sparse(t) = 1(0 < N <= t) * theta, bits untouched (equation 1).

    >>> params, n = {"kernel": jnp.array([0.5, -2.0, 3.0])}, {"kernel": jnp.array([0, 2, 1])}
    >>> sparse(params, n, t=1)["kernel"].tolist()
    [0.0, 0.0, 3.0]
    """
    return jax.tree.map(lambda p, n: jnp.where((n > 0) & (n <= t), p, jnp.zeros_like(p)), params, n)


def revive(params: PyTree, fresh: PyTree, n: PyTree) -> PyTree:
    """Draw learnable weights that are exactly zero anew, from another initial network.

    Behind a channel that is silent for good, with nothing kept and a frozen negative bias, no
    gradient would ever move them.

    >>> params, n = {"kernel": jnp.array([0.0, -2.0, 0.0])}, {"kernel": jnp.array([0, 0, 1])}
    >>> revive(params, {"kernel": jnp.array([5.0, 6.0, 7.0])}, n)["kernel"].tolist()
    [5.0, -2.0, 0.0]
    """

    def leaf(p: jax.Array, new: jax.Array, n: jax.Array) -> jax.Array:
        return jnp.where((n == 0) & ~is_nonzero(p), new, p)

    return jax.tree.map(leaf, params, fresh, n)


def apply_updates(params: PyTree, updates: PyTree, n: PyTree) -> PyTree:
    """Add updates to learnable weights; frozen ones are selected, not computed.

    >>> params, n = {"kernel": jnp.array([0.5, -2.0])}, {"kernel": jnp.array([0, 1])}
    >>> apply_updates(params, {"kernel": jnp.array([1.0, 1.0])}, n)["kernel"].tolist()
    [1.5, -2.0]
    """
    return jax.tree.map(
        lambda p, u, n: jnp.where(n == 0, (p + u).astype(p.dtype), p), params, updates, n
    )


def keep_frozen(params: PyTree, frozen: PyTree, n: PyTree) -> PyTree:
    """Take learnable weights from one network and frozen ones, bit by bit, from another.

    Averages of weights, such as those of a schedule-free optimizer, are off by a rounding where all
    that was averaged is the same.

    >>> params, n = {"kernel": jnp.array([0.5, -2.0])}, {"kernel": jnp.array([0, 1])}
    >>> keep_frozen({"kernel": jnp.array([0.25, -2.25])}, params, n)["kernel"].tolist()
    [0.25, -2.0]

    Args:
        params: Weights of which the learnable ones are taken.
        frozen: Weights of which the frozen ones are taken.
        n: The counters.

    Returns:
        The parameters, as a tree like both.
    """
    return jax.tree.map(lambda new, old, n: jnp.where(n == 0, new, old), params, frozen, n)


class FreezeState(NamedTuple):
    """The transform keeps nothing: the counters come with each update."""


def freeze_updates() -> optax.GradientTransformationExtraArgs:
    """Zero the updates of frozen weights: the last link of an optax chain.

    It stands after momentum and weight decay, both of which would move frozen weights if only the
    gradients were masked. Call `update(..., counters=N)`.

    >>> optimizer = optax.chain(optax.adamw(1e-3), freeze_updates())
    >>> params, n = {"kernel": jnp.array([0.5, -2.0])}, {"kernel": jnp.array([0, 1])}
    >>> updates, _ = optimizer.update(params, optimizer.init(params), params, counters=n)
    >>> (updates["kernel"] == 0).tolist()
    [False, True]
    """

    def init(params: PyTree) -> FreezeState:
        del params
        return FreezeState()

    def update(
        updates: PyTree, state: FreezeState, params: PyTree = None, *, counters: PyTree, **_: Any
    ) -> tuple[PyTree, FreezeState]:
        del params
        # where, not a product: 0 * inf is NaN.
        masked = jax.tree.map(
            lambda u, n: jnp.where(n == 0, u, jnp.zeros_like(u)), updates, counters
        )
        return masked, state

    return optax.GradientTransformationExtraArgs(init, update)


@jax.jit
def frozen_unchanged(before: PyTree, after: PyTree, n: PyTree) -> jax.Array:
    """Tell whether every frozen weight has the same bits before and after."""
    same = jax.tree.map(lambda a, b, n: jnp.all((n == 0) | same_bits(a, b)), before, after, n)
    return jnp.all(jnp.stack(jax.tree.leaves(same)))


@jax.jit
def count_nonzero(params: PyTree) -> list[Wide]:
    """Count the non-zero weights of each leaf."""
    return [wide.count(is_nonzero(p)) for p in jax.tree.leaves(params)]


@jax.jit
def count_frozen(counters: PyTree) -> list[Wide]:
    """Count the frozen weights of each leaf."""
    return [wide.count(n > 0) for n in jax.tree.leaves(counters)]


@jax.jit
def all_finite(tree: PyTree) -> jax.Array:
    """Tell whether no leaf holds Inf or NaN."""
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(tree)]))


def _transpose(like: PyTree, pairs: PyTree) -> tuple[PyTree, PyTree]:
    outer = jax.tree.structure(like)
    first, second = jax.tree.transpose(outer, jax.tree.structure((0, 0)), pairs)
    return first, second
