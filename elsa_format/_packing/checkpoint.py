"""What can be packed: the interface of all kinds of checkpoint."""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elsa_format._closing import Closing
from elsa_format._container.header import RESERVED, TensorInfo
from elsa_format._errors import InvalidCheckpoint, NoGraph, TensorMismatch

PathLike = str | os.PathLike[str]


class Checkpoint(Closing, ABC):
    """Named tensors that are read block by block, as often as needed.

    >>> from elsa_format.plugins import DTYPES
    >>> class Ones(Checkpoint):
    ...     path, tensors = "<ones>", {"w": TensorInfo("w", DTYPES["F32"], (2, 3))}
    ...
    ...     def blocks(self, name: str, size: int) -> Iterator[NDArray[np.uint8]]:
    ...         yield np.ones(6, np.float32).view(np.uint8)
    >>> Ones().nestable("w"), Ones().groups
    (True, [['w']])

    A kind of file has a subclass that is called with the path. Other packages register theirs as
    entry points of the group `elsa.checkpoints`, under each suffix that such files have, and under
    the name of a library if it takes dictionaries of that library's arrays, too.
    """

    path: str
    """For messages."""
    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, str] = {}
    about: Mapping[str, Any] = {}
    """What else an index says, where there is one."""

    @classmethod
    def matches(cls, path: str, first: bytes) -> bool:
        """Whether a file with a registered suffix is of this kind, by its first 64 bytes."""
        return True

    @abstractmethod
    def blocks(self, name: str, size: int) -> Iterator[NDArray[np.uint8]]:
        """The tensor's bytes, `size` a block but for the last; each may reuse the memory."""

    def nestable(self, name: str) -> bool:
        """Whether the tensor carries counters unless told otherwise."""
        info = self.tensors[name]
        return info.dtype.nestable and len(info.shape) >= 2

    @property
    def groups(self) -> Sequence[Sequence[str]]:
        """The tensors of each file, where there are several."""
        return [list(self.tensors)]

    def check_unchanged(self) -> None:
        """Raise InputChanged if a file was modified since it was opened, where that can be told."""

    def check_template(self, template: PathLike, packed: PathLike) -> None:
        """Refuse places that a template could not point to, before anything is packed."""
        raise NoGraph(f"{self.path}: has no graph to write a template of; ONNX has")

    def write_template(self, template: PathLike, packed: PathLike, *, force: bool = False) -> None:
        """Write the graph, its weights pointing into the packed file."""
        self.check_template(template, packed)

    def refuse_reserved(self) -> None:
        """Refuse tensors that have names of the format's own."""
        for name in self.tensors:
            if name.startswith(RESERVED) or name == "__metadata__":
                raise InvalidCheckpoint(f"{self.path}: tensor {name!r}: the name is reserved")


class Adapted(Checkpoint):
    """An object that does what a checkpoint does, without being derived from one."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.path, self.tensors, self.metadata = inner.path, inner.tensors, inner.metadata

    def blocks(self, name: str, size: int) -> Iterator[NDArray[np.uint8]]:
        return self._inner.blocks(name, size)  # type: ignore[no-any-return]

    def nestable(self, name: str) -> bool:
        return self._inner.nestable(name)  # type: ignore[no-any-return]

    def close(self) -> None:
        self._inner.close()


def same_tensor(
    one: TensorInfo, other: TensorInfo | None, where: str, *, dtype: bool = True
) -> None:
    """Raise TensorMismatch unless both have the same shape and, if asked, the same dtype."""
    if other is None:
        raise TensorMismatch(f"{where}: tensor {one.name!r} is missing")
    if other.shape != one.shape:
        raise TensorMismatch(
            f"{where}: tensor {one.name!r}: shape {list(other.shape)}, expected {list(one.shape)}"
        )
    if dtype and other.dtype != one.dtype:
        raise TensorMismatch(
            f"{where}: tensor {one.name!r}: dtype {other.dtype.name}, expected {one.dtype.name}"
        )
