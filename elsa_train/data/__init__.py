"""Data sets: random access by index, so that a resumed run sees the same batches."""

import os
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from elsa_train._errors import BadData, BadRecipe, TrainError
from elsa_train.data.arrays import load_cifar, load_digits, load_idx
from elsa_train.data.imagefolder import ImageFolder
from elsa_train.data.protocol import ArrayData, Data, Split, blaming, check_data
from elsa_train.data.text import load_text

__all__ = ["NAMES", "ArrayData", "Data", "Split", "load"]


def load(name: str, data_dir: str | Path = "") -> Data:
    """Open a bundled data set, or your own: `module:name`, called with the directory.

    The name is that of a class or function, and what it returns is a `Data`. Modules are found
    as Python finds them, and then in the current directory. Who chooses the name chooses the code
    that runs: it is never taken from a file.

    >>> load("digits").shape()
    (8, 8, 1)
    """
    if ":" in name:
        return check_data(name, _own(name, data_dir))
    if name not in _BUNDLED:
        raise BadRecipe(f"dataset {name!r}: found none such, expected one of {', '.join(NAMES)}")
    if not os.fspath(data_dir) and name not in READY:
        raise BadRecipe(f"dataset {name!r} is read from a directory: give data_dir (--data-dir)")
    if "://" in os.fspath(data_dir):
        raise BadRecipe(f"dataset {name!r} is read from local files: copy {data_dir} to a folder")
    data = _BUNDLED[name](Path(data_dir))
    return data if name == "text" else check_data(name, data)


def _own(name: str, data_dir: str | Path) -> Any:
    module, _, attribute = name.partition(":")
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        # A console script's path does not have it. Last: nothing installed may be shadowed.
        sys.path.append(here)
    try:
        found = import_module(module)
    except ImportError as error:
        raise BadRecipe(f"dataset {name!r}: {error}") from None
    except Exception as error:
        raise BadRecipe(f"dataset {name!r}: importing it: {blaming(error)}") from None
    for part in attribute.split("."):
        if not hasattr(found, part):
            where = getattr(found, "__file__", None) or getattr(found, "__name__", module)
            raise BadRecipe(f"dataset {name!r}: {where} has no {part!r}")
        found = getattr(found, part)
    if not callable(found):
        raise BadRecipe(f"dataset {name!r}: expected a class or function, to call with data_dir")
    return _called(name, found, data_dir)


def _called(name: str, own: Callable[..., Any], data_dir: str | Path) -> Any:
    try:
        return own(data_dir)
    except (TrainError, OSError):
        raise
    except Exception as error:
        raise BadData(f"dataset {name!r}: {blaming(error)}") from None


_BUNDLED: dict[str, Callable[[Path], Data]] = {
    "cifar10": lambda path: load_cifar(path, 10),
    "cifar100": lambda path: load_cifar(path, 100),
    "digits": lambda path: load_digits(),
    "fashion-mnist": load_idx,
    "imagefolder": ImageFolder,
    "mnist": load_idx,
    "text": lambda path: load_text(path if path != Path() else None),
}
NAMES = tuple(_BUNDLED)
READY = ("digits", "text")
"""Those that need no directory: the data comes with what is installed."""
