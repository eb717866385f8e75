"""SpeedyResNet: 4,658,140 parameters at width 64 and 10 classes, 3,584 of them statistics."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn


class SpeedyResNet(nn.Module):
    """Two stem convolutions, three groups of doubling width, global max, linear head."""

    num_classes: int = 10
    width: int = 64
    dropout: float = 0.0
    momentum: float = 0.9
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        """Return the logits."""
        conv = partial(nn.Conv, use_bias=False, dtype=self.dtype)
        norm = partial(nn.BatchNorm, not train, momentum=self.momentum, dtype=self.dtype)
        x = x.astype(self.dtype)
        x = conv(12, (2, 2), padding="VALID", use_bias=True, name="whiten")(x)
        x = conv(self.width, (1, 1), use_bias=True, name="project")(x)
        x = nn.relu(x)
        for i in (1, 2, 3):
            features = self.width * 2**i
            x = conv(features, (3, 3), name=f"group{i}_conv1")(x)
            x = nn.max_pool(x, (2, 2), (2, 2))  # type: ignore[no-untyped-call]
            x = nn.relu(norm(name=f"group{i}_norm1")(x))
            y = conv(features, (3, 3), name=f"group{i}_conv2")(x)
            x = x + nn.relu(norm(name=f"group{i}_norm2")(y))
        x = jnp.max(x, axis=(1, 2))
        x = nn.Dropout(self.dropout, deterministic=not train)(x)
        x = nn.Dense(self.num_classes, use_bias=False, dtype=self.dtype, name="head")(x)
        return x.astype(jnp.float32) / 8
