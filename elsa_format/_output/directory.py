"""A model directory as an output: weights, and copies of all that another directory has besides."""

import contextlib
import errno
import filecmp
import hashlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from elsa_format._container.index import is_index, is_url
from elsa_format._container.listing import Entry, Listing, is_inside
from elsa_format._errors import InvalidOption, OutputExists, RemoteError
from elsa_format._output import (
    COPIED,
    Target,
    UnnamedOutput,
    copy_file,
    is_special,
    localized,
    open_unnamed,
)
from elsa_format._output.atomic import AtomicFile, new_folders
from elsa_format._storage import open_storage
from elsa_format._storage.directory import (
    WeightsName,
    candidates,
    candidates_of,
    is_directory,
    side_files,
    weights_file,
)
from elsa_format._storage.shards import read_index

T = TypeVar("T", bound=Target)
OPEN = 200
"""Side files that have no name before they are whole; more of them wait under temporary ones."""


@dataclass(frozen=True)
class InDirectory(os.PathLike[str]):
    """Where weights go in a directory; with them come copies of another's side files."""

    source: Path
    folder: Path | str
    """A URL if it is a string."""
    name: str

    def __fspath__(self) -> str:
        return self.place(self.name)

    def place(self, name: str) -> str:
        """The path or URL of a file in the directory."""
        if isinstance(self.folder, str):
            return f"{self.folder.rstrip('/')}/{name}"
        return os.path.join(self.folder, name)

    @contextlib.contextmanager
    def side_files(self, *, force: bool = False) -> Iterator[list[UnnamedOutput]]:
        """Copies that wait for their names; folders that are empty afterwards go again."""
        with contextlib.ExitStack() as stack:
            if isinstance(self.folder, str):
                yield self._stored_files(self.folder, stack, force=force)
            else:
                yield self._local_files(self.folder, stack, force=force)

    def _local_files(
        self, folder: Path, stack: contextlib.ExitStack, *, force: bool
    ) -> list[UnnamedOutput]:
        if os.path.lexists(folder) and not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
        refuse_others(folder, self.name)
        names, _ = side_files(self.source, folder)
        stack.enter_context(new_folders(folder))
        copies: list[UnnamedOutput] = []
        for name in names:
            out = folder / name
            if out.exists() and filecmp.cmp(self.source / name, out, shallow=False):
                continue
            stack.enter_context(new_folders(out.parent))
            copy = AtomicFile(out, force=force)
            stack.callback(copy.discard)
            copy_file(self.source / name, copy)
            copies.append(copy)
            if len(copies) > OPEN:
                copy.put_away()
        return copies

    def _stored_files(
        self, url: str, stack: contextlib.ExitStack, *, force: bool
    ) -> list[UnnamedOutput]:
        refuse_others(url, self.name)
        copies: list[UnnamedOutput] = []
        for name in side_files(self.source)[0]:
            out = self.place(name.as_posix())
            if _holds(out, self.source / name):
                continue
            beside = copies[0] if copies else None
            copies.append(open_unnamed(out, force=force, beside=beside))
            stack.callback(copies[-1].discard)
            copy_file(self.source / name, copies[-1])
            if len(copies) > OPEN:
                copies[-1].sync()
        return copies

    @property
    def not_copied(self) -> list[str]:
        """Weights of the directory that are neither copied nor what is read."""
        read = weights_file(self.source, torch=True)
        own = {read.name, *(read_index(read)[0].files if is_index(read) else ())}
        left = side_files(self.source, self._apart)[1]
        return [str(name) for name in left if str(name) not in own]

    def listing(self) -> Listing:
        """The list of the files that will be here."""
        return list_directory(self.source, self.name, self._apart)

    @property
    def _apart(self) -> Path | None:
        return None if isinstance(self.folder, str) else self.folder


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


def refuse_others(folder: Path | str, name: str) -> None:
    """What is written is what is found afterwards, by others too; a URL is a string."""
    if isinstance(folder, str):
        found, start = _stored_candidates(folder)
    else:
        found, start = candidates(folder) if folder.is_dir() else [], os.fspath(folder)
    for other in found:
        if other != name and not _hides(name, other):
            raise OutputExists(
                f"{start}/{other}: is there already, and would be taken for {name}; "
                "remove it, or write to another directory"
            )


def _stored_candidates(url: str) -> tuple[list[str], str]:
    """What may be meant by the weights of a folder of a store, and its name for messages."""
    from elsa_format._storage.fsspec import list_store  # only where there are stores
    from elsa_format._storage.http_client import redact

    return candidates_of(list_store(url)), redact(url).rstrip("/")


def _holds(url: str, path: Path) -> bool:
    """Whether a file in a store holds what another does here."""
    try:
        with (
            contextlib.closing(open_storage(url)) as storage,
            contextlib.closing(storage.reader(0, sys.maxsize)) as reader,
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
    folder = place if is_url(place) else Path(place)  # type: ignore[arg-type]
    return InDirectory(Path(source), folder, str(name))  # type: ignore[arg-type]


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
