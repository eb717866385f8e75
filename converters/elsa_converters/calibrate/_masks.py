"""Which weights each level keeps: nested masks of given sizes that lose little of the outputs."""

from collections.abc import Sequence

import numpy as np

from elsa_converters.calibrate._model import Array
from elsa_converters.calibrate._work import Work
from elsa_format.levels import Pattern

Budget = int | Pattern
STEPS = 20


def largest(score: Array, frozen: Array, budget: Budget, kernel: int = 1) -> Array:
    """The mask of the best weights; what is frozen is always in.

    A budget is a number of weights, or a pattern N:M: N of M neighbouring inputs, with the places
    of a convolution's kernel in between.

    >>> largest(np.array([[3.0, 1, 2]]), np.array([[False, True, False]]), 2).tolist()
    [[True, True, False]]
    """
    score = np.where(frozen, np.inf, score)
    if isinstance(budget, Pattern):
        *rows, columns = score.shape
        blocks = score.reshape(-1, columns // kernel // budget.m, budget.m, kernel)
        best = np.argsort(-blocks, axis=2, kind="stable")[:, :, : budget.n]
        chosen = np.zeros(blocks.shape, bool)
        np.put_along_axis(chosen, best, True, axis=2)
        return chosen.reshape(*rows, columns)
    flat = score.reshape(-1)
    mask = np.zeros(flat.size, bool)
    if budget >= flat.size:
        mask[:] = True
    elif budget > 0:
        cut = np.partition(flat, flat.size - budget)[flat.size - budget]
        mask = flat > cut
        ties = np.flatnonzero(flat == cut)  # the first of them, so that it is always the same mask
        mask[ties[: budget - np.count_nonzero(mask)]] = True
    return mask.reshape(score.shape)


def admm(
    yx: Array,
    weight: Array,
    frozen: Array,
    budget: Budget,
    *,
    inverse: Array,
    work: Work,
    kernel: int = 1,
    steps: int = STEPS,
) -> tuple[Array, Array]:
    """A mask of a budget, and weights on it that nearly minimise the error of the outputs.

    Alternating directions, for inputs x of variance one: `inverse` is that of cov(x, x) + 1, `yx`
    cov(y, x). The budget falls to its value over the first half of the steps.
    """
    total = weight.size
    if isinstance(budget, int) and budget >= total:
        return np.ones(weight.shape, bool), weight
    current, gap = weight, np.zeros_like(weight)
    for step in range(1, steps + 1):
        moved = current + gap
        size = budget
        if isinstance(budget, int):
            size = int(budget + (total - budget) * max(0.0, 1 - 2 * step / steps) ** 3)
        mask = largest(np.abs(moved), frozen, size, kernel)
        kept = np.where(mask, moved, np.float32(0))
        gap = moved - kept
        right = yx + (kept - gap)
        current = work.products(right, inverse)
    return mask, kept


def inverse_of(xx: Array, work: Work) -> Array:
    """The inverse of xx + 1, for `admm`."""
    one = np.eye(xx.shape[-1], dtype=np.float32)
    return np.stack(work.map(lambda matrix: np.linalg.inv(matrix + one), list(xx)))


def counters_of(masks: Sequence[Array]) -> Array:
    """The number of the first level that keeps each weight; 0 for the dense network alone.

    >>> counters_of([np.array([True, False, False]), np.array([True, True, False])]).tolist()
    [1, 2, 0]
    """
    counters = np.zeros(masks[0].shape, np.uint8)
    for level, mask in reversed(list(enumerate(masks, 1))):
        counters[mask] = level
    return counters
