"""flax to ONNX: a template whose initializers are called as the parameters are.

jax2onnx bakes parameters into the graph, transposed and without names. So they are made inputs of
the function it converts, and afterwards turned into initializers that the ELSA file fills.
"""

import contextlib
import importlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import linen, nnx
from jax.export import symbolic_shape
from numpy.typing import NDArray
from onnx import ModelProto

import elsa_format
from elsa_converters._errors import TemplateMismatch, UnsupportedOnnx
from elsa_converters.onnx import LevelSession, write_template
from elsa_converters.onnx._graph.simplify import cancel_transposes
from elsa_converters.onnx._graph.walk import rename_uses, used
from elsa_converters.onnx._model.read import Model
from elsa_converters.onnx._model.tensors import Weight
from elsa_format import MissingExtra
from elsa_format.plugins import TensorInfo, of_array

OPSET = 21  # with IR 10, which onnxruntime has accepted for long
TOLERANCE = 1e-5
"""Largest difference to JAX's outputs, relative to the largest of them."""

Inputs = Sequence[Any]
Leaves = dict[str, Any]
Function = Callable[[Inputs, Leaves], Any]
_POOLS = ("max_pool", "min_pool", "avg_pool")
_POOL_ARGUMENTS = ("window_shape", "strides", "padding", "count_include_pad")


def template_from_flax(
    model: linen.Module | nnx.Module,
    sample: Any,
    packed: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    batch: str | None = "batch",
    opset: int = OPSET,
    force: bool = False,
    **arguments: Any,
) -> None:
    """Write the graph of a flax model as a template for the ELSA file of its parameters.

    `sample` is an input or a tuple of inputs; their first dimension is free and called `batch`,
    unless that is None. `arguments` go to every call of the model; an nnx model is called as after
    its `eval()`. Tensors are called as `elsa_train` calls them: the path in the tree of parameters
    or statistics, joined with slashes. The dense network's outputs are compared with JAX's before
    the template is written.

    >>> net = nnx.Linear(100, 100, rngs=nnx.Rngs(0))
    >>> dense = {"kernel": np.asarray(net.kernel[...]), "bias": np.asarray(net.bias[...])}
    >>> report = elsa_format.pack(dense, "linear.safetensors", sparsities=[90])
    >>> template_from_flax(net, np.ones((1, 100), np.float32), "linear.safetensors", "linear.onnx")
    """
    inputs = [np.asarray(x) for x in (sample if isinstance(sample, tuple) else (sample,))]
    function, shapes = _as_function(model, inputs, arguments)
    proto = _convert(function, inputs, shapes, batch, opset)
    weights = {
        name: Weight(TensorInfo(name, of_array(np.dtype(leaf.dtype)), leaf.shape), None)
        for name, leaf in shapes.items()
    }
    converted = Model(Path(target), proto, weights, is_template=True)
    _compare(function, shapes, inputs, converted, packed)
    write_template(converted, target, packed, force=force)


def _as_function(
    model: linen.Module | nnx.Module, inputs: Inputs, arguments: dict[str, Any]
) -> tuple[Function, Leaves]:
    """The model as a pure function of inputs and named leaves, and the leaves' shapes."""
    if isinstance(model, nnx.Module):
        graph, state, *rest = nnx.split(model, (nnx.Param, nnx.BatchStat), ...)
        pure = nnx.to_pure_dict(state)

        def call_nnx(xs: Inputs, leaves: Leaves) -> Any:
            filled = jax.tree.map(lambda leaf: leaf, state)
            nnx.replace_by_pure_dict(filled, _unflatten(pure, leaves))
            net = nnx.merge(graph, filled, *rest)
            # A graph has no statistics to learn, and nothing random.
            net.eval()  # type: ignore[no-untyped-call]
            return net(*xs, **arguments)

        return call_nnx, _flatten([pure])
    key = jax.random.key(0)
    keys = {"params": key, "dropout": key}
    variables = jax.eval_shape(lambda *xs: model.init(keys, *xs, **arguments), *inputs)

    def call_linen(xs: Inputs, leaves: Leaves) -> Any:
        return model.apply(
            {k: _unflatten(v, leaves) for k, v in variables.items()}, *xs, **arguments
        )

    return call_linen, _flatten(list(variables.values()))


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _flatten(trees: list[Any]) -> Leaves:
    found: Leaves = {}
    for tree in trees:
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            if _name(path) in found:
                raise TemplateMismatch(
                    "flax model", [(_name(path), "two tensors so called", "one")]
                )
            found[_name(path)] = leaf
    return found


def _unflatten(tree: Any, leaves: Leaves) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, _: leaves[_name(path)], tree)


