"""Where a network in shards goes: files that take their names together, the index last."""

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from elsa_format._container.header import TensorInfo
from elsa_format._container.index import index_bytes, is_index, is_url, shard_names
from elsa_format._errors import ConflictingOptions, RemoteError
from elsa_format._options import check_int
from elsa_format._output import (
    Output,
    Target,
    UnnamedOutput,
    commit_outputs,
    is_special,
    localized,
    open_output,
    open_unnamed,
)
from elsa_format._output.directory import InDirectory
from elsa_format._storage import open_storage
from elsa_format._storage.directory import candidates_of, weights_file
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


class Destination:
    """The outputs of a network: one, or those of its shards and their index.

    Others may take their names just before them.
    """

    def __init__(
        self,
        outputs: Sequence[Output],
        before: Sequence[UnnamedOutput],
        names: Sequence[str] = (),
        index: UnnamedOutput | None = None,
        *,
        force: bool = False,
    ) -> None:
        self.outputs, self._before, self._names, self._index = outputs, before, names, index
        self._force = force

    @property
    def sharded(self) -> bool:
        """Whether there is an index."""
        return self._index is not None

    def commit(
        self,
        tensors: Sequence[Iterable[TensorInfo]],
        extra_metadata: Mapping[str, Any],
        progress: Progress = no_progress,
    ) -> None:
        """Everything is written: let it appear, and an index of each file's tensors last.

        Progress is that of sending it to a store.
        """
        outputs = [*self._before, *self.outputs]
        if self._index is not None:
            self._index.write_at(0, index_bytes(self._names, tensors, extra_metadata))
            outputs.append(self._index)
        commit_outputs(outputs, renew=self.sharded and self._force, progress=progress)


@contextlib.contextmanager
def open_destination(
    target: Target, count: int, *, force: bool = False, in_order: bool = False
) -> Iterator[Destination]:
    """The outputs for a target, `count` if it is an index; discarded unless they are committed."""
    with contextlib.ExitStack() as stack:
        before: Sequence[UnnamedOutput] = ()
        if isinstance(target, InDirectory):
            before = stack.enter_context(target.side_files(force=force))
        if not isinstance(target, str | os.PathLike) or not is_index(target):
            output = stack.enter_context(open_output(target, force=force, in_order=in_order))
            yield Destination([output], before)
            return
        names = shard_names(target, count)
        index = open_unnamed(target, force=force)
        stack.callback(index.discard)
        files = []
        for name in names:
            files.append(open_unnamed(sibling(target, name), force=force, beside=index))
            stack.callback(files[-1].discard)
        yield Destination(files, before, names, index, force=force)


def sibling(target: str | os.PathLike[str], name: str) -> str | os.PathLike[str]:
    """The path or URL of a file beside another."""
    place = os.fspath(target)
    if is_url(place):
        return shard_source(place, name)  # type: ignore[return-value]
    return Path(place).parent / name


def written_size(target: str | os.PathLike[str]) -> int | None:
    """Bytes of a file, of an index with its shards, of a directory's weights; None for a pipe."""
    target = weights_file(localized(target))
    if is_url(target):
        with contextlib.suppress(RemoteError):  # gone already
            return _stored_size(_stored_weights(os.fspath(target)))
        return None
    if is_special(target) or not os.path.exists(target):  # or gone already
        return None
    size = os.path.getsize(target)
    if is_index(target):
        size += sum(os.path.getsize(Path(target).parent / n) for n in read_index(target)[0].files)
    return size


def _stored_weights(url: str) -> str:
    """A file in a store; of a folder, the one with the weights."""
    if url.endswith(".safetensors") or is_index(url):
        return url
    from elsa_format._storage.fsspec import list_store  # only where there are stores

    found = candidates_of(list_store(url))
    return f"{url.rstrip('/')}/{found[0]}" if len(found) == 1 else url


def _stored_size(url: str | os.PathLike[str]) -> int:
    """Bytes of a file in a store, of an index with its shards."""
    with contextlib.closing(open_storage(url)) as storage:
        size = storage.size or 0
    if is_index(url):
        size += sum(_stored_size(sibling(url, name)) for name in read_index(url)[0].files)
    return size
