"""What a file holds, as JSON: `elsa-inspect` prints it, and reports are made from it."""

import os
from collections.abc import Callable
from typing import Any

from elsa_format._directory import is_directory
from elsa_format._errors import InvalidOption, MissingExtra
from elsa_format._file import File
from elsa_format._layouts import LAYOUT_NAMES
from elsa_format._level_header import estimated_downloads
from elsa_format._level_reader import LevelReader
from elsa_format._storage import Source
from elsa_format._survey import survey
from elsa_format._threads import Meter, Progress, no_progress


def inspect(
    source: Source,
    *,
    full: bool = False,
    max_bytes: int | None = None,
    progress: Progress = no_progress,
) -> dict[str, Any]:
    """Describe a file as `elsa-inspect --json` does: values that JSON can hold, and no others.

    >>> found = inspect("net.safetensors")
    >>> [level["nonzero"] for level in found["levels"]], found["tensors"][0]["kept"]
    ([500, 1000, 2000], [500, 1000, 2000])
    >>> sorted(inspect("net.safetensors", full=True)["full"])
    ['magnitudes', 'pictures', 'side']

    Args:
        source: An ELSA file, a level file, a delivery file, the index of shards of these or a model
            directory; a path, a URL or a binary stream.
        full: Read the data too, once and in bounded memory, and describe them under `"full"`:
            samples of the nested masks, and how many weights of each magnitude froze at each level.
            Otherwise only headers are read.
        max_bytes: Refuse a network whose header, or tensors as dense arrays, take more than this.
        progress: Called with the bytes of data that were read, and how many there are.

    Returns:
        Of an ELSA file its levels, of a level file which level it is; and its tensors.

    Raises:
        FormatError: The file is not valid.
        InvalidOption: `full` is asked for of a level file.
    """
    with File(source, max_bytes=max_bytes) as file:
        if "dense" not in file.network.levels:
            if full:
                raise InvalidOption(f"{file.path}: is a level file", "{full} is for an ELSA file")
            return _describe_level(file)
        document = _describe(file, _title(source, file))
        if full:
            meter = Meter(progress, file.data_size)
            with LevelReader(file.network, on_bytes=meter.tick) as reader:
                document["full"] = survey(reader)
    return document


def report_writer() -> Callable[..., int]:
    """The function that writes reports; another package has it, as entry point `elsa.reports`."""
    from importlib.metadata import entry_points  # only here, as it takes long to import

    try:
        for entry in entry_points(group="elsa.reports", name="html"):
            return entry.load()  # type: ignore[no-any-return]
        raise ModuleNotFoundError(name="elsa_report")
    except ImportError as error:
        raise MissingExtra.of(error, "an HTML report", extra="") from None


def _describe(file: File, title: str) -> dict[str, Any]:
    """An ELSA file, or a delivery file, from its header."""
    profile = file.profile
    estimates = estimated_downloads(file.network.header.tensors, profile)
    return {
        "path": file.path,
        "title": title,
        "version": profile.version,
        "bits": profile.bits,
        "file_size": file.file_size,
        "data_size": file.data_size,
        "parameters": sum(info.elements for info in file.tensors.values()),
        "nested_weights": file.nested_weights,
        "levels": [
            {
                "level": t,
                "name": level.name,
                "target": level.target,
                "pattern": level.pattern,
                "sparsity": file.sparsity(t),
                "nonzero": level.nonzero,
                "digest": level.digest,
                "metrics": dict(level.metrics),
                "errors": dict(level.errors),
                "sizes": {layout: file.size(t, layout) for layout in LAYOUT_NAMES},
                "download_estimate": estimates[t],
            }
            for t, level in enumerate(file.levels, 1)
        ],
        "dense": {
            "metrics": dict(profile.dense_metrics),
            "errors": dict(profile.dense_errors),
            "size": file.size("dense"),
            "download_estimate": estimates["dense"],
        },
        "metrics": {name: metric.to_json() for name, metric in profile.metrics.items()},
        **_delivery(file),
        "shard": profile.shard,
        "metadata": dict(file.metadata),
        "tensors": _tensors(file, lambda counts: list(counts) or None),
    }


def _title(source: Source, file: File) -> str:
    """The name of the file, or of its directory: weights have the same name in all of them."""
    named = os.path.realpath(source) if is_directory(source) else file.path  # type: ignore[arg-type]
    return os.path.basename(named)


def _describe_level(file: File) -> dict[str, Any]:
    """A level file, from its header."""
    entry = file.levels[0]
    return {
        "path": file.path,
        "level": entry.number,
        "name": entry.name,
        "layout": file.network.layout,
        "file_size": file.file_size,
        "dense_size": file.data_size,
        "parameters": sum(info.elements for info in file.tensors.values()),
        "nested_weights": file.nested_weights,
        "nonzero": entry.nonzero,
        "digest": entry.digest,
        "metadata": file.network.metadata,
        "tensors": _tensors(file, lambda counts: counts[0] if counts else None),
    }


def _delivery(file: File) -> dict[str, Any]:
    """What was downloaded of a delivery file, and how many of its first bytes each level needs."""
    network = file.network
    if not network.downloads:
        return {}
    available = network.available[-1] if network.available else None
    sizes = [{"level": level, "size": size} for level, size in network.downloads.items()]
    # "there" is what earlier releases call it.
    return {"delivery": {"available": available, "there": available, "levels": sizes}}


def _tensors(file: File, kept: Callable[[tuple[int, ...]], Any]) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "dtype": info.dtype.name,
            "shape": list(info.shape),
            "kind": _kind(file, name),
            "kept": kept(file.profile.nested.get(name, ())),
        }
        for name, info in file.tensors.items()
    ]


def _kind(file: File, name: str) -> str:
    if name in file.profile.nested:
        return "nested"
    if "dense" not in file.network.levels:
        return "other"
    return "per-level" if name in file.profile.varying else "shared"
