"""Trees of tensors in a store, and out of it again."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from elsa_converters.calibrate import Kept, Store
from elsa_converters.torch._tensors import bytes_of


class KeptTensor(NamedTuple):
    """A tensor's bytes in a store, and what else makes it a tensor."""

    kept: Kept
    dtype: torch.dtype
    shape: torch.Size
    device: torch.device


def put(store: Store, tree: Any) -> Any:
    """Keep the tensors of nested tuples, lists and mappings; `get` makes the tree of it again."""

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        own = leaf.detach().cpu().clone(memory_format=torch.contiguous_format)
        return KeptTensor(store.put(bytes_of(own)), leaf.dtype, leaf.shape, leaf.device)

    return tree_map(one, tree)


def get(tree: Any) -> Any:
    """The tree, with tensors of its own: modules may write to them."""

    def one(leaf: KeptTensor) -> Tensor:
        flat = torch.from_numpy(leaf.kept.get().copy())
        return flat.view(leaf.dtype).reshape(leaf.shape).to(leaf.device)

    return _map(one, tree)


def blank(tree: Any) -> Any:
    """The tree's tensors as others of the same shapes, without content or memory."""

    def one(leaf: KeptTensor) -> Tensor:
        return torch.zeros((), dtype=leaf.dtype, device=leaf.device).expand(leaf.shape)

    return _map(one, tree)


def drop(tree: Any) -> None:
    """Give back what a tree takes."""
    _map(lambda leaf: leaf.kept.drop(), tree)


def _map(function: Callable[[KeptTensor], Any], tree: Any) -> Any:
    return tree_map(lambda leaf: function(leaf) if _is_kept(leaf) else leaf, tree, is_leaf=_is_kept)


def _is_kept(value: Any) -> bool:
    return isinstance(value, KeptTensor)
