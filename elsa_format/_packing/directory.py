"""What is chosen by default, in a model directory and elsewhere: layers, scope, axis of N:M."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from elsa_format._container.header import TensorInfo
from elsa_format._packing.input_axes import input_axes
from elsa_format._packing.layer_kinds import layer_kind

MERGED = (1, 2, 3, 4)
"""How many times as wide as a size of the config the layers of a model are."""


def unpruned(tensors: Mapping[str, TensorInfo], folder: Path) -> dict[str, str]:
    """Tensors that are not to be pruned unless that is asked for, and what they are."""
    words = vocabulary(folder)
    kinds = {name: layer_kind(name, info.shape, words) for name, info in tensors.items()}
    return {name: kind for name, kind in kinds.items() if kind is not None}


def chosen_by_default(
    *, directory: bool, patterns: bool, scope: bool, axis: bool, spared: bool
) -> tuple[str, ...]:
    """What was chosen for one-shot levels because no option said otherwise, and why.

    >>> chosen_by_default(directory=False, patterns=False, scope=True, axis=True, spared=False)
    ('--scope global, as DENSE is not a model directory',)

    Args:
        directory: Whether a model directory is packed.
        patterns: Whether levels are N:M patterns, which have an axis, and no scope.
        scope: Whether the scope is the default.
        axis: Whether the axis is the default.
        spared: Whether tensors are not nested because of what they are.
    """
    why = f"as DENSE is {'' if directory else 'not '}a model directory"
    found = []
    if not patterns and scope:
        found.append(f"--scope {'uniform' if directory else 'global'}, {why}")
    if patterns and axis:
        found.append(f"N:M along {'the inputs of each layer' if directory else 'axis -1'}, {why}")
    if spared:
        found.append(f"layers only, {why}; --nest-all nests all kinds of tensors")
    return tuple(found)


def transformer_notes(tensors: Iterable[TensorInfo], *, scope: bool) -> tuple[str, ...]:
    """How the directory of a transformer would be packed, if these nested tensors are of one.

    A file's defaults stay what they were: the same command gives the same bytes. And only a
    directory has the config that tells an output head whatever it is called.

    Args:
        tensors: The nested tensors of what is not a model directory.
        scope: Whether the directory's would be another scope.
    """
    kinds = {info.name: layer_kind(info.name, info.shape) for info in tensors}
    spared = [name for name, kind in kinds.items() if kind is not None]
    if "embedding" not in kinds.values():
        return ()
    few = ", ".join(map(repr, spared[:3])) + (", …" if len(spared) > 3 else "")
    return (
        f"the model directory of this transformer would get{' --scope uniform, and' * scope} no "
        f"levels in {len(spared)} of these tensors ({few}); --exclude GLOB leaves tensors out",
    )


def vocabulary(folder: Path) -> int | None:
    """`vocab_size` of the model's config, unless layers may have the same size by chance.

    >>> Path("gpt").mkdir(exist_ok=True)
    >>> written = Path("gpt/config.json").write_text('{"vocab_size": 1000, "n_embd": 64}')
    >>> vocabulary(Path("gpt"))
    1000
    """
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    found = dict(_sizes(config))
    words = found.pop("vocab_size", None)
    if words is None or words < 2:
        return None
    # Queries, keys and values are 3 times as wide as the model, other layers 2 or 4 times.
    wide = {size * times for size in found.values() for times in MERGED}
    return None if words in wide else words


def _sizes(config: Any) -> list[tuple[str, int]]:
    """Whole numbers of a config, and of the config of its text model."""
    if not isinstance(config, dict):
        return []
    own = [(key, value) for key, value in config.items() if type(value) is int]
    return [*_sizes(config.get("text_config")), *own]


def pattern_axes(
    tensors: Mapping[str, TensorInfo], group: int, axis: int | None
) -> tuple[dict[str, int], dict[str, str]]:
    """Of each tensor the axis of its inputs, or the one that is given; and which do not divide."""
    told = input_axes({name: info.shape for name, info in tensors.items()})
    axes: dict[str, int] = {}
    left: dict[str, str] = {}
    for name, info in tensors.items():
        axes[name] = told.get(name, -1) if axis is None else axis
        if -len(info.shape) <= axes[name] < len(info.shape):
            size = info.shape[axes[name]]
            if size % group:
                what = "inputs" if axis is None else f"weights along axis {axis}"
                left[name] = f"{size} {what}, not a multiple of {group}"
        else:
            left[name] = f"no axis {axes[name]}"
    return axes, left
