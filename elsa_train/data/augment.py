"""Augmentation and normalisation of a batch on the device."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from elsa_train._errors import BadRecipe

Change = Callable[[jax.Array], jax.Array]
Augment = Callable[[jax.Array, jax.Array, Change], jax.Array]
"""Of a key, images as they are stored, and what normalizes them."""


def normalize(images: jax.Array, mean: Sequence[float], std: Sequence[float]) -> jax.Array:
    """Subtract the mean and divide by the standard deviation of each channel."""
    return (images.astype(jnp.float32) - jnp.asarray(mean)) / jnp.asarray(std)


def random_shift(key: jax.Array, images: jax.Array, pad: int) -> jax.Array:
    """Pad each side with zeros and cut a window of the old size at a random place."""
    _, height, width, channels = images.shape
    padded = jnp.pad(images, [(0, 0), (pad, pad), (pad, pad), (0, 0)])
    offsets = jax.random.randint(key, (len(images), 2), 0, 2 * pad + 1)

    def cut(image: jax.Array, offset: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice(image, (offset[0], offset[1], 0), (height, width, channels))

    return jax.vmap(cut)(padded, offsets)


def random_flip(key: jax.Array, images: jax.Array) -> jax.Array:
    """Mirror each image left to right with probability 1/2."""
    flip = jax.random.bernoulli(key, 0.5, (len(images), 1, 1, 1))
    return jnp.where(flip, images[:, :, ::-1], images)


def _crop_flip(key: jax.Array, images: jax.Array) -> jax.Array:
    first, second = jax.random.split(key)
    return random_flip(second, random_shift(first, images, 4))


# The paper normalizes after padding, so that its border is black; that of the digits is the mean.
AUGMENTS: dict[str, Augment] = {
    "crop-flip": lambda key, images, normal: normal(_crop_flip(key, images)),
    "flip": lambda key, images, normal: random_flip(key, normal(images)),
    "none": lambda key, images, normal: normal(images),
    "shift": lambda key, images, normal: random_shift(key, normal(images), 1),
}


def augmentation(name: str) -> Augment:
    """Find an augmentation, with normalization: crop-flip (CIFAR), flip, shift (digits), none."""
    if name not in AUGMENTS:
        raise BadRecipe(f"augment {name!r}: found none such, expected one of {sorted(AUGMENTS)}")
    return AUGMENTS[name]
