"""How many weights each layer keeps at each level."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from elsa_converters.calibrate._model import Array
from elsa_format.levels import kept_count

GRID = (0.015, 0.03, 0.06, 0.1, 0.18, 0.3, 0.5, 0.75)
"""Shares of a layer's weights at which its error is measured."""
PROBE = 0.1
"""The share of it at which the whole network is asked what the layer's error does to it."""
FLOOR = 0.15
"""Of the uniform share, what each layer has at least."""
_NOTHING = 1e-5
"""The error of a whole layer, on a logarithmic scale."""
_SHARES = np.unique(
    np.concatenate([[0.0], np.geomspace(1e-4, 1, 401), np.linspace(0.001, 1, 1000)])
)

Budgets = list[dict[str, int]]
"""For every level, the number of weights of each layer."""


@dataclass(frozen=True)
class Curve:
    """What a layer's sparsity costs."""

    weights: int
    errors: Sequence[float]
    """Its relative error at each share of GRID."""
    sensitivity: float
    """What the network's outputs lose for each unit of it."""


def uniform(sizes: Mapping[str, int], sparsities: Sequence[Fraction]) -> Budgets:
    """The same share of every layer."""
    return [{name: kept_count(s, size) for name, size in sizes.items()} for s in sparsities]


def by_magnitude(weights: Mapping[str, Array], sparsities: Sequence[Fraction]) -> Budgets:
    """As many of each layer as are among the largest of all layers."""
    total = sum(weight.size for weight in weights.values())
    found: Budgets = []
    for sparsity in sparsities:
        low, high = 0, 0x7F800000  # bit patterns of float32, whose order is that of magnitudes
        while low < high:
            cut = (low + high) // 2
            if _above(weights, cut) > kept_count(sparsity, total):
                low = cut + 1
            else:
                high = cut
        counts = {name: max(1, _above({name: w}, high)) for name, w in weights.items()}
        _add(counts, kept_count(sparsity, total), {n: w.size for n, w in weights.items()})
        found.append(counts)
    return found


def _above(weights: Mapping[str, Array], cut: int) -> int:
    value = np.array([cut], np.uint32).view(np.float32)[0]
    return sum(int(np.count_nonzero(np.abs(w) > value)) for w in weights.values())


def by_cost(curves: Mapping[str, Curve], sparsities: Sequence[Fraction]) -> Budgets:
    """As many of each layer as together cost the network's outputs least.

    Minimises the sum of sensitivity · error(share) over the layers, by one multiplier for all:
    each layer gets the steps of its curve that gain more for a weight than the multiplier.
    """
    sizes = {name: curve.weights for name, curve in curves.items()}
    total = sum(sizes.values())
    gains = {name: _gains(curve) for name, curve in curves.items()}
    budgets: Budgets = []
    for sparsity in sparsities:
        want = kept_count(sparsity, total)
        least = {}
        for name, size in sizes.items():
            floor = max(1, round(FLOOR * float(1 - sparsity) * size))
            least[name] = min(size, max(floor, budgets[-1][name] if budgets else 0))

        def counts(level: float, least: Mapping[str, int] = least) -> dict[str, float]:
            return {
                name: max(_SHARES[np.count_nonzero(gain > level)] * sizes[name], least[name])
                for name, gain in gains.items()
            }

        low, high = -60.0, 40.0
        for _ in range(80):
            middle = (low + high) / 2
            if sum(counts(middle).values()) > want:
                low = middle
            else:
                high = middle
        fewer, more = counts(high), counts(low)
        # Straight pieces of a curve are all or nothing for a multiplier: go part of the way.
        gap = sum(more.values()) - sum(fewer.values())
        part = min(1.0, max(0.0, (want - sum(fewer.values())) / gap)) if gap else 0.0
        chosen = {name: int(fewer[name] + part * (more[name] - fewer[name])) for name in sizes}
        _add(chosen, want, sizes, least)
        budgets.append(chosen)
    return budgets


def _gains(curve: Curve) -> Array:
    """The logarithm of what a weight gains at each step of _SHARES: falling, as hulls are."""
    errors = np.minimum.accumulate([1.0, *np.clip(curve.errors, _NOTHING, 1), _NOTHING])
    known = np.log([1e-3, *GRID, 1.0])
    values = np.exp(np.interp(np.log(np.maximum(_SHARES, 1e-3)), known, np.log(errors)))
    values[-1] = 0
    hull: list[int] = []
    for at in range(len(values)):
        while len(hull) > 1 and _rises(values, hull[-2], hull[-1], at):
            hull.pop()
        hull.append(at)
    lowest = np.interp(_SHARES, _SHARES[hull], values[hull])
    slope = -np.diff(lowest) / np.diff(_SHARES) / curve.weights
    return np.asarray(np.log(np.maximum(curve.sensitivity, 1e-12) * np.maximum(slope, 1e-30)))


def _rises(values: Array, first: int, middle: int, last: int) -> bool:
    """Whether the middle point is not below the line between the others."""
    one = (values[middle] - values[first]) * (_SHARES[last] - _SHARES[first])
    other = (values[last] - values[first]) * (_SHARES[middle] - _SHARES[first])
    return bool(one >= other)


def _add(
    counts: dict[str, int],
    want: int,
    sizes: Mapping[str, int],
    least: Mapping[str, int] | None = None,
) -> None:
    """Add or take the few weights that rounding left, largest layers first, to have as many."""
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        floor = 1 if least is None else least[name]
        gap = want - sum(counts.values())
        counts[name] = min(max(counts[name] + gap, floor), sizes[name])
