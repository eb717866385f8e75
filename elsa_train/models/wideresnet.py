"""WideResNet-28-10: 36,554,836 parameters for 100 classes, 17,952 of them statistics."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn


class WideResNet(nn.Module):
    """Pre-activation residual blocks in three groups; depth 28 and width 10 are the paper's."""

    num_classes: int = 100
    depth: int = 28
    width: int = 10
    dropout: float = 0.0
    momentum: float = 0.9
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        """Return the logits."""
        conv = partial(nn.Conv, use_bias=False, dtype=self.dtype)
        norm = partial(nn.BatchNorm, not train, momentum=self.momentum, dtype=self.dtype)
        x = conv(16, (3, 3), name="stem")(x.astype(self.dtype))
        for group in (1, 2, 3):
            features = 16 * self.width * 2 ** (group - 1)
            for block in range(1, (self.depth - 4) // 6 + 1):
                name = f"group{group}_block{block}"
                strides = (2, 2) if group > 1 and block == 1 else (1, 1)
                y = nn.relu(norm(name=f"{name}_norm1")(x))
                # A block that changes the shape takes its shortcut after the activation.
                if block == 1:
                    x = conv(features, (1, 1), strides, name=f"{name}_shortcut")(y)
                y = conv(features, (3, 3), strides, name=f"{name}_conv1")(y)
                y = nn.relu(norm(name=f"{name}_norm2")(y))
                y = nn.Dropout(self.dropout, deterministic=not train)(y)
                x = x + conv(features, (3, 3), name=f"{name}_conv2")(y)
        x = jnp.mean(nn.relu(norm(name="norm")(x)), axis=(1, 2))
        return nn.Dense(self.num_classes, dtype=self.dtype, name="head")(x).astype(jnp.float32)
