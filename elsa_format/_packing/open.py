"""Open a checkpoint of whatever kind."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from elsa_format._container.foreign import SNIFFED
from elsa_format._container.index import is_index, is_url, shards_suffix
from elsa_format._errors import MissingExtra
from elsa_format._packing.arrays import ArrayCheckpoint
from elsa_format._packing.checkpoint import Adapted, Checkpoint, PathLike
from elsa_format._packing.npz import NpzCheckpoint
from elsa_format._packing.safetensors import SafetensorsCheckpoint
from elsa_format._packing.shards import ShardedCheckpoint
from elsa_format._storage.directory import weights_file

CheckpointLike = str | os.PathLike[str] | Mapping[str, NDArray[Any]] | Checkpoint


def open_checkpoint(source: CheckpointLike) -> Checkpoint:
    """The checkpoint behind a path, in a model directory, a dictionary of arrays, or itself."""
    if isinstance(source, Mapping):
        return _of_arrays(source)
    if not isinstance(source, str | os.PathLike):
        return source if isinstance(source, Checkpoint) else Adapted(source)
    file: PathLike = weights_file(source, torch=True)
    if is_url(file) or (is_index(file) and shards_suffix(file) in ("", "safetensors")):
        return SafetensorsCheckpoint(file)
    path = Path(file)
    if is_index(path):
        return ShardedCheckpoint(path, lambda shard: _of_file(shard, shards_suffix(path)))
    suffix = path.suffix.lower().lstrip(".")
    if suffix == "npz":
        return NpzCheckpoint(path)
    return _of_file(path, suffix) or SafetensorsCheckpoint(path)


def _of_arrays(source: Mapping[str, Any]) -> Checkpoint:
    """Arrays in memory; those of a library with a plug-in, such as PyTorch, are its to read."""
    libraries = {type(value).__module__.partition(".")[0] for value in source.values()}
    for library in sorted(libraries - {"builtins", "numpy"}):
        for kind in _plugged_in(library, f"reading arrays of {library}"):
            return kind(source)  # type: ignore[call-arg]
    return ArrayCheckpoint(source)


def _of_file(path: Path, suffix: str) -> Checkpoint | None:
    """The file as a checkpoint of a kind that another package reads."""
    for kind in _plugged_in(suffix, f"{path}: reading .{suffix}"):
        with open(path, "rb") as file:
            first = file.read(SNIFFED)
        if kind.matches(os.fspath(path), first):
            return kind(path)  # type: ignore[call-arg]
    return None


def _plugged_in(name: str, what: str) -> Iterator[type[Checkpoint]]:
    """The kinds of checkpoint that other packages have for a suffix or a library.

    An entry point can state the extra that brings what it needs; else that has the same name.
    """
    from importlib.metadata import entry_points  # only here, as it takes long to import

    for entry in entry_points(group="elsa.checkpoints", name=name):
        try:
            yield entry.load()
        except ImportError as error:
            extra = (entry.extras or [name])[0]
            package = {} if entry.dist is None else {"package": entry.dist.name}
            raise MissingExtra.of(error, what, extra, **package) from None