def _convert(
    function: Function, inputs: Inputs, shapes: Leaves, batch: str | None, opset: int
) -> ModelProto:
    """The function as a graph: its inputs, and uses of the leaves by name."""
    try:
        from jax2onnx import to_onnx  # takes seconds
    except ImportError as error:
        raise MissingExtra.of(error, "converting flax models", "flax-onnx") from None

    def flat(*values: Any) -> Any:
        with _keyword_pools():
            leaves = dict(zip(shapes, values[len(inputs) :], strict=True))
            return function(values[: len(inputs)], leaves)

    specs = [_input_spec(x, batch) for x in inputs]
    specs += [_spec(leaf.shape, leaf.dtype) for leaf in shapes.values()]
    try:
        with _without_rewriting():
            proto: ModelProto = to_onnx(flat, specs, opset=opset)
    except Exception as error:  # whatever a plugin raises for what it does not know
        reason = " ".join(str(error).split())[:300]
        raise UnsupportedOnnx(f"jax2onnx cannot convert the model: {reason}") from error
    graph = proto.graph
    if len(graph.input) != len(specs):
        raise UnsupportedOnnx(f"jax2onnx made {len(graph.input)} inputs of {len(specs)}")
    plain = ["x"] if len(inputs) == 1 else [f"x{i}" for i in range(len(inputs))]
    names = dict(zip((v.name for v in graph.input), [*plain, *shapes], strict=True))
    rename_uses(graph, names)
    del graph.input[len(inputs) :]
    for value in graph.input:
        value.name = names[value.name]
    cancel_transposes(graph)
    read = used(graph)  # jax2onnx leaves constants that nothing reads
    for index in reversed(range(len(graph.initializer))):
        if graph.initializer[index].name not in read:
            del graph.initializer[index]
    del graph.value_info[:]  # shapes from before the transposes went
    return proto


def _spec(shape: Any, dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)  # type: ignore[no-untyped-call]


def _input_spec(x: NDArray[Any], batch: str | None) -> jax.ShapeDtypeStruct:
    if batch is None or x.ndim == 0:
        return _spec(x.shape, x.dtype)
    return _spec(symbolic_shape(",".join([batch, *map(str, x.shape[1:])])), x.dtype)


@contextlib.contextmanager
def _keyword_pools() -> Iterator[None]:
    """Let pooling be called as flax allows: jax2onnx replaces it with keyword-only functions."""
    saved = []
    for module in (linen, nnx):
        for name in _POOLS:
            replaced = getattr(module, name, None)
            if replaced is not None:
                saved.append((module, name, replaced))
                setattr(module, name, _taking_positions(replaced))
    try:
        yield
    finally:
        for module, name, replaced in saved:
            setattr(module, name, replaced)


def _taking_positions(pool: Callable[..., Any]) -> Callable[..., Any]:
    def call(inputs: Any, *values: Any, **keywords: Any) -> Any:
        return pool(inputs, **dict(zip(_POOL_ARGUMENTS, values, strict=False)), **keywords)

    return call


@contextlib.contextmanager
def _without_rewriting() -> Iterator[None]:
    """Switch off jax2onnx's own optimizer: it removes transposes across residual additions wrongly.

    ONNX Runtime optimizes transposes itself.
    """
    try:
        module = importlib.import_module("jax2onnx.converter.conversion_api")
        optimize = module.optimize_graph
    except (ImportError, AttributeError):  # another version; the comparison with JAX decides
        yield
        return
    module.optimize_graph = lambda graph: graph  # type: ignore[attr-defined]
    try:
        yield
    finally:
        module.optimize_graph = optimize  # type: ignore[attr-defined]


def _compare(
    function: Function,
    shapes: Leaves,
    inputs: Inputs,
    converted: Model,
    packed: str | os.PathLike[str],
) -> None:
    net = LevelSession(packed, converted, "dense", {"providers": ["CPUExecutionProvider"]})
    names = [value.name for value in net.get_inputs()]
    found = net.run(None, dict(zip(names, inputs, strict=True)))
    with elsa_format.open(packed) as file:
        dense = file.load("dense")
    leaves = {name: jax.numpy.asarray(dense[name], leaf.dtype) for name, leaf in shapes.items()}
    expected = jax.tree.leaves(jax.jit(function)(inputs, leaves))
    for one, other in zip(found, map(np.asarray, expected), strict=True):
        scale = max(1.0, float(np.abs(other).max(initial=0)))
        difference = float(np.abs(one - other).max(initial=0)) / scale
        if one.shape != other.shape or not difference <= TOLERANCE:
            raise UnsupportedOnnx(
                f"jax2onnx's graph gives other outputs than JAX: they differ by {difference:.2g}, "
                f"expected at most {TOLERANCE:.2g}"
            )
