"""Where a network's equations multiply inputs by weights, and which tensors follow that."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np
from elsa_converters.calibrate import Layer
from jax.extend.core import JaxprEqn, Literal
from numpy.typing import NDArray

from elsa_train._calibrate.products import Contraction, Convolution, Product
from elsa_train._calibrate.program import Program

Array = NDArray[Any]

_VIEWS: Mapping[str, Callable[[Array, Mapping[str, Any]], Array]] = {
    "broadcast_in_dim": lambda x, of: _broadcast(x, of["broadcast_dimensions"], of["shape"]),
    "convert_element_type": lambda x, of: x,
    "copy": lambda x, of: x,
    "reshape": lambda x, of: x.reshape(of["new_sizes"]),
    "rev": lambda x, of: np.flip(x, of["dimensions"]),
    "sharding_constraint": lambda x, of: x,
    "squeeze": lambda x, of: np.squeeze(x, of["dimensions"]),
    "stop_gradient": lambda x, of: x,
    "transpose": lambda x, of: x.transpose(of["permutation"]),
}
"""Equations that give the same elements, perhaps elsewhere, and what they do."""
_LOOPS = {"cond", "scan", "while"}
_PRODUCTS = {"conv_general_dilated", "dot_general"}


@dataclass(frozen=True)
class Part:
    """A tensor of which each row of a layer has one element."""

    name: str
    order: Array
    """For each row, the element's number."""
    sign: int = 1


@dataclass(frozen=True)
class Found:
    """A layer in the equations."""

    layer: Layer
    product: Product
    order: Array
    """For each element of the matrices, its number in the stored tensor: of the layer's shape."""
    offsets: list[Part] = field(default_factory=list)
    """What is added before anything else happens; every level has the last of them for itself."""
    scale: Part | None = None
    """What the sum is multiplied by then."""


def find_layers(
    program: Program, dtypes: Mapping[str, np.dtype[Any]]
) -> tuple[list[Found], dict[str, str]]:
    """The layers in the order they run, and for other tensors of two axes or more why not."""
    found, left = [], {}
    at = {id(equation): number for number, equation in enumerate(program.equations)}
    for name, value in program.tensors.items():
        if len(value.aval.shape) < 2:  # type: ignore[attr-defined]
            continue
        result = _layer(program, name, dtypes[name])
        if isinstance(result, str):
            left[name] = result
        else:
            found.append(result)
    found.sort(key=lambda one: at[id(one.product.equation)])
    for one in found:
        for part in [*one.offsets, one.scale]:
            if part is not None:
                left.pop(part.name, None)
    return found, left


def find_head(program: Program, found: Sequence[Found]) -> str | None:
    """The layer whose rows are the first output's features, but for a softmax or the like."""
    output = program.outputs[0]
    for one in reversed(found):
        after = program.after(one.product.outputs, output)
        rows = one.layer.groups * one.layer.rows
        if after is None or output.aval.shape[-1:] != (rows,):
            continue
        if all(equation.primitive.name not in _PRODUCTS for equation in after):
            return one.layer.name
    return None


def _layer(program: Program, name: str, dtype: np.dtype[Any]) -> Found | str:
    """The layer whose weight a tensor is, or why it is none's."""
    value: Any = program.tensors[name]
    if not jnp.issubdtype(dtype, jnp.floating):
        return f"{dtype.name}, not floating"
    numbers = np.arange(value.aval.size).reshape(value.aval.shape)
    while True:
        if program.uses[value] != 1:
            times = program.uses[value]
            return f"used in {times} places" if times else "not used"
        if value not in program.used_by:
            return "an output of the network"
        equation = program.used_by[value]
        if equation.primitive.name not in _VIEWS:
            break
        numbers = _VIEWS[equation.primitive.name](numbers, equation.params)
        (value,) = equation.outvars
    weights = equation.invars.index(value)
    product = _product(program, equation, weights)
    if isinstance(product, str):
        return product
    order = product.matrices(numbers)
    if not _permutes(order):
        return "broadcast before it is multiplied"
    offsets, scale = _affine(program, product)
    groups, rows, columns = order.shape
    layer = Layer(
        name,
        dtype,
        groups,
        rows,
        columns,
        kernel=product.kernel,
        bias=bool(offsets),
        scale=scale is not None,
        # Depthwise: a row has so few weights that every level has them for itself.
        nested=groups == 1 or columns > product.kernel,
    )
    return Found(layer, product, order, offsets, scale)


