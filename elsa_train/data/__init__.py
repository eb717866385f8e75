"""Data sets: random access by index, so that a resumed run sees the same batches."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from elsa_train._errors import BadData, BadRecipe, TrainError
from elsa_train._own import blaming, find_own
from elsa_train.data.arrays import load_cifar, load_digits, load_idx
from elsa_train.data.images import EncodedImages, ImageFolder
from elsa_train.data.protocol import ArrayData, Data, Split, check_data
from elsa_train.data.records import ImageRecords, record_files
from elsa_train.data.text import load_text
from elsa_train.data.workers import Workers

__all__ = ["NAMES", "ArrayData", "Data", "Split", "in_processes", "load"]


def load(name: str, data_dir: str | Path = "") -> Data:
    """Open a bundled data set, or your own: `module:name`, called with the directory.

    The name is that of a class or function, and what it returns is a `Data`. Modules are found
    as Python finds them, and then in the current directory. Who chooses the name chooses the code
    that runs: it is never taken from a file.

    >>> load("digits").shape()
    (8, 8, 1)
    """
    if ":" in name:
        own = find_own("dataset", name, "to call with data_dir")
        return check_data(name, _called(name, own, data_dir))
    if name not in _BUNDLED:
        raise BadRecipe(f"dataset {name!r}: found none such, expected one of {', '.join(NAMES)}")
    if not os.fspath(data_dir) and name not in READY:
        raise BadRecipe(f"dataset {name!r} is read from a directory: give data_dir (--data-dir)")
    if "://" in os.fspath(data_dir):
        raise BadRecipe(f"dataset {name!r} is read from local files: copy {data_dir} to a folder")
    data = _BUNDLED[name](Path(data_dir))
    return data if name == "text" else check_data(name, data)


def _called(name: str, own: Callable[..., Any], data_dir: str | Path) -> Any:
    try:
        return own(data_dir)
    except (TrainError, OSError):
        raise
    except Exception as error:
        raise BadData(f"dataset {name!r}: {blaming(error)}") from None


def _images(root: Path) -> EncodedImages:
    """Open folders of images, or record files: those of a folder, or of its only version."""
    if not (root / "train").is_dir():
        folders = [root, *(path.parent for path in sorted(root.glob("*/dataset_info.json")))]
        for folder in folders[:1] if len(folders) > 2 else folders:
            if any((files := record_files(folder)).values()):
                return ImageRecords(folder, files)
    return ImageFolder(root)


def in_processes(data: Data, count: int | None = None) -> Data:
    """Let worker processes make the batches: `count` of them, 0 for none, None for as many as pay.

    Those are as many as there are cores for images that are decoded, and none for other data.
    """
    if count is None:
        decoded = getattr(data, "decoded", False) and os.name == "posix"
        count = _cores() if decoded else 0
    return Workers(data, count) if count else data


def _cores() -> int:
    """Count the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


_BUNDLED: dict[str, Callable[[Path], Data]] = {
    "cifar10": lambda path: load_cifar(path, 10),
    "cifar100": lambda path: load_cifar(path, 100),
    "digits": lambda path: load_digits(),
    "fashion-mnist": load_idx,
    "imagefolder": _images,
    "mnist": load_idx,
    "text": lambda path: load_text(path if path != Path() else None),
}
NAMES = tuple(_BUNDLED)
READY = ("digits", "text")
"""Those that need no directory: the data comes with what is installed."""
