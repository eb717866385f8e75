"""Open a checkpoint of whatever kind."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from elsa_format._container.foreign import SNIFFED
from elsa_format._container.index import is_index, is_url
from elsa_format._errors import MissingExtra
from elsa_format._packing.arrays import ArrayCheckpoint
from elsa_format._packing.checkpoint import Adapted, Checkpoint
from elsa_format._packing.npz import NpzCheckpoint
from elsa_format._packing.safetensors import SafetensorsCheckpoint

CheckpointLike = str | os.PathLike[str] | Mapping[str, NDArray[Any]] | Checkpoint


def open_checkpoint(source: CheckpointLike) -> Checkpoint:
    """The checkpoint behind a path, a dictionary of arrays, or itself."""
    if isinstance(source, Mapping):
        return ArrayCheckpoint(source)
    if not isinstance(source, str | os.PathLike):
        return source if isinstance(source, Checkpoint) else Adapted(source)
    if is_index(source) or is_url(source):
        return SafetensorsCheckpoint(source)
    path = Path(source)
    suffix = path.suffix.lower().lstrip(".")
    if suffix == "npz":
        return NpzCheckpoint(path)
    return _plugged_in(path, suffix) or SafetensorsCheckpoint(path)


def _plugged_in(path: Path, suffix: str) -> Checkpoint | None:
    """The file as a checkpoint of a kind that another package reads."""
    from importlib.metadata import entry_points  # only here, as it takes long to import

    for entry in entry_points(group="elsa.checkpoints", name=suffix):
        try:
            kind: type[Checkpoint] = entry.load()
        except ImportError as error:
            raise MissingExtra.of(error, f"{path}: reading .{suffix}", suffix) from None
        with open(path, "rb") as file:
            first = file.read(SNIFFED)
        if kind.matches(os.fspath(path), first):
            return kind(path)  # type: ignore[call-arg]
    return None
