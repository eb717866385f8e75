"""Write what was trained as an ELSA file, and compare it with what was frozen."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elsa_converters.torch import arrays
from numpy.typing import NDArray
from torch import Tensor

import elsa_format
from elsa_format import LevelSpec, level_digest
from elsa_train._errors import NotReproduced
from elsa_train._levels import Level


@dataclass(frozen=True)
class FrozenLevel:
    """What is remembered of a level: its measures and buffers, never its weights.

    >>> FrozenLevel(Level("90%", 0.9), 100, 0.9, "sha256:…").metrics
    {}
    """

    level: Level
    nonzero: int
    sparsity: float
    digest: str
    metrics: dict[str, float] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)


def write_file(
    path: str | Path,
    dense: Mapping[str, NDArray[Any]],
    nested: Sequence[str],
    frozen: Sequence[FrozenLevel],
    bits: int,
    *,
    metrics: Mapping[str, float],
    metadata: Mapping[str, str],
    force: bool,
) -> None:
    """Write the file; buffers that differ between levels are stored for each."""
    per_level = {}
    for name in frozen[0].buffers:
        variants = [arrays({name: level.buffers[name]})[name] for level in frozen]
        if name in dense and any(not _same(variant, dense[name]) for variant in variants):
            per_level[name] = variants
    elsa_format.write(
        path,
        dense,
        bits=bits,
        levels=[_spec(level) for level in frozen],
        nested=nested,
        per_level=per_level,
        dense_metrics=metrics,
        metadata=metadata,
        force=force,
    )
    _check(path, dense, nested, frozen)


def _same(one: NDArray[Any], other: NDArray[Any]) -> bool:
    return one.tobytes() == other.tobytes()


def _spec(frozen: FrozenLevel) -> LevelSpec:
    level = frozen.level
    pattern = str(level.pattern) if level.pattern else None
    return LevelSpec(level.name, target=level.target, pattern=pattern, metrics=frozen.metrics)


def _check(
    path: str | Path,
    dense: Mapping[str, NDArray[Any]],
    nested: Sequence[str],
    frozen: Sequence[FrozenLevel],
) -> None:
    """Compare each level of the file, and the dense network, with what was trained."""
    elsa_format.verify(path)
    with elsa_format.open(path) as file:
        for t, level in enumerate(frozen, 1):
            found = {level_digest(file.load(t), nested), file.levels[t - 1].digest}
            if found != {level.digest} or file.levels[t - 1].nonzero != level.nonzero:
                raise NotReproduced(f"{path}: level {t} ({level.level.name}) is not as it froze")
        stored = file.load("dense")
    if any(not _same(stored[name], array) for name, array in dense.items()):
        raise NotReproduced(f"{path}: the dense network is not the trained one")
