"""One layer, all levels: masks, values, scales and biases from the moments of its inputs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np

from elsa_converters.calibrate._masks import Budget, admm, counters_of, inverse_of
from elsa_converters.calibrate._model import Array, Layer, Weights
from elsa_converters.calibrate._statistics import Moments
from elsa_converters.calibrate._values import best_scales, error, refit, solve_alone, solve_together
from elsa_converters.calibrate._work import Work
from elsa_format import embed_counters


@dataclass(frozen=True)
class Settings:
    """What the equations leave open."""

    ridge: float = 0.03
    """Of the mean variance of the inputs: how much the weights are held to where they were."""
    mix: float = 1.0
    """How far a level is to undo what earlier layers lost: 1 wholly, 0 not at all."""
    dense: float = 1.0
    """The weight of the dense network among the levels."""
    exact: bool = False
    """Whether the dense network keeps its weights, so that only masks are chosen."""
    power: float = 0.5
    offset: float = 0.01
    """A network's share in the values is dense / (its own best error + offset) ** power."""
    rounds: int = 3


@dataclass(frozen=True)
class Solution:
    """A layer in all networks."""

    weight: Array
    """In its dtype, with counters; of a layer that is not nested, the original."""
    counters: Array | None
    networks: list[Weights]
    """Those of the levels, then of the dense network."""
    errors: list[float]
    """Of the layer's outputs in each, relative to their variance."""


@dataclass(frozen=True)
class _Problem:
    """A layer's moments, for inputs of about variance one and rows weighted by what they do."""

    xx: list[Array]
    yx: list[Array]
    variance: list[float]
    """Of the wanted outputs of each network, summed."""
    weight: Array
    """The original one, scaled."""
    ridge: Array
    """(groups, columns)."""
    unit: Array
    """What a scaled weight is divided by."""
    matters: Array
    """The weights of the rows: (groups, rows, 1)."""

    def with_ridge(self, network: int) -> tuple[Array, Array]:
        """Moments with the ridge in them."""
        diagonal = self.ridge[:, None] * np.eye(self.ridge.shape[-1], dtype=np.float32)
        return self.xx[network] + diagonal, self.yx[network] + self.ridge[:, None] * self.weight

    def error_of(self, weight: Array, network: int, work: Work) -> float:
        """The relative error of the outputs."""
        found = error(weight, self.xx[network], self.yx[network], work)
        return max(0.0, 1 + found / self.variance[network])


def solve_layer(
    layer: Layer,
    own: Weights,
    moments: Sequence[Moments],
    budgets: Sequence[Budget],
    settings: Settings,
    work: Work,
    *,
    matters: Array | None = None,
) -> Solution:
    """The layer for every level and the dense network, whose moments come last.

    `matters` says how much each output does, where outputs are known to differ in that.
    """
    if not layer.nested:
        return _refit(layer, own, moments, settings)
    moments = [_known(m, own.weight) for m in moments]
    problem = _scaled(layer, own, moments, settings, matters, work)
    masks, alone = _masks(layer, problem, budgets, work)
    weight = problem.weight
    if not settings.exact:
        weight = _together(layer, problem, masks, alone, settings, work)
    stored = _stored(weight / problem.matters / problem.unit, layer, own, masks, settings)
    return _finished(layer, own, moments, problem, stored, masks, settings, work)


def curve(
    layer: Layer,
    own: Weights,
    moments: Moments,
    shares: Sequence[float],
    settings: Settings,
    work: Work,
    *,
    matters: Array | None = None,
) -> tuple[list[float], list[Weights]]:
    """The layer's error at some shares of its weights, and what it is then."""
    moments = _known(moments, own.weight)
    problem = _scaled(layer, own, [moments], settings, matters, work)
    xx, yx = problem.with_ridge(0)
    inverse = inverse_of(xx, work)
    nothing, alone = np.zeros(own.weight.shape, bool), Work(1)

    def at(share: float) -> tuple[float, Weights]:
        budget = max(1, round(share * own.weight.size))
        mask, start = admm(
            xx, yx, problem.weight, nothing, budget, inverse=inverse, work=alone, steps=14
        )
        weight = solve_alone(xx, yx, start, mask, alone)
        found = problem.error_of(weight, 0, alone)
        plain = (weight / problem.matters / problem.unit).astype(layer.dtype)
        return found, _with_bias(layer, own, plain, None, moments, settings)

    found = work.map(at, shares)
    return [one for one, _ in found], [weights for _, weights in found]


