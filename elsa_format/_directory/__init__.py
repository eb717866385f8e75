"""Model directories, as `save_pretrained` writes them: which file holds the weights, and what else.

Weights are called `model`, in diffusers `diffusion_pytorch_model`; a variant, such as fp16, stands
before the last suffix: `model.fp16.safetensors`, `model.safetensors.index.fp16.json`. What was
saved by `torch.save` is called `pytorch_model.bin`, and shards of it are named likewise.
"""

import errno
import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from elsa_format._container.index import is_index
from elsa_format._errors import InvalidOption

MANIFEST = "elsa-files.json"
SHIP = "ship"
"""The variant of delivery files, whose place is before `.safetensors` in an index, too."""
OWN = ("bitmask", "csr", SHIP)
"""Variants that say how weights are stored here; plain loaders ask for none of them."""

_NAME = re.compile(
    r"(model|diffusion_pytorch_model)((?:\.[^.]+)*)\.safetensors"
    r"(\.index((?:\.[^.]+)*)\.json)?"
)
_TORCH_NAME = re.compile(
    r"((?:diffusion_)?pytorch_model)((?:\.[^.]+)*)\.bin(\.index((?:\.[^.]+)*)\.json)?"
)
_SHARD = re.compile(r"-\d{5}-of-\d{5}")
_WEIGHTS = re.compile(
    r".*\.(safetensors(\.part-\d+)?|bin|pt|pth|ckpt|h5|msgpack|ot|npz|onnx|onnx_data|gguf|tflite)",
    re.IGNORECASE | re.DOTALL,
)


@dataclass(frozen=True)
class WeightsName:
    """The name of a directory's weights.

    >>> name = WeightsName.parse("model.safetensors.index.fp16.json")
    >>> name, str(name.stored_as("bitmask"))  # doctest: +NORMALIZE_WHITESPACE
    (WeightsName(stem='model', variants=('fp16',), sharded=True),
     'model.safetensors.index.fp16.bitmask.json')
    """

    stem: str = "model"
    variants: tuple[str, ...] = ()
    sharded: bool = False

    @classmethod
    def parse(cls, name: str, *, torch: bool = False) -> "WeightsName | None":
        """The parts of a file's name, if weights are called so; or those that `torch.save` wrote.

        >>> str(WeightsName.parse("pytorch_model.bin.index.json", torch=True))
        'model.safetensors.index.json'
        """
        found = (_TORCH_NAME if torch else _NAME).fullmatch(name)
        if found is None or _SHARD.search(name):
            return None
        stem = "model" if found[1] == "pytorch_model" else found[1]
        variants = f"{found[2]}{found[4] or ''}".split(".")[1:]
        return cls(stem, tuple(variants), found[3] is not None)

    def stored_as(self, variant: str | None) -> "WeightsName":
        """The same weights, stored in a way that has a variant of its own, or as plain loaders do.

        >>> str(WeightsName("model", ("fp16", "ship")).stored_as(None))
        'model.fp16.safetensors'
        """
        kept = tuple(name for name in self.variants if name not in OWN)
        return replace(self, variants=kept if variant is None else (*kept, variant))

    def __str__(self) -> str:
        first = "".join(f".{name}" for name in self.variants if not self.sharded or name == SHIP)
        last = "".join(f".{name}" for name in self.variants if name != SHIP)
        index = f".index{last}.json" if self.sharded else ""
        return f"{self.stem}{first}.safetensors{index}"


def is_directory(source: object) -> bool:
    """Whether a source is a directory on this machine."""
    return isinstance(source, str | os.PathLike) and os.path.isdir(source)


def weights_file(source: Any, *, torch: bool = False) -> Any:
    """The file or shard index with the weights of a directory; any other source is returned.

    A variant is taken where there are no others; if all is in vain, what `torch.save` wrote.

    >>> os.makedirs("bert", exist_ok=True)
    >>> open("bert/model.safetensors", "wb").close()
    >>> weights_file("bert").name
    'model.safetensors'
    """
    if not is_directory(source):
        return source
    folder = Path(source)
    names = candidates(folder) or (candidates(folder, torch=True) if torch else [])
    if not names:
        raise IsADirectoryError(errno.EISDIR, advice(folder), os.fspath(source))
    if len(names) > 1:
        raise InvalidOption(f"{folder}: holds {', '.join(names)}; name the one that is meant")
    return folder / names[0]


def candidates(folder: Path, *, torch: bool = False) -> list[str]:
    """What may be meant by a directory's weights: several only if nothing tells between them."""
    names = [name for name in os.listdir(folder) if not os.path.isdir(folder / name)]
    return candidates_of(names, torch=torch)


def candidates_of(names: Iterable[str], *, torch: bool = False) -> list[str]:
    """What may be meant by the weights, by the names of a directory's files."""
    parsed = {name: WeightsName.parse(name, torch=torch) for name in sorted(names)}
    found = {name: it for name, it in parsed.items() if it}
    return [name for name, it in found.items() if not it.variants] or list(found)


def advice(folder: str | os.PathLike[str]) -> str:
    """What to open of a directory that has no weights by their usual names."""
    names = sorted(os.listdir(folder), key=lambda name: (not is_index(name), name))
    for name in names:
        if is_index(name) or name.endswith(".safetensors"):
            return f"is a directory without model.safetensors; name a file in it, such as {name}"
    inner = [n for n in names if os.path.isdir(os.path.join(folder, n))]
    inner = [n for n in inner if os.access(os.path.join(folder, n), os.R_OK | os.X_OK)]
    holding = [name for name in inner if candidates(Path(folder, name))]
    more = f"; its folders do: {', '.join(holding)}" if holding else ""
    return f"is a directory, and holds no .safetensors file{more}"


def is_weights(name: str) -> bool:
    """Whether a file holds weights, in whatever form, or is the index of such.

    >>> is_weights("pytorch_model.bin.index.json"), is_weights("tokenizer.model")
    (True, False)
    """
    return is_index(name) or _WEIGHTS.fullmatch(name) is not None


def module_folders(folder: Path) -> set[str]:
    """Folders that sentence-transformers names: their weights are of other modules of the model."""
    try:
        modules = json.loads((folder / "modules.json").read_bytes())
        return {str(module["path"]) for module in modules}
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return set()


def other_files(folder: Path, apart: Path | None = None) -> Iterator[Path]:
    """What else is in a directory and its folders, relative to it; hidden folders are left alone.

    So is the manifest, which is of this directory, not of a copy. Links to files count as
    files, as in a download cache; links to folders and pipes do not count. A folder that is to be
    `apart` is left alone, too: where the copy goes.
    """
    for place, folders, files in os.walk(folder, onerror=_raise):
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".")
            and not (apart and apart.exists() and apart.samefile(os.path.join(place, name)))
        )
        for name in sorted(files):
            path = Path(place, name).relative_to(folder)
            if os.path.isfile(folder / path) and str(path) != MANIFEST:
                yield path


def side_files(folder: Path, apart: Path | None = None) -> tuple[list[Path], list[Path]]:
    """What goes with the weights, and what does not: it holds weights, and of no other module."""
    modules = module_folders(folder)
    names: tuple[list[Path], list[Path]] = ([], [])
    for name in other_files(folder, apart):
        left = is_weights(name.name) and str(name.parent) not in modules - {"", "."}
        names[left].append(name)
    return names


def _raise(error: OSError) -> None:
    raise error
