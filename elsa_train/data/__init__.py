"""Data sets: random access by index, so that a resumed run sees the same batches."""

from collections.abc import Callable
from pathlib import Path

from elsa_train._errors import BadRecipe
from elsa_train.data.protocol import ArrayData, Data, Split

__all__ = ["ArrayData", "Data", "Split", "load"]


def load(name: str, data_dir: str | Path = "") -> Data:
    """Open a bundled data set; `module:function` names the user's own."""
    loaders: dict[str, Callable[[Path], Data]] = {
        "cifar10": _cifar10,
        "cifar100": _cifar100,
        "digits": lambda _: _digits(),
        "fashion-mnist": _idx,
        "imagefolder": _imagefolder,
        "mnist": _idx,
    }
    if ":" in name:
        return _own(name, data_dir)
    if name not in loaders:
        raise BadRecipe(f"dataset {name!r}: found none such, expected one of {sorted(loaders)}")
    if not data_dir and name != "digits":
        raise BadRecipe(f"dataset {name!r} is read from a directory: give --data-dir")
    return loaders[name](Path(data_dir))


def _own(name: str, data_dir: str | Path) -> Data:
    import importlib

    module, _, function = name.partition(":")
    try:
        data: Data = getattr(importlib.import_module(module), function)(data_dir)
    except (ImportError, AttributeError) as error:
        raise BadRecipe(f"dataset {name!r}: {error}") from None
    return data


def _digits() -> Data:
    from elsa_train.data.digits import load_digits

    return load_digits()


def _idx(path: Path) -> Data:
    from elsa_train.data.idx import load_idx

    return load_idx(path)


def _cifar10(path: Path) -> Data:
    from elsa_train.data.cifar import load_cifar

    return load_cifar(path, 10)


def _cifar100(path: Path) -> Data:
    from elsa_train.data.cifar import load_cifar

    return load_cifar(path, 100)


def _imagefolder(path: Path) -> Data:
    from elsa_train.data.imagefolder import ImageFolder

    return ImageFolder(path)