def _known(moments: Moments, weight: Array) -> Moments:
    """The moments; where nothing was seen, those of inputs that are all alike."""
    if moments.count:
        return moments
    groups, _, columns = weight.shape
    alike = np.broadcast_to(np.eye(columns, dtype=np.float32), (groups, columns, columns))
    wanted = weight.astype(np.float32)
    return replace(moments, xx=alike, yx=wanted, yy=np.square(wanted).sum(-1, dtype=np.float64))


def _scaled(
    layer: Layer,
    own: Weights,
    moments: Sequence[Moments],
    settings: Settings,
    matters: Array | None,
    work: Work,
) -> _Problem:
    groups, rows, _ = layer.shape
    weight = own.weight.astype(np.float32)
    rows_matter = np.ones((groups, rows, 1), np.float32)
    if matters is not None:
        rows_matter = matters.reshape(groups, rows, 1).astype(np.float32)
    last = np.diagonal(moments[-1].xx, axis1=1, axis2=2)
    strength = settings.ridge * last.mean(-1, keepdims=True) + np.float32(1e-12)
    unit = np.sqrt(last + strength)[:, None].astype(np.float32)
    scaled = weight * unit * rows_matter
    xxs, yxs, variances = [], [], []
    for one in moments:
        xx = one.xx / unit / unit.transpose(0, 2, 1)
        yx = one.yx / unit * rows_matter
        yy = float((one.yy[..., None] * np.square(rows_matter)).sum())
        if settings.mix != 1:
            mix = settings.mix
            plain = np.stack([work.product(*pair) for pair in zip(scaled, xx, strict=True)])
            cross, square = float((scaled * yx).sum()), float((scaled * plain).sum())
            yy = mix * mix * yy + 2 * mix * (1 - mix) * cross + (1 - mix) ** 2 * square
            yx = mix * yx + (1 - mix) * plain
        xxs.append(xx)
        yxs.append(yx)
        variances.append(float(yy) + 1e-12)
    ridge = (strength / np.square(unit[:, 0])).astype(np.float32)
    return _Problem(xxs, yxs, variances, scaled, ridge, unit, rows_matter)


def _masks(
    layer: Layer, problem: _Problem, budgets: Sequence[Budget], work: Work
) -> tuple[list[Array], list[Array]]:
    """The mask of each level, and the best weights on it that a level alone would have."""
    frozen = np.zeros(problem.weight.shape, bool)
    masks, alone = [], []
    for level, budget in enumerate(budgets):
        xx, yx = problem.with_ridge(level)
        inverse = inverse_of(xx, work)
        mask, start = admm(
            xx, yx, problem.weight, frozen, budget, inverse=inverse, work=work, kernel=layer.kernel
        )
        masks.append(mask)
        alone.append(solve_alone(xx, yx, start, mask, work))
        frozen = mask
    return masks, alone


