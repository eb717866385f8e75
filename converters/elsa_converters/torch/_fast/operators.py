"""The operators elsa::linear and elsa::conv2d: functions of tensors, for eager and traced code."""

from collections.abc import Sequence

import torch
from torch import Tensor

from elsa_converters.torch._fast.packed import DTYPES, Packed, library, prepared

_LIBRARY = torch.library.Library("elsa", "DEF")
_LIBRARY.define(
    "linear(Tensor x, Tensor values, Tensor columns, Tensor starts, Tensor? bias, int inputs)"
    " -> Tensor"
)
_LIBRARY.define(
    "conv2d(Tensor x, Tensor values, Tensor columns, Tensor starts, Tensor? bias, int[3] sides,"
    " int[2] stride, int[4] padding) -> Tensor"
)


def _refuse(x: Tensor, bias: Tensor | None, weights: Tensor) -> None:
    """Refuse what the library does not take, and gradients, which would be missing silently."""
    if torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)):
        raise RuntimeError(
            "elsa: sparse layers have no gradients; run them in torch.inference_mode(), or train "
            "the dense layers"
        )
    if x.dtype not in DTYPES or weights.dtype not in DTYPES:
        raise TypeError(f"elsa: input is {x.dtype}, weights {weights.dtype}; expected {DTYPES}")


def _shape_of_product(x: Tensor, starts: Tensor, inputs: int) -> list[int]:
    if x.dim() < 1 or x.shape[-1] != inputs:
        raise ValueError(f"elsa: input of shape {list(x.shape)}, expected {inputs} columns")
    return [*x.shape[:-1], starts.shape[1] - 1]


def _shape_of_convolution(
    x: Tensor, starts: Tensor, sides: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> list[int]:
    if x.dim() != 4 or x.shape[1] != sides[0]:
        raise ValueError(
            f"elsa: input of shape {list(x.shape)}, expected 4 dimensions and {sides[0]} channels"
        )
    size = [
        (x.shape[i + 2] + padding[i] + padding[i + 2] - sides[i + 1]) // stride[i] + 1
        for i in range(2)
    ]
    return [x.shape[0], starts.shape[1] - 1, *size]


def linear(
    x: Tensor, values: Tensor, columns: Tensor, starts: Tensor, bias: Tensor | None, inputs: int
) -> Tensor:
    """A product with packed weights, in the input's dtype."""
    _refuse(x, bias, values)
    y = x.new_empty(_shape_of_product(x, starts, inputs))
    shape = (starts.shape[1] - 1, inputs, 1, 1, 1, 1, 0, 0, 0, 0)
    layer = prepared(Packed(values, columns, starts), shape)
    if not y.numel():
        return y
    x = x.contiguous()
    added = _wide(bias, shape[0])
    problem = library().elsa_linear(
        layer,
        x.data_ptr(),
        x.dtype is torch.bfloat16,
        y.numel() // shape[0],
        None if added is None else added.data_ptr(),
        y.data_ptr(),
        torch.get_num_threads(),
    )
    _check(problem)
    return y


def conv2d(
    x: Tensor,
    values: Tensor,
    columns: Tensor,
    starts: Tensor,
    bias: Tensor | None,
    sides: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
) -> Tensor:
    """A convolution with packed weights; padding is top, left, bottom, right."""
    _refuse(x, bias, values)
    size = _shape_of_convolution(x, starts, sides, stride, padding)
    if any(x.shape[i + 2] + padding[i] + padding[i + 2] < sides[i + 1] for i in range(2)):
        raise ValueError(f"elsa: input of shape {list(x.shape)} is smaller than the kernel")
    y = x.new_empty(size)
    shape = (size[1], *sides, *stride, *padding)
    layer = prepared(Packed(values, columns, starts), shape)
    if not y.numel():
        return y
    x = x.contiguous()
    added = _wide(bias, shape[0])
    problem = library().elsa_conv2d(
        layer,
        x.data_ptr(),
        x.dtype is torch.bfloat16,
        *(x.shape[0], x.shape[2], x.shape[3]),
        None if added is None else added.data_ptr(),
        y.data_ptr(),
        torch.get_num_threads(),
    )
    _check(problem)
    return y


def _wide(bias: Tensor | None, outputs: int) -> Tensor | None:
    if bias is None:
        return None
    if tuple(bias.shape) != (outputs,):
        raise ValueError(f"elsa: bias of shape {list(bias.shape)}, expected {outputs} numbers")
    return bias.to(torch.float32).contiguous()


def _check(problem: bytes | None) -> None:
    if problem is not None:
        text = problem.decode()
        raise MemoryError(text) if text == "out of memory" else RuntimeError(f"elsa: {text}")


def _fake_linear(
    x: Tensor, values: Tensor, columns: Tensor, starts: Tensor, bias: Tensor | None, inputs: int
) -> Tensor:
    _refuse(x, bias, values)
    return x.new_empty(_shape_of_product(x, starts, inputs))


def _fake_conv2d(
    x: Tensor,
    values: Tensor,
    columns: Tensor,
    starts: Tensor,
    bias: Tensor | None,
    sides: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
) -> Tensor:
    _refuse(x, bias, values)
    return x.new_empty(_shape_of_convolution(x, starts, sides, stride, padding))


_LIBRARY.impl("linear", linear, "CPU")
_LIBRARY.impl("conv2d", conv2d, "CPU")
torch.library.register_fake("elsa::linear", _fake_linear, lib=_LIBRARY)
torch.library.register_fake("elsa::conv2d", _fake_conv2d, lib=_LIBRARY)
