"""Tensors kept for later: in memory up to a limit, beyond it in a temporary file without a name."""

import tempfile
from collections import defaultdict
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from elsa_converters.torch._tensors import bytes_of


class _InFile(NamedTuple):
    """Where a tensor's bytes are."""

    at: int
    nbytes: int
    dtype: torch.dtype
    shape: torch.Size
    device: torch.device


class Store:
    """Nested tuples, lists and mappings of tensors, put away and taken back."""

    def __init__(self, limit: int) -> None:
        self._left = limit
        self._file: Any = None
        self._end = 0
        self._free: defaultdict[int, list[int]] = defaultdict(list)

    def put(self, tree: Any) -> Any:
        """What `get` makes the tree of again."""
        return tree_map(lambda leaf: self._put(leaf) if isinstance(leaf, Tensor) else leaf, tree)

    def get(self, kept: Any) -> Any:
        """The tree; its tensors must not be written to."""
        return tree_map(self._get, kept, is_leaf=_is_leaf)

    def drop(self, kept: Any) -> None:
        """Give back what a tree takes."""
        tree_map(self._drop, kept, is_leaf=_is_leaf)

    def close(self) -> None:
        """Give back the file."""
        if self._file is not None:
            self._file.close()

    def _put(self, tensor: Tensor) -> Any:
        nbytes = tensor.nbytes
        if nbytes <= self._left:
            self._left -= nbytes
            return tensor.detach().clone()  # a view would hold all it is a view of
        if self._file is None:
            self._file = tempfile.TemporaryFile(prefix="elsa-")  # noqa: SIM115
        free = self._free[nbytes]
        at = free.pop() if free else self._end
        self._end = max(self._end, at + nbytes)
        self._file.seek(at)
        self._file.write(bytes_of(tensor.cpu().contiguous()))
        return _InFile(at, nbytes, tensor.dtype, tensor.shape, tensor.device)

    def _get(self, leaf: Any) -> Any:
        if not isinstance(leaf, _InFile):
            return leaf
        memory = np.empty(leaf.nbytes, np.uint8)
        self._file.seek(leaf.at)
        self._file.readinto(memory)
        return torch.from_numpy(memory).view(leaf.dtype).reshape(leaf.shape).to(leaf.device)

    def _drop(self, leaf: Any) -> None:
        if isinstance(leaf, _InFile):
            self._free[leaf.nbytes].append(leaf.at)
        elif isinstance(leaf, Tensor):
            self._left += leaf.nbytes


def _is_leaf(value: Any) -> bool:
    return isinstance(value, _InFile)
