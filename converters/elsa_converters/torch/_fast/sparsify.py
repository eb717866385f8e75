"""Choose the layers that are faster without their zeros, and pack them."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from functools import partial

import torch
from torch import Tensor, nn

import elsa_converters.torch._fast.operators  # noqa: F401  defines them
from elsa_converters.sparse import find_library
from elsa_converters.sparse._choice import WORTH, Fast, check_fast
from elsa_converters.torch._fast.layers import (
    FastLayer,
    fast_class,
    make_dense,
    make_fast,
    warn_once,
)
from elsa_converters.torch._fast.packed import DTYPES, Packed, count_kept
from elsa_converters.torch._load import unwrapped
from elsa_converters.torch._tensors import run

FEWEST = 0.3
"""Zeros from which a layer is tried at all."""
ROWS = (1, 32)
"""Of inputs with which a product is timed: a token, and a short text."""
SIDES = (14, 56)
"""Of pictures with which a convolution is timed."""
RUNS = 5
CACHE = 32 << 20
"""Bytes of weights from which a model's layers do not find theirs in the cache: so it is emptied
before each run that is timed. In it, small dense layers win that lose in such a model."""
_gains: dict[object, bool] = {}
"""What was timed in this process."""


def sparsify(model: nn.Module, fast: Fast = True, *, keep_dense: bool = True) -> list[str]:
    """Let the layers of a model skip the zeros that its weights have, where that is faster.

    `torch.nn.Linear`, `torch.nn.Conv2d` and transformers' `Conv1D` are computed from packed
    weights, in float32 and bfloat16 on the CPU, while no gradients are recorded; otherwise they
    are dense as before. Call it again when weights have changed. Layers that are fast already and
    have not changed stay as they are.

    Args:
        model: The module, changed in place.
        fast: True packs the layers that are faster, each shape and sparsity timed once in a
            process; a sparsity such as 0.7 packs those with at least so many zeros, unmeasured;
            False makes all layers dense again.
        keep_dense: Whether the dense weights stay in memory as well. Without them nothing can be
            trained, and no parameter of the model requires a gradient any more.

    Returns:
        The names of the layers that are fast now.

    Raises:
        InvalidOption: `fast` is neither a truth value nor a sparsity.

    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8))
    >>> model[0].weight.data[:, 5:] = 0
    >>> sparsify(model, fast=0.7)
    ['0']
    """
    wanted = check_fast(fast)
    if wanted is not False and not has_library():
        wanted = False
    if not keep_dense and wanted is not False:
        model.requires_grad_(False)
    names = layers_of(model)
    shared = shared_weights(model)
    jobs: list[tuple[str, nn.Module]] = []
    for name, module in names.items():
        if isinstance(module, FastLayer) and (wanted is False or not module.is_surely_current()):
            make_dense(module)
        if wanted is not False and not isinstance(module, FastLayer) and _may(module, wanted):
            jobs.append((name, module))
    packed: dict[str, Packed] = {}

    def pack_one(job: tuple[str, nn.Module]) -> None:
        name, module = job
        kind = fast_class(module)
        found = None if kind is None else kind.pack_of(module.weight)
        if found is not None:
            packed[name] = found

    run(pack_one, jobs, sum(module.weight.nbytes for _, module in jobs))
    large = is_large(names.values())
    for name, module in jobs:
        if name in packed and (wanted is not True or gains(module, packed[name], large)):
            kept = keep_dense or id(module.weight) in shared
            make_fast(module, packed[name], keep_dense=kept)
    return [name for name, module in names.items() if isinstance(module, FastLayer)]


def has_library() -> bool:
    """Whether there are sparse layers here; warns if there are none."""
    if find_library() is not None:
        return True
    warn_once(
        "elsa: the sparse layers were not built, for want of a C compiler; all layers are dense"
    )
    return False


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """The layers that could be fast, or are, each by its first name."""
    return {
        name: module
        for name, module in unwrapped(model).named_modules()
        if isinstance(module, FastLayer) or fast_class(module) is not None
    }


def shared_weights(model: nn.Module) -> set[int]:
    """Of parameters that several modules have, as an embedding and the head may: their ids."""
    holders = Counter(id(p) for m in model.modules() for p in m._parameters.values())
    return {key for key, count in holders.items() if count > 1}


def _may(module: nn.Module, wanted: bool | Fraction) -> bool:
    """Whether a dense layer has the zeros, and is what packed ones can be."""
    return may(module.weight, wanted)


def may(weight: Tensor, wanted: bool | Fraction) -> bool:
    """Whether a weight has the zeros, and is what packed ones can be."""
    if weight.device.type != "cpu" or weight.dtype not in DTYPES or not weight.numel():
        return False
    return sparsity_of(weight) >= (FEWEST if wanted is True else wanted)


def sparsity_of(weight: Tensor) -> float:
    """The share of zeros; a row without values counts as if it had one, as it is packed."""
    return float(1 - count_kept(weight.detach().contiguous()) / weight.numel())


def is_large(layers: Iterable[nn.Module]) -> bool:
    """Whether the weights of all layers are more than a cache holds."""
    return sum(int(layer.weight.nbytes) for layer in layers) > CACHE


def gains(module: nn.Module, packed: Packed, large: bool) -> bool:
    """Whether a layer is faster with these weights; what was timed once in a process is known."""
    kind = type(module) if isinstance(module, FastLayer) else fast_class(module)
    weight = module.weight
    assert kind is not None
    zeros = round(50 * (1 - packed.values.numel() / weight.numel()))
    key = (
        *(kind, weight.shape, packed.values.dtype, zeros, torch.get_num_threads(), large),
        *((module.stride, module.padding) if isinstance(module, nn.Conv2d) else ()),
    )
    if key not in _gains:
        _gains[key] = _time(module, packed, kind, large)
    return _gains[key]


def _time(module: nn.Module, packed: Packed, kind: type[FastLayer], large: bool) -> bool:
    """Whether it is as fast with every example."""
    weight, dtype = module.weight, packed.values.dtype
    shapes: Sequence[tuple[int, ...]]
    if isinstance(module, nn.Conv2d):
        shapes = [(1, weight.shape[1], side, side) for side in SIDES]
    else:
        rows = weight.shape[1 if kind.dense_class is nn.Linear else 0]
        shapes = [(count, rows) for count in ROWS]
    dense, fast = _alone(module, kind, packed, dense=True), _alone(module, kind, packed)
    with torch.inference_mode():
        for shape in shapes:
            x = torch.randn(shape, dtype=dtype)
            first, second = _shortest([partial(dense, x), partial(fast, x)], cold=large)
            if second > WORTH * first:
                return False
    return True


def _alone(
    module: nn.Module, kind: type[FastLayer], packed: Packed, *, dense: bool = False
) -> nn.Module:
    """The layer without its hooks and weights of its own."""
    copy: nn.Module = object.__new__(kind.dense_class)
    nn.Module.__init__(copy)
    vars(copy).update({k: v for k, v in vars(module).items() if k not in vars(copy)})
    weight = module.dense_weight() if isinstance(module, FastLayer) else module.weight
    if weight.is_meta:  # no level of it is in memory: any numbers take as long
        weight = torch.ones(weight.shape, dtype=packed.values.dtype)
    copy.weight = nn.Parameter(weight.detach(), requires_grad=False)
    copy.register_parameter("bias", None)
    if isinstance(module.bias, Tensor):
        ones = torch.ones(module.bias.shape, dtype=packed.values.dtype)
        copy.bias = nn.Parameter(ones, requires_grad=False)
    copy.eval()
    if not dense:
        make_fast(copy, packed, keep_dense=True)
    return copy


def _shortest(functions: Sequence[Callable[[], object]], *, cold: bool) -> list[float]:
    """Seconds of the fastest run of each; they run in turn, so that all see the same noise.

    One thread's own time is not disturbed by what else runs; that of several cannot be told so.
    """
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    best = [float("inf")] * len(functions)
    other = torch.zeros(2 * CACHE if cold else 0, dtype=torch.uint8)
    for turn in range(RUNS + 1):
        for index, function in enumerate(functions):
            other += 1
            start = clock()
            function()
            if turn:  # the first prepares
                best[index] = min(best[index], clock() - start)
    return best
