"""One layer, all levels: masks, values, scales and biases from the moments of its inputs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np

from elsa_converters.calibrate._masks import Budget, admm, counters_of, inverse_of
from elsa_converters.calibrate._model import Array, Layer, Weights
from elsa_converters.calibrate._problem import Problem, state
from elsa_converters.calibrate._statistics import Moments, mixed
from elsa_converters.calibrate._values import best_scales, refit, solve_alone, solve_together
from elsa_converters.calibrate._work import Work
from elsa_format import embed_counters

STEPS = 15
"""Of conjugate gradients between two looks at the scales, at most."""
ROUNDS = 3
"""Of both, where there are scales; else all steps are in one."""
TURNS = 8
"""How often the dense network's share is raised at most, by RAISE, to keep to its bound."""
RAISE = 3.0
SOME = 192
"""Outputs of a layer that say how its error depends on its share."""


@dataclass(frozen=True)
class Settings:
    """What the equations leave open."""

    ridge: float = 0.03
    """Of the mean variance of the inputs: how much the weights are held to where they were."""
    hold: float = 1.5
    """How many times the ridge holds weights that serve all networks."""
    mix: float | None = None
    """How far a level is to undo what earlier layers lost: 1 wholly, 0 not at all.

    None: wholly in networks with convolutions, half-way in others, whose layers mostly add to what
    passes beside them.
    """
    exact: bool = False
    """Whether the dense network keeps its weights, so that only masks are chosen."""
    bound: float = 0.01
    """The most that each layer's outputs in the dense network may differ, of their variance."""
    dense: float = 2.0
    """The weight of the dense network among the levels."""


@dataclass(frozen=True)
class Solution:
    """A layer in all networks."""

    weight: Array
    """In its dtype, with counters; of a layer that is not nested, the original."""
    counters: Array | None
    networks: list[Weights]
    """Those of the levels, then of the dense network."""
    errors: list[float]
    """Of the layer's outputs in each, relative to their variance; none if it is not nested."""


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
    assert settings.mix is not None
    moments = [mixed(one, own, settings.mix, work) for one in moments]
    if not layer.nested:
        return _refit(layer, own, moments, settings)
    problem = state(layer, own, moments, settings.ridge, matters)
    masks = _masks(layer, problem, budgets, work)
    if settings.exact:
        plain = own.weight
    else:
        weight = _together(layer, problem, masks, settings, work)
        plain = problem.leave(weight).astype(layer.dtype)
    counters = counters_of(masks)
    stored = _with_counters(plain, counters, len(masks).bit_length())
    networks, errors = [], []
    for t, one in enumerate(moments):
        dense = t == len(masks)
        mine = stored if dense else np.where(masks[t], stored, stored.dtype.type(0))
        found, scale = problem.enter(mine), None
        if layer.scale and not dense:
            scale = best_scales(found, problem.xx[t], problem.yx[t], work)
            found *= scale
        errors.append(problem.error_of(found, t, work))
        if dense and settings.exact:
            networks.append(replace(own, weight=mine))
        else:
            networks.append(with_bias(layer, own, mine, scale, one))
    return Solution(stored, counters, networks, errors)


def curve(
    layer: Layer,
    own: Weights,
    moments: Moments,
    shares: Sequence[float],
    probe: float,
    settings: Settings,
    work: Work,
    *,
    matters: Array | None = None,
) -> tuple[list[float], Weights]:
    """The layer's error at some shares of its weights, and what it is at one of them.

    The others are asked of some of its outputs, where those matter alike.
    """
    problem = state(layer, own, [moments], settings.ridge, matters)
    every = layer.rows // SOME if matters is None and moments.count else 1
    rows = slice(None, None, max(1, every))
    few = problem if every < 2 else problem.some(rows, moments)
    xx, yx = problem.with_ridge(0)
    inverse, lone = inverse_of(xx, work), Work(1)

    def at(share: float) -> tuple[float, Array]:
        one, right = (problem, yx) if share == probe else (few, yx[:, rows])
        nothing, budget = np.zeros(one.weight.shape, bool), max(1, round(share * one.weight.size))
        mask, start = admm(right, one.weight, nothing, budget, inverse=inverse, work=lone, steps=14)
        weight = solve_alone(xx, right, start, mask, lone)
        return one.error_of(weight, 0, lone), weight

    found = work.map(at, shares)
    plain = problem.leave(found[shares.index(probe)][1]).astype(layer.dtype)
    return [error for error, _ in found], with_bias(layer, own, plain, None, moments)


