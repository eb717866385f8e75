"""A model directory as an output: weights, and copies of all that another directory has besides."""

import contextlib
import errno
import filecmp
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from elsa_format._container.index import is_index
from elsa_format._errors import OutputExists
from elsa_format._output import Target, is_special
from elsa_format._output.atomic import AtomicFile, new_folders
from elsa_format._storage.directory import (
    WeightsName,
    candidates,
    is_directory,
    is_weights,
    module_folders,
    other_files,
    weights_file,
)
from elsa_format._storage.shards import read_index

T = TypeVar("T", bound=Target)
COPIED = 1 << 20
"""Bytes copied at a time."""
OPEN = 200
"""Side files that have no name before they are whole; more of them wait under temporary ones."""
ALSO = ("pytorch_model.bin",)
"""Weights that can be packed where there are no others."""


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
        self._refuse_others()
        names, _ = self._others()
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

    def _others(self) -> tuple[list[Path], list[Path]]:
        """The files to copy, and those not to: they hold weights, and of no other module."""
        modules = module_folders(self.source)
        names: tuple[list[Path], list[Path]] = ([], [])
        for name in other_files(self.source, self.folder):
            left = is_weights(name.name) and str(name.parent) not in modules - {"", "."}
            names[left].append(name)
        return names

    @property
    def not_copied(self) -> list[str]:
        """Weights of the directory that are neither copied nor what is read."""
        read = weights_file(self.source, ALSO)
        own = {read.name, *(read_index(read)[0].files if is_index(read) else ())}
        return [str(name) for name in self._others()[1] if str(name) not in own]

    def _refuse_others(self) -> None:
        """What was written is what is found afterwards, by others too."""
        if not self.folder.is_dir():
            return
        for name in candidates(self.folder):
            if name != self.name and not _hides(self.name, name):
                raise OutputExists(
                    f"{self.folder / name}: is there already, and would be taken for {self.name}; "
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
) -> T | InDirectory:
    """The target, or the file in it if both the source and the target are directories.

    So is a target that ends in a slash, or in neither `.safetensors` nor `.index.json`.
    """
    if not goes_to_directory(source, target):
        return target
    found = weights_file(source, ALSO).name
    name = (WeightsName.parse(found) or WeightsName()).stored_as(variant)
    name = replace(name, sharded=name.sharded or sharded)
    return InDirectory(Path(source), Path(target), str(name))  # type: ignore[arg-type]


def goes_to_directory(source: Any, target: Target) -> bool:
    """Whether what is made of a source is a directory."""
    if not isinstance(target, str | os.PathLike) or not is_directory(source):
        return False
    path = os.fspath(target)
    if os.path.isdir(path) or path.endswith(("/", os.sep)):
        return True
    return not (path.endswith(".safetensors") or is_index(path) or is_special(path))
