"""ResNet-50: 25,610,152 parameters for 1000 classes, 53,120 of them statistics."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn


class ResNet50(nn.Module):
    """Bottleneck blocks 3, 4, 6, 3 with the stride in the 3x3 convolution."""

    num_classes: int = 1000
    width: int = 64
    blocks: tuple[int, ...] = (3, 4, 6, 3)
    dropout: float = 0.0
    momentum: float = 0.9
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        """Return the logits."""
        conv = partial(nn.Conv, use_bias=False, dtype=self.dtype)
        norm = partial(nn.BatchNorm, not train, momentum=self.momentum, dtype=self.dtype)
        x = x.astype(self.dtype)
        x = conv(self.width, (7, 7), (2, 2), padding=[(3, 3), (3, 3)], name="stem")(x)
        x = nn.relu(norm(name="stem_norm")(x))
        x = nn.max_pool(x, (3, 3), (2, 2), padding="SAME")  # type: ignore[no-untyped-call]
        for stage, count in enumerate(self.blocks, 1):
            features = self.width * 2 ** (stage - 1)
            for block in range(1, count + 1):
                name = f"stage{stage}_block{block}"
                strides = (2, 2) if stage > 1 and block == 1 else (1, 1)
                y = nn.relu(
                    norm(name=f"{name}_norm1")(conv(features, (1, 1), name=f"{name}_conv1")(x))
                )
                y = conv(features, (3, 3), strides, name=f"{name}_conv2")(y)
                y = nn.relu(norm(name=f"{name}_norm2")(y))
                y = conv(4 * features, (1, 1), name=f"{name}_conv3")(y)
                # Scale 0: each block starts as the identity.
                y = norm(name=f"{name}_norm3", scale_init=nn.initializers.zeros)(y)
                if block == 1:
                    x = conv(4 * features, (1, 1), strides, name=f"{name}_shortcut")(x)
                    x = norm(name=f"{name}_shortcut_norm")(x)
                x = nn.relu(x + y)
        x = jnp.mean(x, axis=(1, 2))
        x = nn.Dropout(self.dropout, deterministic=not train)(x)
        return nn.Dense(self.num_classes, dtype=self.dtype, name="head")(x).astype(jnp.float32)
