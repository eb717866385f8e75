"""Where a network goes: a file, shards with their index, a model directory; or a stream."""

import contextlib
import errno
import filecmp
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from elsa_format._container import TensorInfo
from elsa_format._container.index import index_bytes, is_index, is_url, shard_names, shown
from elsa_format._directory import (
    MANIFEST,
    SHIP,
    WeightsName,
    candidates,
    candidates_of,
    is_directory,
    side_files,
    weights_file,
)
from elsa_format._directory.manifest import make_manifest
from elsa_format._errors import ConflictingOptions, OutputExists, RemoteError
from elsa_format._options import check_int
from elsa_format._output import Output, Place, Target, Transaction, is_special, localized
from elsa_format._storage import open_storage
from elsa_format._storage.shards import read_index, shard_source
from elsa_format._threads import Progress, no_progress

T = TypeVar("T", bound=Target)
OPEN = 200
"""Side files that have no name before they are whole; more of them wait under temporary ones."""
COPIED = 1 << 20
"""Bytes that are read at a time."""


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


# --- Model directories ---------------------------------------------------------------------------


@dataclass(frozen=True)
class DirectoryTarget(os.PathLike[str]):
    """Where weights go in a directory; with them come copies of another's side files."""

    source: Path | None
    """The directory that is copied, if there is one."""
    folder: str
    """A path or URL."""
    name: str
    has_manifest: bool
    """Whether there is a list of the files, as `fetch` needs."""
    made: Mapping[str, bytes]
    """Side files that no directory has, or in place of those it has."""

    def __fspath__(self) -> str:
        return self.place(self.name)

    def place(self, name: str) -> str:
        """The path or URL of a file in the directory."""
        if is_url(self.folder):
            return f"{self.folder.rstrip('/')}/{name}"
        return os.path.join(self.folder, name)

    def add_side_files(self, transaction: Transaction) -> None:
        """Add copies of all side files that are not there yet, and a manifest if there is one."""
        if os.path.lexists(self.folder) and not os.path.isdir(self.folder):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), self.folder)
        refuse_others(self.folder, self.name)
        transaction.make_folder(self)
        copied = side_files(self.source, self._apart)[0] if self.source else []
        for name in copied:
            out = self.place(name.as_posix())
            assert self.source is not None
            if name.as_posix() in self.made or _holds(out, self.source / name):
                continue
            transaction.make_folder(out)
            copy = transaction.open_file(out)
            copy_file(self.source / name, copy)
            if len(transaction.outputs) > OPEN:
                copy.put_away()
        for made, content in self.made.items():
            transaction.make_folder(self.place(made))
            transaction.open_file(self.place(made)).write_at(0, content)
        if self.has_manifest:
            manifest = make_manifest(self.source, self.name, self._apart, self.made)
            transaction.open_file(self.place(MANIFEST)).write_at(0, manifest.to_bytes())

    @property
    def not_copied(self) -> list[str]:
        """Weights of the directory that are neither copied nor what is read."""
        if self.source is None:
            return []
        read = weights_file(self.source, torch=True)
        own = {read.name, *(read_index(read)[0].files if is_index(read) else ())}
        left = side_files(self.source, self._apart)[1]
        return [str(name) for name in left if str(name) not in own]

    @property
    def _apart(self) -> Path | None:
        return None if is_url(self.folder) else Path(self.folder)


def copy_file(path: Path, output: Output) -> None:
    """Write a file's bytes into an output."""
    with open(path, "rb", buffering=0) as file:
        while block := file.read(COPIED):
            output.write_at(file.tell() - len(block), block)


def refuse_others(folder: str, name: str) -> None:
    """What is written is what is found afterwards, by others too."""
    for other in weights_in(folder):
        if other != name and not _hides(name, other):
            raise OutputExists(
                f"{shown(folder).rstrip('/')}/{other}: is there already, and would be taken for "
                f"{name}; remove it, or write to another directory"
            )


def weights_in(folder: str) -> list[str]:
    """What may be meant by the weights in a folder, here or in a store."""
    if not is_url(folder):
        return candidates(Path(folder)) if os.path.isdir(folder) else []
    from elsa_format._storage.fsspec import list_store  # only where there are stores

    return candidates_of(list_store(folder))


def _holds(place: str, path: Path) -> bool:
    """Whether a file, here or in a store, holds what another does here."""
    if not is_url(place):
        return os.path.exists(place) and filecmp.cmp(path, place, shallow=False)
    try:
        with (
            open_storage(place) as storage,
            storage.reader(0, sys.maxsize) as reader,
            open(path, "rb") as file,
        ):
            if storage.size != os.fstat(file.fileno()).st_size:
                return False
            while data := reader.read(COPIED):
                if file.read(len(data)) != data:
                    return False
            return True
    except RemoteError:  # there is none, or writing says what is wrong
        return False


def _hides(name: str, other: str) -> bool:
    """Whether loaders take one name where both are."""
    one, two = WeightsName.parse(name), WeightsName.parse(other)
    return one is not None and two is not None and not one.variants and bool(two.variants)


def in_directory(
    source: Any,
    target: T,
    *,
    variant: str | None = None,
    sharded: bool = False,
    made: Mapping[str, bytes] | None = None,
) -> T | str | DirectoryTarget:
    """The target, or the file in it if both the source and the target are directories.

    So is a target that ends in a slash, or in neither `.safetensors` nor `.index.json`; and one
    that gets files which were `made` for it.
    """
    place = localized(target)
    folder_given = is_directory(source)
    if not goes_to_directory(source, place) and not made:
        return place
    found = weights_file(source, torch=True).name if folder_given else ""
    parsed = WeightsName.parse(found) or WeightsName.parse(found, torch=True)
    assert parsed or not folder_given, "weights_file goes by these names"
    parsed = parsed or WeightsName(sharded=is_index(source))
    name = parsed.stored_as(variant)
    name = replace(name, sharded=name.sharded or sharded)
    folder = place if is_url(place) else os.fspath(Path(place))  # type: ignore[arg-type]
    copied = Path(source) if folder_given else None
    return DirectoryTarget(copied, folder, str(name), variant == SHIP, made or {})  # type: ignore[arg-type]


def goes_to_directory(source: Any, target: Target) -> bool:
    """Whether what is made of a source is a directory."""
    return is_directory(source) and names_directory(target)


def names_directory(target: Target) -> bool:
    """Whether a target is a directory, or would be one: it has not the name of a file."""
    if not isinstance(target, str | os.PathLike):
        return False
    path = os.fspath(target)
    if os.path.isdir(path) or path.endswith(("/", os.sep)):
        return True
    return not (path.endswith(".safetensors") or is_index(path) or is_special(path))
