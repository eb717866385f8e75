"""Layers whose forward skips the zeros of their weights: the module there was, of another class.

Its names, parameters and hooks stay. What is packed are three more buffers, so that it is copied,
moved and compiled as buffers are; a state dict does not have them.
"""

import sys
from collections.abc import Callable
from typing import Any, Self
from warnings import warn

import torch
from torch import Tensor, nn

from elsa_converters.sparse._weights import MOST_COLUMNS, MOST_KERNEL
from elsa_converters.torch._fast.packed import DTYPES, Packed, pack, unpack

_BUFFERS = ("elsa_values", "elsa_columns", "elsa_starts")
_warned: set[str] = set()


def warn_once(text: str) -> None:
    """Warn of something that would else be said for every layer."""
    if text not in _warned:
        _warned.add(text)
        warn(text, RuntimeWarning, stacklevel=3)


def _stamp(weight: Tensor) -> tuple[object, ...]:
    """Another one when the weights have changed; `half()` changes no version, some have none."""
    version = None if weight.is_inference() else weight._version
    pointer = 0 if weight.is_meta else weight.data_ptr()
    return version, pointer, weight.dtype, weight.device, weight.shape


class FastLayer(nn.Module):
    """What the layers have in common."""

    dense_class: type[nn.Module]
    weight: Tensor
    bias: Tensor | None
    elsa_values: Tensor
    elsa_columns: Tensor
    elsa_starts: Tensor
    _elsa_stamp: tuple[object, ...] | None
    """Of the weights that were packed; None if they have changed since."""

    @classmethod
    def takes(cls, module: nn.Module) -> bool:
        """Whether the layer, which is dense, could be computed so."""
        raise NotImplementedError

    @classmethod
    def pack_of(cls, weight: Tensor) -> Packed | None:
        """The packed form of a weight."""
        return pack(weight.detach().contiguous())

    def dense_weight(self) -> Tensor:
        """The weight, of packed ones if it is not in memory."""
        if not self.weight.is_meta:
            return self.weight
        return self._unpacked()

    def _unpacked(self) -> Tensor:
        matrix = unpack(self.packed(), self.weight[0].numel())
        return matrix.reshape(self.weight.shape)

    def packed(self) -> Packed:
        """The packed weights."""
        return Packed(self.elsa_values, self.elsa_columns, self.elsa_starts)

    def is_current(self) -> bool:
        """Whether the packed weights are those that the layer has."""
        return self._elsa_stamp == _stamp(self.weight)

    def is_surely_current(self) -> bool:
        """Whether it can be told, too: weights made in inference mode have no versions."""
        return self.is_current() and (self.weight.is_meta or not self.weight.is_inference())

    def note_current(self) -> None:
        """The packed weights are those that the layer has: remember it."""
        self._elsa_stamp = _stamp(self.weight)

    def input_of(self, x: Tensor) -> Tensor | None:
        """The input as the operator takes it, or None where the dense layer is to compute."""
        if self.weight.is_meta:
            if self.training and torch.is_grad_enabled():
                raise RuntimeError(
                    "elsa: layers without dense weights cannot be trained; load with "
                    "keep_dense=True"
                )
        elif torch.is_grad_enabled() and (x.requires_grad or self.weight.requires_grad):
            if not self.training:
                warn_once(
                    "elsa: fast layers compute densely while gradients are recorded; use "
                    "torch.inference_mode()"
                )
            return None
        elif not torch.compiler.is_compiling() and not self.is_current():
            warn_once(
                "elsa: weights have changed since they were packed, so their layers are dense "
                "again; elsa_converters.torch.sparsify(model) packs them anew"
            )
            make_dense(self)
            return None
        dtype = x.dtype
        if torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
        elif dtype != self.elsa_values.dtype:
            dtype = torch.float16  # the dense layer says what is wrong
        if dtype not in DTYPES or x.device.type != "cpu":
            if self.weight.is_meta:
                raise TypeError(
                    f"elsa: input is {x.dtype} on {x.device}, and the dense weights are not in "
                    "memory; load with keep_dense=True"
                )
            return None
        return x.to(dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move or cast; where sparse layers do not run, the layer is dense from then on."""
        probe, current = fn(self.elsa_values[:0]), self.is_current()
        if probe.device.type != "cpu" or probe.dtype not in DTYPES:
            warn_once(
                f"elsa: sparse layers need float32 or bfloat16 on the CPU, so in {probe.dtype} on "
                f"{probe.device.type} they are dense"
            )
            make_dense(self)
            nn.Module._apply(self, fn, recurse)
            return self
        weight = self._parameters.pop("weight") if self.weight.is_meta else None
        super()._apply(fn, recurse)
        if weight is not None:  # which cannot be moved
            empty = torch.empty_like(weight, dtype=probe.dtype)
            self._parameters["weight"] = nn.Parameter(empty, requires_grad=False)
        self._elsa_stamp = _stamp(self.weight) if current else None
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.weight.is_meta and not keep_vars:
            destination[f"{prefix}weight"] = self.dense_weight()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        dense = self.dense_class
        if self.weight.is_meta and f"{prefix}weight" in state_dict:
            make_dense(self)
        dense._load_from_state_dict(self, state_dict, prefix, *args)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_elsa_stamp": self.is_current()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._elsa_stamp = _stamp(self.weight) if state["_elsa_stamp"] else None


class FastLinear(FastLayer, nn.Linear):
    """torch.nn.Linear on packed weights."""

    dense_class = nn.Linear

    @classmethod
    def takes(cls, module: nn.Module) -> bool:
        """Any with inputs and outputs."""
        return isinstance(module, nn.Linear) and module.weight.dim() == 2

    def forward(self, input: Tensor) -> Tensor:
        """As torch.nn.Linear."""
        x = self.input_of(input)
        if x is None:
            return nn.Linear.forward(self, input)
        packed = self.elsa_values, self.elsa_columns, self.elsa_starts
        return torch.ops.elsa.linear(x, *packed, self.bias, self.in_features)


class FastConv2d(FastLayer, nn.Conv2d):
    """torch.nn.Conv2d on packed weights."""

    dense_class = nn.Conv2d

    @classmethod
    def takes(cls, module: nn.Module) -> bool:
        """Neither groups nor dilations, and padding with zeros alone."""
        return (
            isinstance(module, nn.Conv2d)
            and module.groups == 1
            and set(module.dilation) == {1}
            and module.padding_mode == "zeros"
            and max(module.kernel_size) <= MOST_KERNEL
            and module.weight[0].numel() <= MOST_COLUMNS
        )

    @classmethod
    def pack_of(cls, weight: Tensor) -> Packed | None:
        """Its rows are not cut."""
        return pack(weight.detach().contiguous().flatten(1), parts=False)

    def forward(self, input: Tensor) -> Tensor:
        """As torch.nn.Conv2d."""
        x = self.input_of(input) if input.dim() == 4 else None
        if x is None:
            return nn.Conv2d.forward(self, input)
        packed = self.elsa_values, self.elsa_columns, self.elsa_starts
        sides = list(self.weight.shape[1:])
        pads = self._reversed_padding_repeated_twice
        padding = [pads[2], pads[0], pads[3], pads[1]]
        return torch.ops.elsa.conv2d(x, *packed, self.bias, sides, list(self.stride), padding)


def fast_class(module: nn.Module) -> type[FastLayer] | None:
    """The class that a dense layer could have; None if there is none for it."""
    found: type[FastLayer] | None = None
    if module._parameters.get("weight") is None:
        return None  # one that is computed, such as that of torch.nn.utils.prune
    if type(module) is nn.Linear:
        found = FastLinear
    elif type(module) is nn.Conv2d:
        found = FastConv2d
    elif type(module) is getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None):
        from elsa_converters.torch._fast.conv1d import FastConv1D

        found = FastConv1D
    return found if found is not None and found.takes(module) else None


def make_fast(module: nn.Module, packed: Packed, *, keep_dense: bool) -> None:
    """Let a layer, fast or dense, compute with these weights, which are its own."""
    kind = type(module) if isinstance(module, FastLayer) else fast_class(module)
    assert kind is not None
    for name, tensor in zip(_BUFFERS, packed, strict=True):
        module.register_buffer(name, tensor, persistent=False)
    module.__class__ = kind
    if not keep_dense and not module.weight.is_meta:
        empty = torch.empty_like(module.weight, device="meta", dtype=packed.values.dtype)
        module.weight = nn.Parameter(empty, requires_grad=False)
    module.note_current()


def make_dense(module: FastLayer) -> None:
    """Let a layer be as it was, with the weights that it has."""
    if module.weight.is_meta:
        module.weight = nn.Parameter(module.dense_weight(), requires_grad=False)
    for name in _BUFFERS:
        del module._buffers[name]
        module._non_persistent_buffers_set.discard(name)
    del module._elsa_stamp
    module.__class__ = module.dense_class
