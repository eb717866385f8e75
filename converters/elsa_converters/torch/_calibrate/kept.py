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


class Blank(NamedTuple):
    """What a tensor was like that is not needed any more."""

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

    def one(leaf: KeptTensor | Blank) -> Tensor:
        if isinstance(leaf, Blank):
            return torch.zeros(leaf.shape, dtype=leaf.dtype, device=leaf.device)
        flat = torch.from_numpy(leaf.kept.get().copy())
        if not flat.numel():  # which has no view of another type
            return torch.empty(leaf.shape, dtype=leaf.dtype, device=leaf.device)
        return flat.view(leaf.dtype).reshape(leaf.shape).to(leaf.device)

    return _map(one, tree)


def drop(tree: Any) -> Any:
    """Give back what a tree takes; what is left of it is zeros of the same shapes."""

    def one(leaf: KeptTensor | Blank) -> Blank:
        if isinstance(leaf, KeptTensor):
            leaf.kept.drop()
        return Blank(leaf.dtype, leaf.shape, leaf.device)

    return _map(one, tree)


def _map(function: Callable[[Any], Any], tree: Any) -> Any:
    return tree_map(lambda leaf: function(leaf) if _is_kept(leaf) else leaf, tree, is_leaf=_is_kept)


def _is_kept(value: Any) -> bool:
    return isinstance(value, KeptTensor | Blank)
