"""Where a network goes: a file, shards with their index, a model directory; or a stream."""

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from elsa_format._container import TensorInfo
from elsa_format._container.index import index_bytes, is_index, is_url, shard_names
from elsa_format._directory import weights_file
from elsa_format._directory.target import DirectoryTarget, weights_in
from elsa_format._errors import ConflictingOptions, RemoteError
from elsa_format._options import check_int
from elsa_format._output import Output, Place, Target, Transaction, is_special, localized
from elsa_format._storage import open_storage
from elsa_format._storage.shards import read_index, shard_source
from elsa_format._threads import Progress, no_progress


def check_shard_size(target: Target, max_size: int | None) -> None:
    """Refuse a size of shards that none can have, or for a target that is not written in shards."""
    if max_size is None:
        return
    check_int("max_shard_size", max_size, low=1)
    if not is_index(target):
        raise ConflictingOptions(
            "the output is one file",
            "{max_shard_size} is for one that ends in .index.json, or a model directory",
        )


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


class Destination(Transaction):
    """The outputs of a network: one, or those of its shards with their index; and side files."""

    def __init__(self, *, force: bool) -> None:
        super().__init__(force=force)
        self.weights: list[Output] = []
        self.names: Sequence[str] = ()
        """Of the files that an index names."""

    def finish(
        self,
        tensors: Sequence[Iterable[TensorInfo]],
        extra_metadata: Mapping[str, Any],
        progress: Progress = no_progress,
    ) -> None:
        """Everything is written: let it appear, and an index of each file's tensors last."""
        if self.index is not None:
            self.index.write_at(0, index_bytes(self.names, tensors, extra_metadata))
        self.commit(progress)


@contextlib.contextmanager
def open_destination(
    target: Target,
    count: int = 1,
    *,
    files: Sequence[Place] = (),
    force: bool = False,
    in_order: bool = False,
) -> Iterator[Destination]:
    """The outputs for a target, discarded unless they are committed.

    Weights go to `files`; if none are given, to `count` shards of an index, or to the target.
    """
    with Destination(force=force) as destination:
        if isinstance(target, DirectoryTarget):
            target.add_side_files(destination)
        if isinstance(target, str | os.PathLike) and is_index(target):
            destination.open_index(target)
            destination.names = shard_names(target, count)
            files = files or [sibling(target, name) for name in destination.names]
        if files:
            destination.weights = [destination.open_file(file) for file in files]
        else:
            destination.weights = [destination.open(target, in_order=in_order)]
        yield destination


def sibling(target: Place, name: str) -> Place:
    """The path or URL of a file beside another."""
    place = os.fspath(target)
    if is_url(place):
        return shard_source(place, name)  # type: ignore[return-value]
    return Path(place).parent / name


def written_size(target: Place) -> int | None:
    """Bytes of a file, of an index with its shards, of a directory's weights; None for a pipe."""
    target = weights_file(localized(target))
    if is_url(target):
        with contextlib.suppress(RemoteError):  # gone already
            return _size(_stored_weights(os.fspath(target)))
        return None
    if is_special(target) or not os.path.exists(target):  # or gone already
        return None
    return _size(target)


def _stored_weights(url: str) -> str:
    """A file in a store; of a folder, the one with the weights."""
    found = [] if url.endswith(".safetensors") or is_index(url) else weights_in(url)
    return f"{url.rstrip('/')}/{found[0]}" if len(found) == 1 else url


def _size(place: Place) -> int:
    """Bytes of a file, of an index with its shards."""
    if not is_url(place):
        size = os.path.getsize(place)
    else:
        with open_storage(place) as storage:
            size = storage.size or 0
    if is_index(place):
        size += sum(_size(sibling(place, name)) for name in read_index(place)[0].files)
    return size
