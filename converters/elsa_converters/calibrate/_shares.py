"""How many weights each layer keeps at each level."""

from collections.abc import Callable, Iterable, Mapping, Sequence
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


def by_magnitude(
    weights: Callable[[], Iterable[tuple[str, Array]]], sparsities: Sequence[Fraction]
) -> Budgets:
    """As many of each layer as are among the largest of all layers; one at least.

    `weights` gives every layer's, in float32, each time it is called: a layer at a time is in
    memory. Their order is that of their bits; it is found by the upper half, then by the lower.
    """
    upper = {
        name: np.bincount(_bits(weight) >> 16, minlength=1 << 15) for name, weight in weights()
    }
    sizes = {name: int(table.sum()) for name, table in upper.items()}
    at_least = np.cumsum(sum(upper.values())[::-1])[::-1]  # type: ignore[index]
    wanted = [kept_count(sparsity, sum(sizes.values())) for sparsity in sparsities]
    bins = [int(np.count_nonzero(at_least >= want)) - 1 for want in wanted]
    lower: list[dict[str, Array]] = [{} for _ in sparsities]
    for name, weight in weights():
        bits = _bits(weight)
        for found, bin in zip(lower, bins, strict=True):
            found[name] = (bits[bits >> 16 == bin] & 0xFFFF).astype(np.uint16)
    budgets: Budgets = []
    for found, bin, want in zip(lower, bins, wanted, strict=True):
        counts = {name: int(table[bin + 1 :].sum()) for name, table in upper.items()}
        cut = np.sort(np.concatenate(list(found.values())))[sum(counts.values()) - want]
        for name, low in found.items():
            counts[name] += int(np.count_nonzero(low > cut))
        for name, low in found.items():  # of equal ones, those of the first layers
            ties = int(np.count_nonzero(low == cut))
            counts[name] += min(ties, want - sum(counts.values()))
        least = budgets[-1] if budgets else dict.fromkeys(counts, 1)
        counts = {name: max(count, least[name]) for name, count in counts.items()}
        _add(counts, want, sizes, least)
        budgets.append(counts)
    return budgets


def _bits(weight: Array) -> Array:
    return weight.reshape(-1).view(np.uint32) & np.uint32(0x7FFFFFFF)


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
    counts: dict[str, int], want: int, sizes: Mapping[str, int], least: Mapping[str, int]
) -> None:
    """Add or take the few weights that rounding left, largest layers first, to have as many."""
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        gap = want - sum(counts.values())
        counts[name] = min(max(counts[name] + gap, least[name]), sizes[name])
