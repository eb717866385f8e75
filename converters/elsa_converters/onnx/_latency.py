"""The densest level that runs in time on this machine."""

from collections.abc import Mapping
from typing import Any

from elsa_converters._errors import MissingOperators
from elsa_converters.onnx._fast import check_fast, check_threads, prepare, use_sparse
from elsa_converters.onnx._level import Template, open_level
from elsa_converters.onnx._measure import (
    example_inputs,
    fastest_layers,
    new_session,
    shortest_times,
)
from elsa_converters.onnx_sparse import find_library
from elsa_format import NoSuchLevel
from elsa_format.plugins import LevelNumber, Source, open_network


def level_within(
    source: Any,
    template: Template,
    max_latency: float,
    *,
    fast: bool | float = False,
    threads: int | None = None,
    sizes: Mapping[str, int] | None = None,
) -> int | None:
    """The densest level, None for the dense network, that runs in so many seconds at most.

    Levels are tried from the dense network on; `fast` as for `export`.

    >>> level_within("net.safetensors", "net.onnx", 10.0) is None
    True
    """
    check_fast(fast)
    check_threads(threads)
    if fast is True and find_library() is None:
        raise MissingOperators("nothing to measure", "{fast} takes layers unmeasured", fast=0.7)
    with open_network(source) as network:
        levels = [network.stated(number) for number in network.readable()]
    times = {}
    for level in reversed(levels):
        session = _session(source, template, level, fast, threads, sizes)
        feeds = example_inputs(session, sizes, str(template))
        (times[level],) = shortest_times([session], feeds)
        del session
        if times[level] <= max_latency:
            return None if level == "dense" else level
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
    fast: bool | float,
    threads: int | None,
    sizes: Mapping[str, int] | None,
) -> Any:
    with open_level(source, template, level) as opened:
        arrays, proto, where = opened.arrays(), opened.binding.proto, str(opened.binding.model.path)
    if fast is not False:
        layers = prepare(proto, arrays, where)
        if fast is True:
            layers = fastest_layers(
                proto, arrays, layers, threads=threads, sizes=sizes, where=where
            )
        else:
            layers = [layer for layer in layers if layer.sparsity >= fast]
        proto, arrays = use_sparse(proto, arrays, layers)
    return new_session(proto, arrays, threads=threads)
