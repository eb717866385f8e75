"""Switch a module that runs from level to level, in the memory it has."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fractions import Fraction
from math import prod
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import elsa_format
from elsa_converters.sparse._choice import Fast, check_fast
from elsa_converters.torch._fast.layers import FastLayer
from elsa_converters.torch._fast.levels import SparseLayers, sparse_layers
from elsa_converters.torch._fast.sparsify import has_library, layers_of, sparsify
from elsa_converters.torch._load import (
    Pair,
    changed,
    is_plain,
    level_of,
    load_pairs,
    match,
    named_as,
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
        fast: Fast = False,
        keep_dense: bool = True,
    ) -> None:
        self._fast, wanted = fast, check_fast(fast)
        self.file = elsa_format.open(source, verify=verify)
        try:
            refuse_one_level(self.file)
            number = level_of(self.file, level)
            pairs, self.unmatched = match(model, self.file, strict=strict)
            """Names that only the model or only the file has."""
            self._sparse: SparseLayers | None = None
            self._checked: set[str] = set()
            if wanted is not False and not keep_dense and has_library():
                self._sparse = self._without_dense(model, pairs, wanted)
            straight = self._sparse.layers if self._sparse else {}
            load_pairs(model, self.file, number, [p for p in pairs if p.stored not in straight])
            if self._sparse:
                self._sparse.read(number)()
                model.requires_grad_(False)
            elif wanted is not False:
                sparsify(model, fast)
            self._weights = packed_weights(self.file, straight)
        except BaseException:
            self.file.close()
            raise
        changing = self._weights.keys() | set(self.file.per_level)
        changing -= straight.keys()
        self._model, self._closed = model, False
        self._held = {pair.held: pair.stored for pair in pairs if pair.stored in changing}
        self.level: LevelNumber = number
        """The level the module is at: its number, or "dense"."""

    def _without_dense(
        self, model: nn.Module, pairs: Sequence[Pair], wanted: bool | Fraction
    ) -> SparseLayers:
        """The layers whose nested weights are read straight into packed form."""
        able = sparse_layers(named_as(model, self.file.network.tensors.keys()))
        layers = {
            pair.stored: able[pair.held]
            for pair in pairs
            if pair.stored in self.file.profile.nested and pair.held in able
        }
        return SparseLayers(layers, self._read, wanted)

    def _read(self, name: str, level: LevelNumber, room: Tensor | None) -> Tensor:
        """Read a nested tensor into the memory, if that is enough; checksums are compared once."""
        info, count = self.file.network.tensors[name], prod(self.file.network.tensors[name].shape)
        dtype = torch_dtype(info, self.file.path)
        if room is None or room.dtype != dtype or room.numel() < count:
            with torch.inference_mode(False):
                room = torch.empty(count, dtype=dtype)
        tensor, stored = room[:count], self.file.network.mapped(name)
        if stored is None or name not in self._checked:
            read_into(self.file, name, level, tensor.view(info.shape))
            self._checked.add(name)
        else:
            weights = as_weights(stored, info)
            kept = level_into(weights, bytes_of(tensor).view(weights.dtype), self.file.bits, level)
            check_count(name, self.file.profile.nested[name], level, kept, self.file.path)
        return room

    def use(self, level: LevelLike, *, fast: Fast | None = None) -> None:
        """Switch the module to a level: its nested and per-level tensors are written anew.

        If the counts of a nested tensor are not the file's, the module stays at its level. Fast
        layers are packed anew, but for those that the level leaves as they are.

        Args:
            level: The level's number, its name, or "dense".
            fast: Which layers skip their zeros from now on, as `sparsify` takes it; None leaves
                that as it was.
        """
        if self._closed:
            raise ValueError(f"{self.file.path}: is closed")
        number = level_of(self.file, level)
        if fast is not None:
            wanted = check_fast(fast)
            if self._sparse:
                self._sparse.wanted = wanted
            self._fast = fast
        unchanged = self._unchanged(number)
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
        show_sparse = self._sparse.read(number) if self._sparse else None
        show(packed, self.file.bits, number, self.file.path, before=self.level)
        for tensor, variant in varying:
            tensor.detach().copy_(variant)
        if show_sparse is not None:
            show_sparse()
        elif self._fast is not False or fast is not None:
            for layer in unchanged:
                layer.note_current()
            sparsify(self._model, self._fast)
        self.level = number

    def _unchanged(self, level: LevelNumber) -> list[FastLayer]:
        """Layers whose packed weights are those of the level, too: it adds none to them."""
        if level == "dense" or self.level == "dense":
            return []
        layers = {f"{name}.weight": module for name, module in layers_of(self._model).items()}
        nested, before = self.file.profile.nested, self.level
        found = []
        for held, name in self._held.items():
            layer = layers.get(held)
            if name in nested and isinstance(layer, FastLayer) and layer.is_current():
                counts = nested[name]
                if counts[level - 1] == counts[before - 1]:
                    found.append(layer)
        return found

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
    fast: Fast = False,
    keep_dense: bool = True,
) -> Levels:
    """Load a level into a module as `load_level` does, and be ready to switch to others.

    A switch writes to the memory the module has, so compiled graphs, tied weights and optimizers
    keep theirs. The packed words stay in the file, which is mapped: they take no memory of their
    own, unless they come from a URL.

    Args:
        model: The module, changed in place; on the meta device, it gets memory.
        source: An ELSA file, a shard index, a model directory or a URL.
        level: The level to begin with.
        strict: Whether names that only one side has are refused.
        verify: Whether checksums are compared.
        fast: Which layers skip their zeros, as `sparsify` takes it, at each level anew.
        keep_dense: Whether fast layers keep their dense weights in memory, too. Without them, the
            levels of nested weights are read straight into packed form, and nothing can be trained.

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
    return Levels(
        model, source, level, strict=strict, verify=verify, fast=fast, keep_dense=keep_dense
    )


def refuse_one_level(file: File) -> None:
    """Refuse the file of a level: its weights are not told apart by counters any more."""
    if len(file.network.levels) == 1:
        raise InvalidOption(
            f"{file.path}: holds one level only, so there is none to switch to; load_level loads it"
        )


def packed_weights(file: File, without: Collection[str] = ()) -> Mapping[str, NDArray[Any]]:
    """The nested tensors as the file holds them, counters included: mapped if it is a local one."""
    weights: dict[str, NDArray[Any]] = {}
    for name in file.profile.nested.keys() - set(without):
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
