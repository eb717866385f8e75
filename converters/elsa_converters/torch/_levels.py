"""Switch a module that runs from level to level, in the memory it has."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import elsa_format
from elsa_converters.torch._load import (
    changed,
    is_plain,
    level_of,
    load_level,
    match,
    tensors_of,
)
from elsa_converters.torch._tensors import (
    as_array,
    bytes_of,
    level_into,
    read_into,
    run,
    torch_dtype,
)
from elsa_format import (
    CountMismatch,
    File,
    InvalidOption,
    TensorInfo,
    TensorMismatch,
)
from elsa_format.plugins import LevelLike, LevelNumber

CHUNK = 4 << 20
"""Bytes that a thread masks at a time."""


class Packed(NamedTuple):
    """A nested tensor: its weights with their counters, and the tensor that shows a level of it."""

    name: str
    counts: tuple[int, ...]
    """How many weights each level has, by the profile."""
    weights: NDArray[Any]
    dtype: torch.dtype
    shown: Tensor

    def chunks(self) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """Weights, and the memory for their level, piece by piece."""
        target = bytes_of(self.shown).view(self.weights.dtype)
        step = CHUNK // target.itemsize
        for start in range(0, target.size, step):
            yield self.weights[start : start + step], target[start : start + step]


def show(
    tensors: Sequence[Packed],
    bits: int,
    level: LevelNumber,
    where: str,
    before: LevelNumber | None = None,
) -> None:
    """Write a level of packed tensors to the tensors that show it, and compare the counts.

    If one is not the profile's, the tensors show the level `before` again.
    """
    jobs = [
        (number, *chunk)
        for number, packed in enumerate(tensors)
        if is_plain(packed.shown, packed.dtype)
        for chunk in packed.chunks()
    ]
    found = [[0] for _ in tensors]

    def mask(job: tuple[int, NDArray[Any], NDArray[Any]]) -> None:
        number, weights, target = job
        found[number].append(level_into(weights, target, bits, level))

    run(mask, jobs, sum(target.nbytes for _, _, target in jobs))
    for packed, kept in zip(tensors, found, strict=True):
        if is_plain(packed.shown, packed.dtype):
            changed(iter([packed.shown]))
        else:  # masked first: a cast would destroy the counters
            masked = torch.empty(packed.shown.shape, dtype=packed.dtype)
            target = bytes_of(masked).view(packed.weights.dtype)
            kept.append(level_into(packed.weights, target, bits, level))
            packed.shown.detach().copy_(masked)
    try:
        for packed, kept in zip(tensors, found, strict=True):
            check_count(packed.name, packed.counts, level, sum(kept), where)
    except CountMismatch:
        if before is not None:
            show(tensors, bits, before, where)
        raise


def check_count(
    name: str, counts: Sequence[int], level: LevelNumber, found: int, where: str
) -> None:
    """Compare the number of a level's weights in a tensor with the profile's."""
    if level != "dense" and found != counts[level - 1]:
        raise CountMismatch(
            f"{where}: tensor {name!r}: level {level} keeps {found} weights, "
            f"expected {counts[level - 1]}"
        )


class Levels:
    """The levels of a file in a module; see `attach`.

    >>> model = torch.nn.Linear(100, 100)
    >>> elsa_format.pack(model.state_dict(), "linear.safetensors", sparsities=[90, 50]).nested
    ('weight',)
    >>> with Levels(model, "linear.safetensors", 2) as levels:
    ...     levels.use(1)
    ...     levels.level, int((model.weight != 0).sum())
    (1, 1000)
    """

    def __init__(
        self,
        model: nn.Module,
        source: Any,
        level: LevelLike = "dense",
        *,
        strict: bool = True,
        verify: bool = True,
    ) -> None:
        self.file = elsa_format.open(source, verify=verify)
        try:
            refuse_one_level(self.file)
            load_level(model, self.file, level, strict=strict)
            pairs, self.unmatched = match(model, self.file, strict=strict)
            """Names that only the model or only the file has."""
            self._weights = packed_weights(self.file)
        except BaseException:
            self.file.close()
            raise
        changing = self._weights.keys() | set(self.file.per_level)
        self._model, self._closed = model, False
        self._held = {pair.held: pair.stored for pair in pairs if pair.stored in changing}
        self.level: LevelNumber = level_of(self.file, level)
        """The level the module is at: its number, or "dense"."""

    def use(self, level: LevelLike) -> None:
        """Switch the module to a level: its nested and per-level tensors are written anew.

        If the counts of a nested tensor are not the file's, the module stays at its level.
        """
        if self._closed:
            raise ValueError(f"{self.file.path}: is closed")
        number = level_of(self.file, level)
        packed, varying = [], []
        for held, tensor in self._tensors().items():  # read first: a failure writes nothing
            name = self._held[held]
            dtype = torch_dtype(self.file.network.tensors[name], self.file.path)
            if name in self._weights:
                counts = self.file.profile.nested[name]
                packed.append(Packed(name, counts, self._weights[name], dtype, tensor))
            else:
                varying.append((tensor, torch.empty(tensor.shape, dtype=dtype)))
                read_into(self.file, name, number, varying[-1][1])
        show(packed, self.file.bits, number, self.file.path, before=self.level)
        for tensor, variant in varying:
            tensor.detach().copy_(variant)
        self.level = number

    def _tensors(self) -> dict[str, Tensor]:
        """The module's tensors that change, which may be others than when it was attached."""
        own = tensors_of(self._model, self._held.keys())
        for held, name in self._held.items():
            expected = self.file.network.tensors[name].shape
            found = own.get(held)
            if found is None or found.is_meta or tuple(found.shape) != expected:
                raise TensorMismatch(
                    f"{self.file.path}: the model's {held!r} is not as it was when it was attached"
                )
        return {held: own[held] for held in self._held}

    @contextmanager
    def at(self, level: LevelLike) -> Iterator[None]:
        """Be at a level for a while, and then at the one before."""
        before = self.level
        self.use(level)
        try:
            yield
        finally:
            self.use(before)

    def close(self) -> None:
        """Close the file; the module stays at its level."""
        self._weights, self._closed = {}, True
        self.file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def attach(
    model: nn.Module,
    source: Any,
    level: LevelLike = "dense",
    *,
    strict: bool = True,
    verify: bool = True,
) -> Levels:
    """Load a level into a module as `load_level` does, and be ready to switch to others.

    A switch writes to the memory the module has, so compiled graphs, tied weights and optimizers
    keep theirs. The packed words stay in the file, which is mapped: they take no memory of their
    own, unless they come from a URL.

    >>> model = torch.nn.Linear(100, 100)
    >>> elsa_format.pack(model.state_dict(), "attached.safetensors", sparsities=[90, 50]).nested
    ('weight',)
    >>> levels = attach(model, "attached.safetensors", level=2)
    >>> with levels.at("90%"):
    ...     int((model.weight != 0).sum())
    1000
    >>> int((model.weight != 0).sum()), levels.level
    (5000, 2)
    """
    return Levels(model, source, level, strict=strict, verify=verify)


def refuse_one_level(file: File) -> None:
    """Refuse the file of a level: its weights are not told apart by counters any more."""
    if len(file.network.levels) == 1:
        raise InvalidOption(
            f"{file.path}: holds one level only, so there is none to switch to; load_level loads it"
        )


def packed_weights(file: File) -> Mapping[str, NDArray[Any]]:
    """The nested tensors as the file holds them, counters included: mapped if it is a local one."""
    weights: dict[str, NDArray[Any]] = {}
    for name in file.profile.nested:
        stored = file.network.mapped(name)
        if stored is None:
            weights[name] = file.tensor(name).reshape(-1)
        else:
            weights[name] = as_weights(stored, file.network.tensors[name])
    return weights


def as_weights(stored: NDArray[Any], info: TensorInfo) -> NDArray[Any]:
    """A nested tensor's bytes as weights; copied if they are not aligned, as they need not be."""
    if stored.ctypes.data % info.dtype.words.itemsize:
        stored = stored.copy()
    return as_array(stored, info)
