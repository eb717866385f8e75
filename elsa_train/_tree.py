"""Names of the leaves of a pytree: the tensor names of the file."""

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding

from elsa_train._errors import TrainError

PyTree = Any


def names(tree: PyTree) -> PyTree:
    """Replace each leaf by its path, joined with slashes.

    >>> names({"conv": {"kernel": 0.0, "bias": 1.0}})
    {'conv': {'bias': 'conv/bias', 'kernel': 'conv/kernel'}}
    """
    return jax.tree_util.tree_map_with_path(lambda path, _: _name(path), tree)


def _name(path: tuple[Any, ...]) -> str:
    # Boxes around an array (flax's nnx.Param, nn.Partitioned) have it as their `value`: a network
    # has the same names with them and without.
    if len(path) > 1 and path[-1] == jax.tree_util.GetAttrKey("value"):
        path = path[:-1]
    return jax.tree_util.keystr(path, simple=True, separator="/")


def flatten(tree: PyTree) -> dict[str, Any]:
    """Return the leaves by name, in the order of the tree."""
    found: dict[str, Any] = {}
    for name, leaf in zip(jax.tree.leaves(names(tree)), jax.tree.leaves(tree), strict=True):
        if name in found:
            raise TrainError(f"two leaves of the tree are both called {name!r}")
        found[name] = leaf
    return found


def unflatten(template: PyTree, leaves: Mapping[str, Any]) -> PyTree:
    """Build a tree like the template from leaves by name."""

    def pick(name: str, like: Any) -> Any:
        if name not in leaves:
            raise TrainError(f"tensor {name!r} is missing")
        leaf = leaves[name]
        if leaf.shape != like.shape:
            raise TrainError(f"tensor {name!r}: found shape {leaf.shape}, expected {like.shape}")
        return leaf

    return jax.tree.map(pick, names(template), template)


def size(tree: PyTree) -> int:
    """Count the elements of all leaves."""
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def sharding_of(leaf: Any) -> NamedSharding | None:
    """Return how a leaf is split over a mesh, if it is."""
    sharding = None if isinstance(leaf, jax.core.Tracer) else getattr(leaf, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) else None
