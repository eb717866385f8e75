"""Values for given masks: one tensor of weights for all levels, a scale and a bias for each."""

from collections.abc import Callable, Sequence

import numpy as np

from elsa_converters.calibrate._model import Array
from elsa_converters.calibrate._work import Work

SCALES = 0.5, 4.0
"""How far a level's scale goes: beyond, few samples mislead it."""
REST = 1e-8
"""Of what is to be solved, squared, what may be left: more steps change no error."""
_SMALL = np.float32(1e-30)


def error(weight: Array, xx: Array, yx: Array, work: Work) -> float:
    """E|Wx - y|² - E|y|²: what the weights do about the wanted outputs."""
    return float(((work.products(weight, xx) - 2 * yx) * weight).sum(dtype=np.float64))


def solve(
    times: Callable[[Array], Array], right: Array, start: Array, steps: int, rest_at_end: float
) -> Array:
    """Solve times(W) = right by conjugate gradients, all rows at once.

    Ends when the square of what is left of `right` is that part of its own.
    """
    weight, rest = start, right - times(start)
    way, size = rest, np.square(rest).sum(-1, keepdims=True)
    end = float(np.square(right).sum(dtype=np.float64)) * rest_at_end
    for _ in range(steps):
        if float(size.sum(dtype=np.float64)) <= end:
            break
        turned = times(way)
        length = size / np.maximum((way * turned).sum(-1, keepdims=True), _SMALL)
        weight = weight + length * way
        rest = rest - length * turned
        before, size = size, np.square(rest).sum(-1, keepdims=True)
        way = rest + size / np.maximum(before, _SMALL) * way
    return weight


def solve_alone(
    xx: Array,
    yx: Array,
    start: Array,
    mask: Array,
    work: Work,
    steps: int = 12,
    rest_at_end: float = REST,
) -> Array:
    """Minimise E|Wx - y|² over the weights in a mask."""

    def times(weight: Array) -> Array:
        return np.asarray(work.products(weight, xx) * mask)

    return solve(times, yx * mask, start * mask, steps, rest_at_end)


def solve_together(
    xxs: Sequence[Array],
    yxs: Sequence[Array],
    masks: Sequence[Array],
    shares: Sequence[float],
    scales: Sequence[Array],
    near: Array,
    ridge: Array,
    start: Array,
    work: Work,
    steps: int = 15,
    rest_at_end: float = REST,
) -> Array:
    """One tensor W that serves all networks.

    Minimises Σ share · E|scale · (W∘mask) x - y|² + Σ ridge · (W - near)², where the sums are over
    the networks and the columns. Scales have (groups, rows, 1).
    """
    right = ridge[:, None] * near
    for yx, mask, share, scale in zip(yxs, masks, shares, scales, strict=True):
        right += np.float32(share) * scale * (mask * yx)
    factors = [np.float32(share) * s * s for share, s in zip(shares, scales, strict=True)]

    def times(weight: Array) -> Array:
        total = ridge[:, None] * weight
        for xx, mask, factor in zip(xxs, masks, factors, strict=True):
            total += factor * (mask * work.products(weight * mask, xx))
        return np.asarray(total)

    return solve(times, right, start, steps, rest_at_end)


def best_scales(weight: Array, xx: Array, yx: Array, work: Work) -> Array:
    """The factor for each output that brings Wx nearest to y: (groups, rows, 1), float32."""
    with_y = (weight * yx).sum(-1, keepdims=True)
    own = (work.products(weight, xx) * weight).sum(-1, keepdims=True)
    # A little of the weights' own size keeps rows that are nearly zero from any factor.
    own = own + 1e-3 * np.square(weight).mean(-1, keepdims=True)
    return np.asarray(np.clip(with_y / np.maximum(own, _SMALL), *SCALES), np.float32)


def refit(xx: Array, yx: Array, near: Array, ridge: float) -> Array:
    """Small weights of a level's own: least squares with a ridge towards the original ones."""
    size = xx.shape[-1]
    strength = (ridge * np.trace(xx, axis1=1, axis2=2) / size + 1e-9)[:, None, None]
    left = xx.astype(np.float64) + strength * np.eye(size)
    right = yx + strength * near
    return np.linalg.solve(left, right.transpose(0, 2, 1)).transpose(0, 2, 1)
