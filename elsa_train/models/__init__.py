"""Networks of the paper, small ones for digits and text (flax linen, called with `train=`)."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from numpy.typing import NDArray

from elsa_train._errors import BadRecipe
from elsa_train._own import blaming, find_own, is_own

__all__ = ["GPT", "DigitsNet", "ResNet50", "SpeedyResNet", "WideResNet", "build"]


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


_MODELS: dict[str, Callable[..., nn.Module]] = {
    "digits": DigitsNet,
    "gpt": GPT,
    "resnet50": ResNet50,
    "speedyresnet": SpeedyResNet,
    "wideresnet": WideResNet,
}


def build(name: str, *, num_classes: int, width: int = 0, **settings: Any) -> nn.Module:
    """Make a bundled model, or your own: `module:name`; width 0 is the paper's.

    Your own is called with `num_classes=`, and with those of `width=`, `dropout=` and `dtype=` that
    are not the usual ones, and returns a flax linen module that is called with `train=`.
    """
    if is_own(name):
        return _own(name, num_classes, {"width": width, **settings})
    if name not in _MODELS:
        raise BadRecipe(f"model {name!r}: found none such, expected one of {sorted(_MODELS)}")
    sized = {"width": width} if width else {}
    return _MODELS[name](num_classes=num_classes, **sized, **settings)


def _own(name: str, num_classes: int, settings: Mapping[str, Any]) -> nn.Module:
    own = find_own("model", name, "to call with num_classes=")
    usual = {"width": 0, "dropout": 0.0, "dtype": jnp.float32}
    unusual = {k: v for k, v in settings.items() if k not in usual or v != usual[k]}
    try:
        model = own(num_classes=num_classes, **unusual)
    except Exception as error:
        raise BadRecipe(f"model {name!r}: {blaming(error)}") from None
    if not isinstance(model, nn.Module):
        raise BadRecipe(f"model {name!r}: gave {type(model).__name__}, expected flax.linen.Module")
    return model


def total_statistics(batches: Sequence[Mapping[str, NDArray[Any]]]) -> dict[str, NDArray[Any]]:
    """Combine mean and variance of equally large batches: the law of total variance.

    >>> one = {"norm/mean": np.array([1.0]), "norm/var": np.array([4.0])}
    >>> two = {"norm/mean": np.array([3.0]), "norm/var": np.array([2.0])}
    >>> {name: value.tolist() for name, value in total_statistics([one, two]).items()}
    {'norm/mean': [2.0], 'norm/var': [4.0]}
    """
    result = {}
    for name in batches[0]:
        if name.endswith("mean"):
            base = name.removesuffix("mean")
            means = np.stack([b[name] for b in batches]).astype(np.float64)
            variances = np.stack([b[f"{base}var"] for b in batches]).astype(np.float64)
            result[name] = means.mean(0).astype(np.float32)
            result[f"{base}var"] = (variances.mean(0) + means.var(0)).astype(np.float32)
    return result
