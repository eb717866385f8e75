"""Which layers are to skip the zeros of their weights."""

from fractions import Fraction

from elsa_format import InfeasibleLevels, InvalidOption
from elsa_format.levels import Sparsity, zeros_of

Fast = bool | Sparsity
"""True: the layers that are faster here; else those of at least this sparsity, or none."""
SPARSITY = 0.7
"""Zeros from which layers are usually faster; it is one of those that are measured."""
WORTH = 0.98
"""Of the dense network's time; what is not faster than this stays dense."""


def check_fast(fast: Fast) -> bool | Fraction:
    """True (measure), False, or the fraction of zeros from which layers are computed sparsely."""
    if isinstance(fast, bool):
        return fast
    try:
        return zeros_of(fast)
    except InfeasibleLevels as error:
        raise InvalidOption(
            f"fast={fast!r}: expected True, False, or a sparsity: {error}"
        ) from None
