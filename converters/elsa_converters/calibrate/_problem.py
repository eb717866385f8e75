"""One layer's moments in all networks, in units in which its weights can be compared."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from elsa_converters.calibrate._model import Array, Layer, Weights
from elsa_converters.calibrate._statistics import Moments
from elsa_converters.calibrate._values import error
from elsa_converters.calibrate._work import Work

PLENTY = 1 / 16
"""So many places for each column are enough for the ridge as it is set; fewer get a larger one."""


@dataclass(frozen=True)
class Problem:
    """min E|Wx - y|² for inputs of variance one, and outputs that together have variance one.

    A weight here is unit · row_unit times the layer's own.
    """

    xx: list[Array]
    """Of every network, the dense one last."""
    yx: list[Array]
    variance: list[float]
    """Of the wanted outputs of each network, summed."""
    weight: Array
    """The original one."""
    ridge: Array
    """How much each column is held to the original weights: (groups, columns)."""
    unit: Array
    """(groups, 1, columns)."""
    row_unit: Array
    """(groups, rows, 1)."""

    def with_ridge(self, network: int) -> tuple[Array, Array]:
        """Moments with the ridge in them."""
        xx = self.xx[network].copy()
        np.einsum("gcc->gc", xx)[...] += self.ridge
        return xx, self.yx[network] + self.ridge[:, None] * self.weight

    def some(self, rows: slice, moments: Moments) -> "Problem":
        """The same for some of the outputs of one network, whose moments are given."""
        size = float((moments.yy[..., None] * np.square(self.row_unit))[:, rows].sum()) + 1e-12
        return replace(
            self,
            yx=[self.yx[0][:, rows]],
            variance=[size],
            weight=self.weight[:, rows],
            row_unit=self.row_unit[:, rows],
        )

    def error_of(self, weight: Array, network: int, work: Work) -> float:
        """The error of the outputs, relative to their variance."""
        found = error(weight, self.xx[network], self.yx[network], work)
        return max(0.0, 1 + found / self.variance[network])

    def enter(self, weight: Array) -> Array:
        """A weight of the layer, in these units."""
        return np.asarray(weight.astype(np.float32) * self.unit * self.row_unit)

    def leave(self, weight: Array) -> Array:
        """A weight of these units, in the layer's own."""
        return np.asarray(weight / self.row_unit / self.unit)


def known(moments: Moments, weight: Array) -> Moments:
    """The moments; where nothing was seen, those of inputs that are all alike."""
    if moments.count:
        return moments
    groups, _, columns = weight.shape
    alike = np.tile(np.eye(columns, dtype=np.float32), (groups, 1, 1))
    wanted = weight.astype(np.float32)
    return replace(moments, xx=alike, yx=wanted, yy=np.square(wanted).sum(-1, dtype=np.float64))


def seen_enough(layer: Layer, moments: Moments) -> bool:
    """Whether a layer has seen what its covariances need."""
    return moments.count >= PLENTY * layer.columns


def state(
    layer: Layer, own: Weights, moments: Sequence[Moments], ridge: float, matters: Array | None
) -> Problem:
    """The problem of a layer whose moments are given, the dense network's last.

    `ridge` is relative to the mean variance of the inputs. `matters` says how much each output
    does, where outputs are known to differ in that. The covariances are scaled in place: only one
    copy of them is in memory.
    """
    last = known(moments[-1], own.weight)
    if last.count:
        ridge *= max(1.0, PLENTY * layer.columns / last.count)
    variances = np.diagonal(last.xx, axis1=1, axis2=2)
    strength = ridge * variances.mean(-1, keepdims=True) + np.float32(1e-12)
    unit = np.sqrt(variances + strength)[:, None].astype(np.float32)
    rows = np.ones((layer.groups, layer.rows, 1))
    if matters is not None:
        rows *= matters.reshape(rows.shape)
    size = float((last.yy[..., None] * np.square(rows)).sum())
    row_unit = (rows / np.sqrt(size + 1e-30)).astype(np.float32)
    xxs, yxs, variance = [], [], []
    for one in (known(each, own.weight) for each in moments):
        xxs.append(_divide(_divide(one.xx, unit), unit.transpose(0, 2, 1)))
        yxs.append(_divide(_divide(one.yx, unit), 1 / row_unit))
        variance.append(float((one.yy[..., None] * np.square(row_unit)).sum()) + 1e-12)
    weight = own.weight.astype(np.float32) * unit * row_unit
    shrunk = (strength / np.square(unit[:, 0])).astype(np.float32)
    return Problem(xxs, yxs, variance, weight, shrunk, unit, row_unit)


def _divide(one: Array, other: Array) -> Array:
    return np.asarray(np.divide(one, other, out=one))
