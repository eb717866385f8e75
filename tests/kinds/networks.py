"""The networks that are held, and what their levels are by definition."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
from bits import level_by_definition

import elsa_format as elsa

Weights = Mapping[str, Any]
METADATA = {"format": "pt"}


@dataclass(frozen=True, eq=False)
class Network:
    """Arrays with counters, and which of them are nested or differ from level to level."""

    tensors: dict[str, np.ndarray]
    nested: tuple[str, ...]
    names: tuple[str, ...]
    bits: int = 2
    per_level: dict[str, list[np.ndarray]] = field(default_factory=dict)

    def level(self, level: Any) -> dict[str, np.ndarray]:
        """A level as the specification defines it."""
        if level == "dense":
            return self.tensors
        found = dict(self.tensors)
        for name in self.nested:
            found[name] = level_by_definition(found[name], self.bits, level)
        return found | {name: variants[level - 1] for name, variants in self.per_level.items()}

    def write(self, out: Any) -> None:
        """Write it as an ELSA file."""
        elsa.write(
            out,
            self.tensors,
            levels=[
                elsa.LevelSpec(name, metrics={"accuracy": 1 - 1 / at})
                for at, name in enumerate(self.names, 2)
            ],
            nested=self.nested,
            bits=self.bits,
            per_level=self.per_level,
            metadata=METADATA,
        )


def embedded(rng: np.random.Generator, array: np.ndarray, levels: int) -> np.ndarray:
    """Weights with counters: the number of each is the same whatever the seed."""
    spread = np.minimum(np.arange(array.size) % 10, levels + 1) % (levels + 1)
    return elsa.embed_counters(array, rng.permutation(spread).reshape(array.shape), bits=2)


@cache
def rich() -> Network:
    """Wide and narrow rows, an empty tensor, dtypes of several widths, tensors of each level."""
    rng = np.random.default_rng(7)
    shapes = {"wide": (3, 70_001), "narrow": (500, 3), "cube": (4, 5, 6), "empty": (3, 0)}
    weights = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    weights["half"] = rng.standard_normal((33, 9)).astype(np.float16)
    weights["brain"] = rng.standard_normal((16, 8)).astype(ml_dtypes.bfloat16)
    weights["double"] = rng.standard_normal((7, 11))
    tensors = {name: embedded(rng, array, 3) for name, array in weights.items()}
    tensors["bias"] = rng.standard_normal(13, np.float32)
    tensors["steps"] = np.arange(5)
    tensors["mean"] = rng.standard_normal(11)
    variants = {"mean": list(rng.standard_normal((3, 11)))}
    return Network(tensors, tuple(weights), ("small", "medium", "large"), per_level=variants)


@cache
def plain(seed: int = 0) -> Network:
    """Two levels of few weights; networks of other seeds have the same shapes and counts."""
    rng = np.random.default_rng(seed)
    weights = {
        "a/kernel": rng.standard_normal((24, 16), np.float32),
        "c/kernel": rng.standard_normal((16, 8)).astype(ml_dtypes.bfloat16),
    }
    tensors = {name: embedded(rng, array, 2) for name, array in weights.items()}
    tensors["b/bias"] = rng.standard_normal(16, np.float32)
    tensors["d/mean"] = rng.standard_normal(8, np.float32)
    variants = {"d/mean": list(rng.standard_normal((2, 8), np.float32))}
    return Network(tensors, tuple(weights), ("75%", "50%"), per_level=variants)


@cache
def tiny() -> Network:
    """So few bytes that each can be spoiled."""
    rng = np.random.default_rng(1)
    weights = embedded(rng, rng.standard_normal((3, 5), np.float32), 1)
    return Network({"w": weights, "b": np.ones(2, np.float32)}, ("w",), ("one",))