def with_bias(
    layer: Layer, own: Weights, weight: Array, scale: Array | None, moments: Moments
) -> Weights:
    """The weights with the bias that gives the outputs the means they should have."""
    factor = None if scale is None else scale.reshape(-1)
    if not layer.bias or not moments.count:
        return Weights(weight, own.bias, factor)
    found = np.einsum("grc,gc->gr", weight.astype(np.float64), moments.mean_x)
    if scale is not None:
        found *= scale[..., 0]
    return Weights(weight, (moments.mean_y - found).astype(np.float32).reshape(-1), factor)


def _masks(layer: Layer, problem: Problem, budgets: Sequence[Budget], work: Work) -> list[Array]:
    """The mask of each level."""
    frozen = np.zeros(problem.weight.shape, bool)
    masks = []
    for level, budget in enumerate(budgets):
        xx, yx = problem.with_ridge(level)
        inverse = inverse_of(xx, work)
        frozen, _ = admm(
            yx, problem.weight, frozen, budget, inverse=inverse, work=work, kernel=layer.kernel
        )
        masks.append(frozen)
    return masks


def _together(
    layer: Layer,
    problem: Problem,
    masks: Sequence[Array],
    settings: Settings,
    work: Work,
) -> Array:
    """One tensor for all networks; the dense network's scale is one.

    The dense network's share rises until its outputs are within the bound, or about as near as
    they can be.
    """
    dense = len(masks)
    every = [*(mask.astype(np.float32) for mask in masks), np.ones_like(problem.weight)]
    xx, yx = problem.with_ridge(dense)
    best = solve_alone(xx, yx, problem.weight, every[dense], work)
    bound = max(settings.bound, 1.2 * problem.error_of(best, dense, work))
    shares = [1.0] * dense + [settings.dense]
    one = np.ones((*problem.weight.shape[:2], 1), np.float32)
    ridge = np.float32(settings.hold) * problem.ridge
    scales, weight = [one] * len(every), problem.weight
    rounds, steps = (ROUNDS, STEPS) if layer.scale else (1, ROUNDS * STEPS)
    for turn in range(1, rounds + TURNS):
        weight = solve_together(
            problem.xx,
            problem.yx,
            every,
            [share / sum(shares) for share in shares],
            scales,
            problem.weight,
            ridge,
            weight,
            work,
            steps,
        )
        if layer.scale:
            scales = [
                best_scales(weight * mask, xx, yx, work)
                for mask, xx, yx in zip(every, problem.xx, problem.yx, strict=True)
            ]
        if problem.error_of(weight * scales[dense], dense, work) > bound:
            shares[dense] *= RAISE
        elif turn >= rounds:
            break
    return np.asarray(weight * scales[dense])


def _with_counters(plain: Array, counters: Array, bits: int) -> Array:
    """Weights that carry counters; the smallest number stands for zeros that levels keep."""
    tiny = ml_dtypes.finfo(plain.dtype).smallest_subnormal  # type: ignore[no-untyped-call]
    return embed_counters(np.where((plain == 0) & (counters > 0), tiny, plain), counters, bits)


def _refit(layer: Layer, own: Weights, moments: Sequence[Moments], settings: Settings) -> Solution:
    """A small layer that every level has for itself; the dense network keeps its own."""
    networks = []
    for one in moments[:-1]:
        weight = own.weight
        if one.count:
            weight = refit(one.xx, one.yx, own.weight.astype(np.float64), settings.ridge / 3)
        networks.append(with_bias(layer, own, weight.astype(layer.dtype), None, one))
    return Solution(own.weight, None, [*networks, own], [])