def _product(program: Program, equation: JaxprEqn, weights: int) -> Product | str:
    kind = equation.primitive.name
    if kind in ("gather", "dynamic_slice"):
        return "looked up, not multiplied"
    if kind in _LOOPS:
        return f"used in a loop or branch ({kind})"
    if kind not in _PRODUCTS:
        return f"goes into {kind}, not into a matrix product"
    if not program.of_samples(equation.invars[1 - weights]):
        return "multiplied by what is no input"
    if kind == "dot_general":
        return Contraction(equation, weights)
    if weights != 1:
        return "the inputs of a convolution, not its kernel"
    if equation.params["batch_group_count"] != 1:
        return "a convolution in groups of samples"
    return Convolution(equation, weights)


def _affine(program: Program, product: Product) -> tuple[list[Part], Part | None]:
    """Tensors that are added to a layer's outputs, then one they are multiplied by.

    A maximum over neighbours may come between: scales of levels are positive.
    """
    names = {value: name for name, value in program.tensors.items()}
    value = product.outputs
    rows = product.rows()
    offsets: list[Part] = []
    while program.uses[value] == 1 and value in program.used_by:
        equation = program.used_by[value]
        kind = equation.primitive.name
        if kind in _VIEWS:
            rows = _VIEWS[kind](rows, equation.params)
        elif kind == "reduce_window_max":
            pooled = _pooled(rows, equation)
            if pooled is None:
                break
            rows = pooled
        elif kind in ("add", "sub", "mul"):
            place = equation.invars.index(value)
            other = equation.invars[1 - place]
            if program.of_samples(other) or (kind == "sub" and place):
                break
            parts = _parts(program, names, other, factors=kind == "mul")
            matched = (part for name, at in parts if (part := _part(name, at, rows)) is not None)
            part = next(matched, None)
            if kind == "mul":
                return offsets, part
            if part is None:
                break
            offsets.append(Part(part.name, part.order, 1 if kind == "add" else -1))
            rows = np.broadcast_to(rows, equation.outvars[0].aval.shape)  # type: ignore[attr-defined]
        else:
            break
        (value,) = equation.outvars
    return offsets, None


def _pooled(rows: Array, equation: JaxprEqn) -> Array | None:
    """The rows of maxima, if only outputs of the same row are compared."""
    shape = equation.outvars[0].aval.shape  # type: ignore[attr-defined]
    windows = zip(equation.params["window_dimensions"], rows.strides, strict=True)
    if any(size > 1 and stride for size, stride in windows):
        return None
    one = tuple(slice(None) if stride else slice(1) for stride in rows.strides)
    return np.broadcast_to(rows[one], shape)


def _parts(
    program: Program, names: Mapping[Any, str], value: Any, *, factors: bool
) -> Iterator[tuple[str, Array]]:
    """Tensors that a value is, or has as a factor: the names, and where their elements are."""
    if isinstance(value, Literal) or program.uses[value] != 1:
        return
    shape = value.aval.shape
    if value in names:
        yield names[value], np.arange(value.aval.size).reshape(shape)
        return
    equation = program.made_by.get(value)
    if equation is None:
        return
    kind = equation.primitive.name
    if kind in _VIEWS:
        for name, at in _parts(program, names, equation.invars[0], factors=factors):
            yield name, _VIEWS[kind](at, equation.params)
    elif kind == "mul" and factors:
        for operand in equation.invars:
            for name, at in _parts(program, names, operand, factors=factors):
                yield name, np.broadcast_to(at, shape)


def _part(name: str, at: Array, rows: Array) -> Part | None:
    """The element for each row, if every row has one of its own."""
    at, rows = np.broadcast_arrays(at, rows)
    # Along axes where both repeat, one place says all.
    strides = zip(at.strides, rows.strides, strict=True)
    one = tuple(slice(None) if any(both) else slice(1) for both in strides)
    at, rows = at[one], rows[one]
    if not rows.size:
        return None
    order = np.full(rows.max() + 1, -1)
    order[rows.reshape(-1)] = at.reshape(-1)
    if not np.array_equal(order[rows], at) or not _permutes(order):
        return None
    return Part(name, order)


def _permutes(order: Array) -> bool:
    return np.array_equal(np.sort(order, axis=None), np.arange(order.size))


def _broadcast(x: Array, dimensions: tuple[int, ...], shape: tuple[int, ...]) -> Array:
    expanded = [1] * len(shape)
    for axis, size in zip(dimensions, x.shape, strict=True):
        expanded[axis] = size
    return np.broadcast_to(x.reshape(expanded), shape)
