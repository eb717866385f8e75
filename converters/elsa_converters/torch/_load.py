"""A level as a state dict, or straight into a module's own memory."""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

import elsa_format
from elsa_converters.torch._tensors import as_tensor, memory, read_into, run, torch_dtype
from elsa_format import File, InvalidOption, TensorMismatch
from elsa_format.plugins import LevelLike, LevelNumber


class Pair(NamedTuple):
    """A tensor of a file, and the one of the model that it is loaded into, by their names."""

    stored: str
    held: str
    tensor: Tensor


class Unmatched(NamedTuple):
    """Names of one side only, as `load_state_dict` returns them.

    >>> Unmatched([], ["head.bias"]).unexpected_keys
    ['head.bias']
    """

    missing_keys: list[str]
    """Of the model only."""
    unexpected_keys: list[str]
    """Of the file only."""


@contextmanager
def opened(source: Any, *, verify: bool = True) -> Iterator[File]:
    """The ELSA file behind a path, a model directory, a URL, or an open file."""
    if isinstance(source, File):
        yield source
        return
    with elsa_format.open(source, verify=verify) as file:
        yield file


def state_dict(
    source: Any, level: LevelLike = "dense", *, verify: bool = True
) -> dict[str, Tensor]:
    """A level as tensors on the CPU, in the dtypes of the file.

    The source is an ELSA file, a shard index, a model directory, a URL or an open file.

    >>> level = state_dict("net.safetensors", level=2)
    >>> level["layer"].dtype, int((level["layer"] != 0).sum())
    (torch.float32, 1000)
    """
    with opened(source, verify=verify) as file:
        tensors = file.network.tensors
        for info in tensors.values():
            torch_dtype(info, file.path)
        loaded = file.load(level_of(file, level))
        found = {n: as_tensor(a, tensors[n], file.path) for n, a in loaded.items()}
        for name, kept in _aliases(file).items():
            found[name] = found[kept]
    return found


def load_level(
    model: nn.Module,
    source: Any,
    level: LevelLike = "dense",
    *,
    strict: bool = True,
    verify: bool = True,
) -> Unmatched:
    """Load a level into a module: into the memory it has, or, on the meta device, into new memory.

    In place, dtype, device and layout of the module's tensors stay as they are: a level is masked
    first and cast or moved then. On the meta device they become those of the file. Names and shapes
    are compared before anything is written; when reading fails later, as on a wrong checksum, the
    module holds part of the level. Buffers that the module makes itself (`persistent=False`) are
    neither needed nor loaded; the file may have them.

    >>> model = torch.nn.Module()
    >>> model.layer = torch.nn.Parameter(torch.empty(100, 100))
    >>> model.bias = torch.nn.Parameter(torch.empty(100))
    >>> load_level(model, "net.safetensors", level=2)
    Unmatched(missing_keys=[], unexpected_keys=[])
    >>> int((model.layer != 0).sum())
    1000
    """
    with opened(source, verify=verify) as file:
        number = level_of(file, level)
        pairs, unmatched = match(model, file, strict=strict)
        load_pairs(model, file, number, pairs)
    return unmatched


def load_pairs(model: nn.Module, file: File, level: LevelNumber, pairs: Sequence[Pair]) -> None:
    """Load tensors of a level into those of the model."""
    tensors = file.network.tensors
    fresh = {  # made here: what threads allocate is not used again
        id(tensor): torch.empty(tensor.shape, dtype=torch_dtype(tensors[name], file.path))
        for name, _, tensor in pairs
        if tensor.is_meta
    }

    def load_one(pair: Pair) -> None:
        dtype = torch_dtype(tensors[pair.stored], file.path)
        tensor = fresh.get(id(pair.tensor), pair.tensor)
        if is_plain(tensor, dtype):
            read_into(file, pair.stored, level, tensor)
        else:
            read = torch.empty(tensor.shape, dtype=dtype)
            read_into(file, pair.stored, level, read)
            tensor.detach().copy_(read)

    largest_first = sorted(pairs, key=lambda pair: -tensors[pair.stored].nbytes)
    run(load_one, largest_first, file.data_size)
    _replace(model, fresh)
    changed(pair.tensor for pair in pairs if not pair.tensor.is_meta)


def level_of(file: File, level: LevelLike) -> LevelNumber:
    """The level that is meant: its number, or "dense"."""
    return file.network.level_number(level)


def tensors_of(model: nn.Module, stored: Collection[str]) -> dict[str, Tensor]:
    """The model's tensors: by the names they have outside all wrappers, if a file has none inside.

    What was saved of a wrapped model has names like `module.layer.weight`.
    """
    named = named_as(model, stored).state_dict(keep_vars=True)
    # Not the extra state of a module.
    return {name: tensor for name, tensor in named.items() if isinstance(tensor, Tensor)}


def named_as(model: nn.Module, stored: Collection[str]) -> nn.Module:
    """The model, or what its wrappers hold, whichever has the names of the file."""
    inner = unwrapped(model)
    if inner is model or inner.state_dict().keys() & stored:
        return inner
    return model if model.state_dict().keys() & stored else inner


