"""A model directory as an output: weights, and copies of all that another directory has besides."""

import errno
import filecmp
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from elsa_format._container.index import is_index, is_url, shown
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
from elsa_format._errors import OutputExists, RemoteError
from elsa_format._output import Output, Target, Transaction, is_special, localized
from elsa_format._storage import open_storage
from elsa_format._storage.shards import read_index

T = TypeVar("T", bound=Target)
OPEN = 200
"""Side files that have no name before they are whole; more of them wait under temporary ones."""
COPIED = 1 << 20
"""Bytes that are read at a time."""


@dataclass(frozen=True)
class DirectoryTarget(os.PathLike[str]):
    """Where weights go in a directory; with them come copies of another's side files."""

    source: Path
    folder: str
    """A path or URL."""
    name: str
    has_manifest: bool
    """Whether there is a list of the files, as `fetch` needs."""

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
        for name in side_files(self.source, self._apart)[0]:
            out = self.place(name.as_posix())
            if _holds(out, self.source / name):
                continue
            transaction.make_folder(out)
            copy = transaction.open_file(out)
            copy_file(self.source / name, copy)
            if len(transaction.outputs) > OPEN:
                copy.put_away()
        if self.has_manifest:
            manifest = make_manifest(self.source, self.name, self._apart)
            transaction.open_file(self.place(MANIFEST)).write_at(0, manifest.to_bytes())

    @property
    def not_copied(self) -> list[str]:
        """Weights of the directory that are neither copied nor what is read."""
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
    source: Any, target: T, *, variant: str | None = None, sharded: bool = False
) -> T | str | DirectoryTarget:
    """The target, or the file in it if both the source and the target are directories.

    So is a target that ends in a slash, or in neither `.safetensors` nor `.index.json`.
    """
    place = localized(target)
    if not goes_to_directory(source, place):
        return place
    found = weights_file(source, torch=True).name
    parsed = WeightsName.parse(found) or WeightsName.parse(found, torch=True)
    assert parsed is not None, "weights_file goes by these names"
    name = parsed.stored_as(variant)
    name = replace(name, sharded=name.sharded or sharded)
    folder = place if is_url(place) else os.fspath(Path(place))  # type: ignore[arg-type]
    return DirectoryTarget(Path(source), folder, str(name), variant == SHIP)  # type: ignore[arg-type]


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
