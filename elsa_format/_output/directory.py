"""A model directory as an output: weights, and copies of all that another directory has besides."""

import contextlib
import errno
import filecmp
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from elsa_format._container.index import is_index
from elsa_format._container.listing import Entry, Listing, is_inside
from elsa_format._errors import InvalidOption, OutputExists
from elsa_format._output import Target, is_special, localized
from elsa_format._output.atomic import AtomicFile, new_folders
from elsa_format._storage.directory import (
    WeightsName,
    candidates,
    is_directory,
    side_files,
    weights_file,
)
from elsa_format._storage.shards import read_index

T = TypeVar("T", bound=Target)
COPIED = 1 << 20
"""Bytes copied at a time."""
OPEN = 200
"""Side files that have no name before they are whole; more of them wait under temporary ones."""


@dataclass(frozen=True)
class InDirectory(os.PathLike[str]):
    """Where weights go in a directory; with them come copies of another's side files."""

    source: Path
    folder: Path
    name: str

    def __fspath__(self) -> str:
        return os.path.join(self.folder, self.name)

    @contextlib.contextmanager
    def side_files(self, *, force: bool = False) -> Iterator[list[AtomicFile]]:
        """Copies that wait for their names; folders that are empty afterwards go again."""
        if os.path.lexists(self.folder) and not self.folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(self.folder))
        refuse_others(self.folder, self.name)
        names, _ = side_files(self.source, self.folder)
        with contextlib.ExitStack() as stack:
            stack.enter_context(new_folders(self.folder))
            copies = []
            for name in names:
                out = self.folder / name
                if out.exists() and filecmp.cmp(self.source / name, out, shallow=False):
                    continue
                stack.enter_context(new_folders(out.parent))
                copies.append(AtomicFile(out, force=force))
                stack.callback(copies[-1].discard)
                _copy(self.source / name, copies[-1])
                if len(copies) > OPEN:
                    copies[-1].put_away()
            yield copies

    @property
    def not_copied(self) -> list[str]:
        """Weights of the directory that are neither copied nor what is read."""
        read = weights_file(self.source, torch=True)
        own = {read.name, *(read_index(read)[0].files if is_index(read) else ())}
        left = side_files(self.source, self.folder)[1]
        return [str(name) for name in left if str(name) not in own]

    def listing(self) -> Listing:
        """The list of the files that will be here."""
        return list_directory(self.source, self.name, self.folder)


def list_directory(folder: Path, weights: str, apart: Path | None = None) -> Listing:
    """The list of a directory's side files, for weights of this name."""
    entries = {}
    for path in side_files(folder, apart)[0]:
        name = path.as_posix()
        if not is_inside(name):
            raise InvalidOption(f"{folder / path}: such a name cannot be listed; rename the file")
        with open(folder / path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            entries[name] = Entry(os.fstat(file.fileno()).st_size, digest)
    return Listing(weights, entries)


def refuse_others(folder: Path, name: str) -> None:
    """What is written is what is found afterwards, by others too."""
    for other in candidates(folder) if folder.is_dir() else ():
        if other != name and not _hides(name, other):
            raise OutputExists(
                f"{folder / other}: is there already, and would be taken for {name}; "
                "remove it, or write to another directory"
            )


def _hides(name: str, other: str) -> bool:
    """Whether loaders take one name where both are."""
    one, two = WeightsName.parse(name), WeightsName.parse(other)
    return one is not None and two is not None and not one.variants and bool(two.variants)


def _copy(source: Path, output: AtomicFile) -> None:
    position = 0
    with open(source, "rb", buffering=0) as file:
        while block := file.read(COPIED):
            output.write_at(position, block)
            position += len(block)


def in_directory(
    source: Any, target: T, *, variant: str | None = None, sharded: bool = False
) -> T | str | InDirectory:
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
    return InDirectory(Path(source), Path(place), str(name))  # type: ignore[arg-type]


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
