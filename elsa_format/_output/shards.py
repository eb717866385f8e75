"""Where a network in shards goes: files that take their names together, the index last."""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from elsa_format._container.index import is_index, shard_names
from elsa_format._options import whole
from elsa_format._output import Output, Target, is_special, open_output
from elsa_format._output.atomic import AtomicFile, commit_together
from elsa_format._storage.shards import read_index


def check_shard_size(target: Target, max_size: int | None) -> None:
    """Refuse a size of shards that none can have, or for a target that is not written in shards."""
    if max_size is None:
        return
    whole("max_shard_size", max_size, low=1)
    if not is_index(target):
        raise TypeError("max_shard_size is for an output that ends in .index.json")


def group_tensors(
    sizes: Mapping[str, int], given: Sequence[Sequence[str]], max_size: int | None
) -> list[list[str]]:
    """Which tensors share a file: as given, or as many as fit, in order.

    A tensor that is larger than `max_size` has a file of its own.

    >>> group_tensors({"a": 3, "b": 3, "c": 9, "d": 1}, [["a", "b", "c", "d"]], 6)
    [['a', 'b'], ['c'], ['d']]
    """
    if max_size is None:
        return [list(names) for names in given]
    groups: list[list[str]] = []
    room = -1
    for name, size in sizes.items():
        if size > room:
            groups.append([])
            room = max_size
        groups[-1].append(name)
        room -= size
    return groups


class Destination:
    """The outputs of a network: one, or those of its shards and their index."""

    def __init__(self, outputs: Sequence[Output], index: "_ShardSet | None" = None) -> None:
        self.outputs, self._index = outputs, index

    @property
    def sharded(self) -> bool:
        """Whether there is an index."""
        return self._index is not None

    @property
    def names(self) -> list[str]:
        """The files of the shards."""
        return self._index.names if self._index else []

    def commit(self, index: bytes = b"") -> None:
        """Everything is written: let it appear."""
        if self._index is not None:
            self._index.commit(index)
        else:
            for output in self.outputs:
                output.commit()


@contextlib.contextmanager
def open_destination(
    target: Target, count: int, *, force: bool = False, in_order: bool = False
) -> Iterator[Destination]:
    """The outputs for a target, `count` if it is an index; discarded unless they are committed."""
    if isinstance(target, str | os.PathLike) and is_index(target):
        files = _ShardSet(Path(target), count, force=force)
        try:
            yield Destination(files.shards, files)
        finally:
            files.discard()
    else:
        with open_output(target, force=force, in_order=in_order) as output:
            yield Destination([output])


class _ShardSet:
    """Shards and their index."""

    def __init__(self, index: Path, count: int, *, force: bool) -> None:
        self.path, self.force = index, force
        self.names = shard_names(index, count)
        self.shards: list[AtomicFile] = []
        self._index = AtomicFile(index, force=force)
        try:
            for name in self.names:
                self.shards.append(AtomicFile(index.parent / name, force=force))
        except BaseException:
            self.discard()
            raise

    def commit(self, index: bytes) -> None:
        """Let the shards appear, then the index."""
        self._index.write_at(0, index)
        old = self._index.path if self.force else None
        commit_together([*self.shards, self._index], instead_of=old)

    def discard(self) -> None:
        """Leave nothing of what has no name yet."""
        for file in (*self.shards, self._index):
            file.discard()


def written_size(target: str | os.PathLike[str]) -> int | None:
    """Bytes of an output, a file or an index with its shards; None for pipes and devices."""
    if is_special(target) or not os.path.exists(target):  # or gone already
        return None
    size = os.path.getsize(target)
    if is_index(target):
        size += sum(os.path.getsize(Path(target).parent / n) for n in read_index(target)[0].files)
    return size
