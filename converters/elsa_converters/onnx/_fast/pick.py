"""Choose the layers that sparse operators compute: by their sparsity, or by timing them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Literal

from onnx import ModelProto

from elsa_converters._errors import MissingOperators
from elsa_converters.onnx._fast.layers import Layer
from elsa_converters.onnx._fast.rewrite import prepare, use_sparse
from elsa_converters.onnx._fast.timing import example_inputs, new_session, shortest_times
from elsa_converters.onnx._graph.walk import Arrays
from elsa_converters.sparse import find_library
from elsa_converters.sparse._choice import SPARSITY, WORTH, Fast
from elsa_format import InvalidOption

Precision = Literal[32, 16, 8, "auto"]
"""Bits of the numbers that sparse operators compute with: floats of 32, integers of 16 or 8; the
faster of 32 and 16."""
PRECISIONS: tuple[Precision, ...] = (32, 16, 8, "auto")
THRESHOLDS = (0.3, 0.5, SPARSITY, 0.85)
"""Sparsities from which layers are tried: more of them may win, even where they gain little."""


def check_precision(precision: Precision, fast: Fast) -> Precision:
    """Refuse what is no precision, and what cannot be done without sparse operators."""
    if isinstance(precision, bool) or precision not in PRECISIONS:
        raise InvalidOption(f"precision={precision!r}: expected 32, 16, 8 or 'auto'")
    if precision != 32 and fast is False:
        raise InvalidOption(
            f"precision={precision!r} is for sparse operators", "give {fast}", fast=True
        )
    if precision == "auto" and fast is not True:
        raise InvalidOption(
            "precision='auto' times the layers", "give {fast} without a sparsity", fast=True
        )
    return precision


def accelerate(
    proto: ModelProto,
    arrays: Arrays,
    where: str,
    fast: bool | Fraction,
    *,
    precision: Precision = 32,
    threads: int | None = None,
    sizes: Mapping[str, int] | None = None,
) -> tuple[ModelProto, Arrays, tuple[int, int]]:
    """A model whose layers sparse operators compute, its tensors, and how many layers of how many.

    Changes its arguments.
    """
    layers = prepare(proto, arrays, where)
    picked = pick_layers(
        proto,
        arrays,
        layers,
        fast,
        precision=precision,
        threads=threads,
        sizes=sizes,
        where=where,
    )
    return *use_sparse(proto, arrays, picked), (len(picked), len(layers))


def pick_layers(
    proto: ModelProto,
    arrays: Arrays,
    layers: Sequence[Layer],
    fast: bool | Fraction,
    *,
    precision: Precision = 32,
    threads: int | None = None,
    sizes: Mapping[str, int] | None = None,
    where: str = "",
) -> list[Layer]:
    """The layers for sparse operators: by their sparsity or, if `fast` is True, by timing them."""
    if fast is not True:
        return _with_bits([layer for layer in layers if layer.sparsity >= fast], precision)
    refuse_unmeasurable(fast)
    return fastest_layers(
        proto, arrays, layers, precision=precision, threads=threads, sizes=sizes, where=where
    )


def _with_bits(layers: Sequence[Layer], precision: Precision) -> list[Layer]:
    bits = precision if precision in (16, 8) else 0
    return [replace(layer, bits=bits) for layer in layers]


def refuse_unmeasurable(fast: bool | Fraction) -> None:
    """Refuse to measure sparse operators that were not built."""
    if fast is True and find_library() is None:
        raise MissingOperators("nothing to measure", "{fast} takes layers unmeasured", fast=0.7)


def fastest_layers(
    proto: ModelProto,
    arrays: Arrays,
    layers: Sequence[Layer],
    *,
    precision: Precision = 32,
    threads: int | None = None,
    sizes: Mapping[str, int] | None = None,
    where: str = "",
) -> list[Layer]:
    """Which layers to compute sparsely, none if the dense network is as fast."""
    tried: list[list[Layer]] = []
    for bits in (32, 16) if precision == "auto" else (precision,):
        for threshold in THRESHOLDS:
            chosen = _with_bits([x for x in layers if x.sparsity >= threshold], bits)
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
