"""A small batch-norm convnet for 8x8 images."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn


class DigitsNet(nn.Module):
    """Three 3x3 convolutions, each with batch norm and ReLU, global mean, linear head."""

    num_classes: int = 10
    width: int = 32
    dropout: float = 0.0
    momentum: float = 0.9
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        """Return the logits."""
        x = x.astype(self.dtype)
        for i, features in enumerate([self.width, 2 * self.width, 2 * self.width]):
            x = nn.Conv(features, (3, 3), use_bias=False, dtype=self.dtype, name=f"conv{i + 1}")(x)
            x = nn.BatchNorm(
                not train, momentum=self.momentum, dtype=self.dtype, name=f"norm{i + 1}"
            )(x)
            x = nn.relu(x)
            if i == 0:
                x = nn.max_pool(x, (2, 2), (2, 2))  # type: ignore[no-untyped-call]
        x = jnp.mean(x, axis=(1, 2))
        x = nn.Dropout(self.dropout, deterministic=not train)(x)
        return nn.Dense(self.num_classes, dtype=self.dtype, name="head")(x).astype(jnp.float32)
