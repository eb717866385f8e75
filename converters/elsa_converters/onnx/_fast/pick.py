"""Choose the layers that sparse operators compute: by their sparsity, or by timing them."""

from collections.abc import Mapping, Sequence
from fractions import Fraction

from onnx import ModelProto

from elsa_converters._errors import MissingOperators
from elsa_converters.onnx._fast.layers import Layer
from elsa_converters.onnx._fast.rewrite import prepare, use_sparse
from elsa_converters.onnx._fast.timing import example_inputs, new_session, shortest_times
from elsa_converters.onnx._graph.walk import Arrays
from elsa_converters.sparse import find_library
from elsa_format import InfeasibleLevels, InvalidOption
from elsa_format.levels import Sparsity, zeros_of

Fast = bool | Sparsity
"""True: the layers that are faster here; else those of at least this sparsity, or none."""
SPARSITY = 0.7
"""Zeros from which layers are usually faster; it is one of those that are measured."""
THRESHOLDS = (0.3, 0.5, SPARSITY, 0.85)
"""Sparsities from which layers are tried: more of them may win, even where they gain little."""
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


def accelerate(
    proto: ModelProto,
    arrays: Arrays,
    where: str,
    fast: bool | Fraction,
    *,
    threads: int | None = None,
    sizes: Mapping[str, int] | None = None,
) -> tuple[ModelProto, Arrays, tuple[int, int]]:
    """A model whose layers sparse operators compute, its tensors, and how many layers of how many.

    Changes its arguments.
    """
    layers = prepare(proto, arrays, where)
    picked = pick_layers(proto, arrays, layers, fast, threads=threads, sizes=sizes, where=where)
    return *use_sparse(proto, arrays, picked), (len(picked), len(layers))


def pick_layers(
    proto: ModelProto,
    arrays: Arrays,
    layers: Sequence[Layer],
    fast: bool | Fraction,
    *,
    threads: int | None = None,
    sizes: Mapping[str, int] | None = None,
    where: str = "",
) -> list[Layer]:
    """The layers for sparse operators: by their sparsity or, if `fast` is True, by timing them."""
    if fast is not True:
        return [layer for layer in layers if layer.sparsity >= fast]
    refuse_unmeasurable(fast)
    return fastest_layers(proto, arrays, layers, threads=threads, sizes=sizes, where=where)


def refuse_unmeasurable(fast: bool | Fraction) -> None:
    """Refuse to measure sparse operators that were not built."""
    if fast is True and find_library() is None:
        raise MissingOperators("nothing to measure", "{fast} takes layers unmeasured", fast=0.7)


def fastest_layers(
    proto: ModelProto,
    arrays: Arrays,
    layers: Sequence[Layer],
    *,
    threads: int | None = None,
    sizes: Mapping[str, int] | None = None,
    where: str = "",
) -> list[Layer]:
    """Which layers to compute sparsely, none if the dense network is as fast."""
    tried: list[list[Layer]] = []
    for threshold in THRESHOLDS:
        chosen = [layer for layer in layers if layer.sparsity >= threshold]
        if chosen and chosen not in tried:
            tried.append(chosen)
    if not tried:
        return []
    dense = new_session(proto, arrays, threads=threads, library=False)
    feeds = example_inputs(dense, sizes, where)
    sessions = [dense]
    sessions += [new_session(*use_sparse(proto, arrays, some), threads=threads) for some in tried]
    first, *others = shortest_times(sessions, feeds)
    fastest = min(range(len(others)), key=others.__getitem__)
    return tried[fastest] if others[fastest] < WORTH * first else []
