"""Values for given masks: one tensor of weights for all levels, a scale and a bias for each."""

from collections.abc import Sequence

import numpy as np

from elsa_converters.calibrate._model import Array
from elsa_converters.calibrate._work import Work

SCALES = 0.5, 4.0
"""How far a level's scale goes: beyond, few samples mislead it."""


def _products(weight: Array, xx: Array, work: Work) -> Array:
    return np.stack([work.product(*pair) for pair in zip(weight, xx, strict=True)])


def error(weight: Array, xx: Array, yx: Array, work: Work) -> float:
    """E|Wx - y|² - E|y|²: what the weights do about the wanted outputs."""
    return float(((_products(weight, xx, work) - 2 * yx) * weight).sum(dtype=np.float64))


def solve_alone(
    xx: Array, yx: Array, start: Array, mask: Array, work: Work, steps: int = 12
) -> Array:
    """Minimise E|Wx - y|² over the weights in a mask, by conjugate gradients, all rows at once."""
    weight = np.where(mask, start, np.float32(0))
    rest = (yx - _products(weight, xx, work)) * mask
    way = rest.copy()
    size = np.square(rest).sum(-1, keepdims=True)
    end = float(size.max()) * 1e-10 + 1e-30
    for _ in range(steps):
        if float(size.max()) <= end:
            break
        turned = _products(way, xx, work) * mask
        length = size / np.maximum((way * turned).sum(-1, keepdims=True), np.float32(1e-30))
        weight = weight + length * way
        rest -= length * turned
        new = np.square(rest).sum(-1, keepdims=True)
        way = rest + new / np.maximum(size, np.float32(1e-30)) * way
        size = new
    return np.asarray(weight)


def solve_together(
    xxs: Sequence[Array],
    yxs: Sequence[Array],
    masks: Sequence[Array],
    shares: Sequence[float],
    scales: Sequence[Array],
    start: Array,
    near: Array,
    ridge: Array,
    work: Work,
    steps: int = 15,
) -> Array:
    """One tensor W that serves all networks, by conjugate gradients.

    Minimises Σ share · E|scale · (W∘mask) x - y|² + Σ ridge · (W - near)², where the sums are over
    the networks and the columns. Scales have (groups, rows, 1).
    """
    factors = [np.float32(a) * s * s for a, s in zip(shares, scales, strict=True)]

    def times(weight: Array) -> Array:
        total = ridge[:, None] * weight
        for xx, mask, factor in zip(xxs, masks, factors, strict=True):
            total += factor * (mask * _products(weight * mask, xx, work))
        return np.asarray(total)

    right = ridge[:, None] * near
    for yx, mask, share, scale in zip(yxs, masks, shares, scales, strict=True):
        right = right + np.float32(share) * scale * (mask * yx)
    weight = start
    rest = right - times(weight)
    way = rest.copy()
    size = np.square(rest).sum(-1, keepdims=True)
    end = float(size.max()) * 1e-9
    for _ in range(steps):
        if float(size.max()) <= end:
            break
        turned = times(way)
        length = size / np.maximum((way * turned).sum(-1, keepdims=True), np.float32(1e-30))
        weight = weight + length * way
        rest -= length * turned
        new = np.square(rest).sum(-1, keepdims=True)
        way = rest + new / np.maximum(size, np.float32(1e-30)) * way
        size = new
    return weight


def best_scales(weight: Array, xx: Array, yx: Array, work: Work) -> Array:
    """The factor for each output that brings Wx nearest to y: (groups, rows, 1), float32."""
    with_y = (weight * yx).sum(-1, keepdims=True)
    own = (_products(weight, xx, work) * weight).sum(-1, keepdims=True)
    # A little of the weights' own size keeps rows that are nearly zero from any factor.
    own = own + 1e-3 * np.square(weight).mean(-1, keepdims=True)
    return np.asarray(np.clip(with_y / np.maximum(own, 1e-30), *SCALES), np.float32)


def refit(xx: Array, yx: Array, near: Array, ridge: float) -> Array:
    """Small weights of a level's own: least squares with a ridge towards the original ones."""
    size = xx.shape[-1]
    strength = ridge * np.trace(xx, axis1=1, axis2=2) / size + 1e-9
    left = xx.astype(np.float64) + strength[:, None, None] * np.eye(size)
    right = yx + strength[:, None, None] * near
    return np.linalg.solve(left, right.transpose(0, 2, 1)).transpose(0, 2, 1)
