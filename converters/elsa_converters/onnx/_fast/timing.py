"""How long models take on this machine: whole sessions in turn, the shortest run of each."""

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from onnx import ModelProto

from elsa_converters.onnx._graph.walk import Arrays
from elsa_converters.onnx._model.read import parse_model
from elsa_converters.onnx._model.write import with_values
from elsa_converters.sparse import find_library
from elsa_format import InvalidOption

Feeds = dict[str, NDArray[Any]]
Shape = Sequence[int | str | None]
"""Of an input: sizes, and the names of axes that are open; None for one without a name."""
MOST_THREADS = 256
"""More would only wait for each other."""
SECONDS = 2.0
"""For which models are compared with each other."""
_TURN = 0.03
"""Seconds that a session runs on end: for half of that, its threads wait for more, and take the
processors from the session whose turn is next."""
_FEWEST_TURNS = 5
_KINDS = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(double)": np.float64,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    "tensor(int16)": np.int16,
    "tensor(int8)": np.int8,
    "tensor(uint8)": np.uint8,
    "tensor(bool)": np.bool_,
}


def new_session(
    proto: ModelProto, arrays: Arrays, *, threads: int | None = None, library: bool = True
) -> Any:
    """A session of a model and its tensors, with the sparse operators if they are there."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads or 0
    path = find_library() if library else None
    if path is not None:
        options.register_custom_ops_library(str(path))
    content, values = with_values(proto, arrays)
    options.add_external_initializers(list(values), list(values.values()))
    return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])


def measured_axes(
    template: str | os.PathLike[str], sizes: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Return the size of every axis that a graph leaves open: the given one, or else 1.

    An axis without a name is called by its input and its place, such as `x[0]`.

    Args:
        template: The ONNX model or template.
        sizes: Sizes of open axes by their names.

    Returns:
        The sizes that inputs are made with to measure the model, by the names of the axes.

    Raises:
        InvalidOption: A size is given for an axis that is not open.

    >>> measured_axes("net.onnx", {"batch": 8})
    {'batch': 8}
    """
    graph = parse_model(Path(template)).graph
    stored = {tensor.name for tensor in graph.initializer}
    shapes = {
        value.name: [
            dim.dim_value
            if dim.HasField("dim_value") and dim.dim_value >= 0
            else dim.dim_param or None
            for dim in value.type.tensor_type.shape.dim
        ]
        for value in graph.input
        if value.name not in stored
    }
    return _sized(shapes, sizes, os.fspath(template))


def _sized(
    shapes: Mapping[str, Shape], sizes: Mapping[str, int] | None, where: str
) -> dict[str, int]:
    """The sizes of all open axes of inputs; refuse one for an axis that is not open."""
    axes = dict.fromkeys(
        (axis for name, shape in shapes.items() for axis in _axes(name, shape) if axis), 1
    )
    for axis in sizes or {}:
        if axis not in axes:
            open_axes = f"{{sizes}} takes one of {', '.join(axes)}" if axes else "none is open"
            raise InvalidOption(f"{where}: no input has an open axis called {axis!r}", open_axes)
    return axes | dict(sizes or {})


def _axes(name: str, shape: Shape) -> Iterable[str | None]:
    """The names of an input's axes, None for those whose size is known."""
    for place, size in enumerate(shape):
        yield None if isinstance(size, int) else size or f"{name}[{place}]"


def example_inputs(session: Any, sizes: Mapping[str, int] | None = None, where: str = "") -> Feeds:
    """Inputs of a session's shapes: noise for floats, ones for integers.

    Axes without a size have the one that is given for their name, or else 1.
    """
    inputs, feeds = session.get_inputs(), {}
    axes = _sized({value.name: value.shape for value in inputs}, sizes, where)
    rng = np.random.default_rng(0)
    for value in inputs:
        if value.type not in _KINDS:
            raise InvalidOption(
                f"{where}: no example can be made for input {value.name!r}, {value.type}"
            )
        named = zip(value.shape, _axes(value.name, value.shape), strict=True)
        shape = [size if axis is None else axes[axis] for size, axis in named]
        kind = np.dtype(_KINDS[value.type])
        if kind.kind == "f":
            feeds[value.name] = rng.standard_normal(shape).astype(kind)
        else:
            feeds[value.name] = np.ones(shape, kind)
    return feeds


def shortest_times(
    sessions: Sequence[Any], feeds: Feeds, seconds: float | None = None
) -> list[float]:
    """Seconds of the fastest run of each; they run in turn, so that all see the same noise."""
    seconds = SECONDS if seconds is None else seconds
    best = [float("inf")] * len(sessions)
    for session in sessions:
        session.run(None, feeds)
    began, turns = time.perf_counter(), 0
    while turns < _FEWEST_TURNS or time.perf_counter() - began < seconds:
        for index, session in enumerate(sessions):
            start = now = time.perf_counter()
            while now - start < min(_TURN, seconds) or now == start:
                before = now
                session.run(None, feeds)
                now = time.perf_counter()
                best[index] = min(best[index], now - before)
        turns += 1
    return best


def check_threads(threads: int | None) -> None:
    """Refuse what is no number of threads to measure with."""
    if threads is not None and (
        isinstance(threads, bool) or threads not in range(1, MOST_THREADS + 1)
    ):
        raise InvalidOption(f"threads={threads!r}: expected None, or 1 to {MOST_THREADS}")