def _aliases(file: File) -> dict[str, str]:
    """Other names of tied tensors, as safetensors.torch.save_model leaves them."""
    stored = file.network.tensors
    return {
        name: kept
        for name, kept in file.metadata.items()
        if name != "format" and name not in stored and kept in stored
    }


def match(model: nn.Module, file: File, *, strict: bool) -> tuple[list[Pair], Unmatched]:
    """The model's tensors and the file's; of the model's on the same memory, the first."""
    stored, aliases = file.network.tensors, _aliases(file)
    tensors = tensors_of(model, stored.keys())
    tied: dict[object, list[str]] = defaultdict(list)
    for name, tensor in tensors.items():
        _refuse_unwritable(name, tensor)
        tied[memory(tensor)].append(name)
    pairs: list[Pair] = []
    missing = []
    for names in tied.values():
        known = {name: aliases.get(name, name) for name in names if name in stored.keys() | aliases}
        if not known:
            missing += names
            continue
        held, first = next(iter(known.items()))
        for other in known.values():
            if _identity(file, first) != _identity(file, other):
                raise TensorMismatch(
                    f"{file.path}: tensors {first!r} and {other!r} differ, but are one in the model"
                )
        found, expected = tuple(tensors[held].shape), stored[first].shape
        if found != expected:
            raise TensorMismatch(
                f"{file.path}: tensor {first!r}: shape {list(expected)}, "
                f"the model has {list(found)}"
            )
        torch_dtype(stored[first], file.path)
        pairs.append(Pair(first, held, tensors[held]))
    unmatched = Unmatched(missing, [name for name in stored if name not in tensors])
    if strict:
        _refuse_difference(named_as(model, stored.keys()), file, unmatched)
    return pairs, unmatched


def _refuse_difference(model: nn.Module, file: File, unmatched: Unmatched) -> None:
    """Refuse names of one side only, but those of buffers that the model makes itself.

    Files that older versions of a model saved may hold such a buffer, as BERT's `position_ids`.
    """
    made = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    made -= file.profile.nested.keys() | set(file.per_level)
    missing, unexpected = unmatched
    wrong = Unmatched(missing, [name for name in unexpected if name not in made])
    if any(wrong):
        raise TensorMismatch(
            f"{file.path}: {_difference(wrong)}", "{strict} allows it", strict=False
        )


def _refuse_unwritable(name: str, tensor: Tensor) -> None:
    """Refuse what can't be loaded into before anything is written."""
    if is_lazy(tensor):
        raise InvalidOption(f"the model's {name!r} has no shape before the first forward")
    if is_expanded(tensor):
        raise InvalidOption(f"the model's {name!r} is expanded from less memory; clone() it first")


def is_expanded(tensor: Tensor) -> bool:
    """Whether elements share memory, so that nothing can be written to it."""
    return any(
        size > 1 and step == 0 for size, step in zip(tensor.shape, tensor.stride(), strict=True)
    )


def _difference(unmatched: Unmatched) -> str:
    parts = []
    for names, side in zip(unmatched, ("the model", "the file"), strict=True):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            parts.append(f"only {side} has {names[0]!r}{more}")
    return ", ".join(parts)


def _identity(file: File, name: str) -> object:
    """What two stored tensors have in common only if they are the same."""
    info, checksum = file.network.tensors[name], file.profile.checksums.get(name)
    counts = file.profile.nested.get(name)
    return (info.dtype, info.shape, counts, checksum) if checksum else name


def unwrapped(model: nn.Module) -> nn.Module:
    """The module in the wrappers of torch.compile and of data parallelism.

    >>> linear = nn.Linear(2, 2)
    >>> unwrapped(nn.DataParallel(linear)) is linear
    True
    """
    wrappers = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    while True:
        inner = getattr(model, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            if not isinstance(model, wrappers):
                return model
            inner = model.module
        model = inner


def is_plain(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether the tensor's memory is as the file has it."""
    return bool(tensor.device.type == "cpu" and tensor.dtype == dtype and tensor.is_contiguous())


def _replace(model: nn.Module, fresh: Mapping[int, Tensor]) -> None:
    """Put new tensors in the place of those on the meta device, tied ones in all of theirs."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules() if fresh else ():
        for name, old in module._parameters.items():
            if old is not None and id(old) in fresh:
                if id(old) not in made:
                    new = fresh[id(old)]
                    learns = old.requires_grad and new.is_floating_point()
                    made[id(old)] = nn.Parameter(new, requires_grad=learns)
                module._parameters[name] = made[id(old)]
        for name, buffer in module._buffers.items():
            if buffer is not None and id(buffer) in fresh:
                module._buffers[name] = fresh[id(buffer)]


def changed(tensors: Iterator[Tensor]) -> None:
    """Tell autograd, which else would use what it saved of the old weights without a word."""
    for tensor in tensors:
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)
