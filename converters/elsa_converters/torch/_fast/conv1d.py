"""The linear layer of GPT-2, whose weights are turned; imported where transformers is."""

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from elsa_converters.torch._fast.layers import FastLayer
from elsa_converters.torch._fast.packed import Packed, pack, unpack


class FastConv1D(FastLayer, Conv1D):
    """transformers' Conv1D on packed weights."""

    dense_class = Conv1D

    @classmethod
    def takes(cls, module: nn.Module) -> bool:
        """Any."""
        return isinstance(module, Conv1D)

    @classmethod
    def pack_of(cls, weight: Tensor) -> Packed | None:
        """A row for each output."""
        return pack(weight.detach().t().contiguous())

    def _unpacked(self) -> Tensor:
        return unpack(self.packed(), self.weight.shape[0]).t().contiguous()

    def forward(self, x: Tensor) -> Tensor:
        """As Conv1D."""
        taken = self.input_of(x)
        if taken is None:
            return Conv1D.forward(self, x)
        packed = self.elsa_values, self.elsa_columns, self.elsa_starts
        return torch.ops.elsa.linear(taken, *packed, self.bias, self.weight.shape[0])
