"""The densest level that runs in time on this machine."""

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from elsa_converters.onnx._fast.pick import (
    Precision,
    accelerate,
    check_precision,
    refuse_unmeasurable,
)
from elsa_converters.onnx._fast.timing import (
    check_threads,
    example_inputs,
    new_session,
    shortest_times,
)
from elsa_converters.onnx._level.read import Template, open_level
from elsa_converters.sparse._choice import Fast, check_fast
from elsa_format import NoSuchLevel
from elsa_format.plugins import LevelChoice, LevelNumber, Source, open_network


def level_within(
    source: Any,
    template: Template,
    max_latency: float,
    *,
    fast: Fast = False,
    precision: Precision = 32,
    threads: int | None = None,
    sizes: Mapping[str, int] | None = None,
    max_bytes: int | None = None,
    min: Mapping[str, float] | None = None,
    max: Mapping[str, float] | None = None,
) -> LevelNumber:
    """The densest level, or "dense", that runs in so many seconds at most.

    Levels are tried from the dense network on; `fast`, `precision` and `max_bytes` as for `export`.
    With metrics of at least `min`, such as `{"accuracy": 0.9}`, and at most `max`: the best of the
    levels that have them, or of those that equal it within their standard errors, the sparsest.

    >>> level_within("net.safetensors", "net.onnx", 10.0)
    'dense'
    """
    fast = check_fast(fast)
    check_precision(precision, fast)
    check_threads(threads)
    refuse_unmeasurable(fast)
    choice = LevelChoice(min=min, max=max)
    with open_network(source, max_bytes=max_bytes) as network:
        levels = network.available

        def takes(level: LevelNumber) -> float:
            session = _session(source, template, level, fast, precision, threads, sizes)
            feeds = example_inputs(session, sizes, str(template))
            return shortest_times([session], feeds)[0]

        if choice.measured:
            return choice.within(network, lambda n: takes(n) * 1e3, max_latency * 1e3, "ms here")
    times = {}
    for level in reversed(levels):
        times[level] = takes(level)
        if times[level] <= max_latency:
            return level
    shown = ", ".join(
        f"{'dense' if n == 'dense' else f'level {n}'} takes {t * 1e3:.4g} ms"
        for n, t in times.items()
    )
    hint = "" if fast is not False else "{fast} may be faster"
    raise NoSuchLevel(
        f"{source}: no level runs in {max_latency * 1e3:.4g} ms here: {shown}", hint, fast=True
    )


def _session(
    source: Source,
    template: Template,
    level: LevelNumber,
    fast: bool | Fraction,
    precision: Precision,
    threads: int | None,
    sizes: Mapping[str, int] | None,
) -> Any:
    with open_level(source, template, level) as opened:
        arrays, proto, where = opened.arrays(), opened.binding.proto, str(opened.binding.model.path)
    if fast is not False:
        proto, arrays, _ = accelerate(
            proto, arrays, where, fast, precision=precision, threads=threads, sizes=sizes
        )
    return new_session(proto, arrays, threads=threads)