def _together(
    layer: Layer,
    problem: _Problem,
    masks: Sequence[Array],
    alone: Sequence[Array],
    settings: Settings,
    work: Work,
) -> Array:
    """One tensor for all networks; the dense network's scale is one."""
    every = [*(mask.astype(np.float32) for mask in masks), np.ones_like(problem.weight)]
    best = [problem.error_of(weight, t, work) for t, weight in enumerate(alone)]
    best.append(problem.error_of(problem.weight, len(alone), work))
    shares = [1 / (found + settings.offset) ** settings.power for found in best]
    shares[-1] *= settings.dense
    shares = [share / sum(shares) for share in shares]
    one = np.ones((*problem.weight.shape[:2], 1), np.float32)
    scales, weight = [one] * len(every), problem.weight
    for _ in range(settings.rounds if layer.scale else 1):
        weight = solve_together(
            problem.xx,
            problem.yx,
            every,
            shares,
            scales,
            weight,
            problem.weight,
            problem.ridge,
            work,
            15 if layer.scale else 15 * settings.rounds,
        )
        if layer.scale:
            scales = [
                best_scales(weight * mask, xx, yx, work)
                for mask, xx, yx in zip(every, problem.xx, problem.yx, strict=True)
            ]
    return np.asarray(weight * scales[-1])


def _stored(
    weight: Array, layer: Layer, own: Weights, masks: Sequence[Array], settings: Settings
) -> tuple[Array, Array]:
    """The weight in its dtype with counters in it, and the counters."""
    counters = counters_of(masks)
    plain = own.weight if settings.exact else weight.astype(layer.dtype)
    tiny = ml_dtypes.finfo(layer.dtype).tiny  # type: ignore[no-untyped-call]
    # What is kept has to differ from zero, which stands for what is not.
    plain = np.where((plain == 0) & (counters > 0), tiny, plain)
    bits = len(masks).bit_length()
    return embed_counters(plain.astype(layer.dtype), counters, bits), counters


def _finished(
    layer: Layer,
    own: Weights,
    moments: Sequence[Moments],
    problem: _Problem,
    stored: tuple[Array, Array],
    masks: Sequence[Array],
    settings: Settings,
    work: Work,
) -> Solution:
    """Scales and biases for the weights as they are stored."""
    weight, counters = stored
    zero = weight.dtype.type(0)
    networks, errors = [], []
    for t, one in enumerate(moments):
        dense = t == len(masks)
        mine = weight if dense else np.where(masks[t], weight, zero)
        scaled = mine.astype(np.float32) * problem.unit * problem.matters
        scale = None
        if layer.scale and not dense:
            scale = best_scales(scaled, problem.xx[t], problem.yx[t], work)
            scaled = scaled * scale
        errors.append(problem.error_of(scaled, t, work))
        if dense and settings.exact:
            networks.append(replace(own, weight=mine))
        else:
            networks.append(_with_bias(layer, own, mine, scale, one, settings))
    return Solution(weight, counters, networks, errors)


def _with_bias(
    layer: Layer, own: Weights, weight: Array, scale: Array | None, one: Moments, settings: Settings
) -> Weights:
    """The weights with the bias that gives the outputs the means they should have."""
    factor = None if scale is None else scale.reshape(-1)
    if not layer.bias or not one.count:
        return Weights(weight, own.bias, factor)
    wanted = one.mean_y
    if settings.mix != 1:
        plain = _times_mean(own.weight, one)
        if own.bias is not None:
            plain = plain + own.bias.reshape(plain.shape)
        wanted = settings.mix * wanted + (1 - settings.mix) * plain
    found = _times_mean(weight, one)
    if scale is not None:
        found = found * scale[..., 0]
    return Weights(weight, (wanted - found).astype(np.float32).reshape(-1), factor)


def _times_mean(weight: Array, one: Moments) -> Array:
    return np.asarray(np.einsum("grc,gc->gr", weight.astype(np.float64), one.mean_x))


def _refit(layer: Layer, own: Weights, moments: Sequence[Moments], settings: Settings) -> Solution:
    """A small layer that every level has for itself; the dense network keeps its own."""
    networks, errors = [], []
    for one in moments[:-1]:
        weight = own.weight
        if one.count:
            weight = refit(one.xx, one.yx, own.weight.astype(np.float64), settings.ridge / 3)
        weight = weight.astype(layer.dtype)
        networks.append(_with_bias(layer, own, weight, None, one, settings))
        errors.append(float("nan"))
    return Solution(own.weight, None, [*networks, own], errors)
