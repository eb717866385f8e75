"""A small decoder-only transformer over bytes."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

# A byte's own embedding outweighs at first what the blocks add to it: a model so small learns in
# 150 steps what takes it 250 if it does not.
LARGE, SMALL = nn.initializers.normal(0.5), nn.initializers.normal(0.02)


class Block(nn.Module):
    """Causal self-attention, then two layers with GELU, each after a norm and added to its input.

    Its layers have no biases: whatever is not zero is frozen with the first level, so a bias would
    stay for good what the sparsest network made of it.
    """

    heads: int
    dropout: float
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Return the sum of the input and what both parts add to it."""
        batch, length, width = x.shape
        linear = partial(nn.Dense, use_bias=False, dtype=self.dtype)
        norm = partial(nn.LayerNorm, dtype=self.dtype)
        drop = nn.Dropout(self.dropout, deterministic=not train)

        queries, keys, values = jnp.split(
            linear(3 * width, name="qkv")(norm(name="norm1")(x)), 3, -1
        )
        split = (batch, length, self.heads, width // self.heads)
        queries, keys, values = (y.reshape(split) for y in (queries, keys, values))
        scores = jnp.einsum("bqhd,bkhd->bhqk", queries, keys) / (width // self.heads) ** 0.5
        past = jnp.tril(jnp.ones((length, length), bool))
        weights = nn.softmax(jnp.where(past, scores, -1e9))
        seen = jnp.einsum("bhqk,bkhd->bqhd", weights, values).reshape(batch, length, width)
        x = x + drop(linear(width, kernel_init=SMALL, name="out")(seen))

        y = nn.gelu(linear(4 * width, name="up")(norm(name="norm2")(x)))
        added: jax.Array = drop(linear(width, kernel_init=SMALL, name="down")(y))
        return x + added


class GPT(nn.Module):
    """Embeddings of bytes and places, blocks, norm, linear head: logits of the next byte."""

    num_classes: int = 256
    width: int = 64
    layers: int = 4
    context: int = 128
    dropout: float = 0.0
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        """Return the logits after each of the bytes."""
        places = self.param("places", LARGE, (self.context, self.width))
        embed = nn.Embed(
            self.num_classes, self.width, embedding_init=LARGE, dtype=self.dtype, name="embed"
        )
        x = embed(x) + places[: x.shape[1]].astype(self.dtype)
        heads = self.width // 32 if self.width % 32 == 0 else 1
        for number in range(1, self.layers + 1):
            x = Block(heads, self.dropout, self.dtype, name=f"block{number}")(x, train)
        x = nn.LayerNorm(dtype=self.dtype, name="norm")(x)
        return nn.Dense(self.num_classes, dtype=self.dtype, name="head")(x).astype(jnp.float32)
