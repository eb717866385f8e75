"""Tensors of PyTorch and of ELSA files: the same memory, seen as bytes.

numpy has no bfloat16 and no float8 of its own, and PyTorch does not know those of ml_dtypes, so
nothing here goes through a floating type.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from elsa_format import File, TensorInfo, UnknownDtype
from elsa_format.plugins import DTYPES, Dtype, LevelNumber, Meter, mask_into, no_progress

T = TypeVar("T")

PARALLEL_FROM = 32 << 20
"""Bytes from which threads repay their start."""

_TORCH: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "C64": torch.complex64,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
}
_STORED = {torch_dtype: DTYPES[name] for name, torch_dtype in _TORCH.items()}


def stored_dtype(dtype: torch.dtype) -> Dtype | None:
    """How safetensors calls a dtype, if it has it."""
    return _STORED.get(dtype)


def torch_dtype(info: TensorInfo, where: str) -> torch.dtype:
    """The dtype of a stored tensor."""
    found = _TORCH.get(info.dtype.name)
    if found is None:
        raise UnknownDtype(f"{where}: tensor {info.name!r}: PyTorch has no {info.dtype.name}")
    return found


def bytes_of(tensor: Tensor) -> NDArray[np.uint8]:
    """The memory of a contiguous tensor on the CPU."""
    memory: NDArray[np.uint8] = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memory


def arrays(tensors: Mapping[str, Tensor]) -> dict[str, NDArray[Any]]:
    """Tensors as numpy arrays, on the same memory if it is contiguous and on the CPU.

    bfloat16 and float8 become those of ml_dtypes, which PyTorch's own `numpy()` does not do.

    >>> arrays({"w": torch.ones(2, 2, dtype=torch.bfloat16)})["w"].dtype
    dtype(bfloat16)
    """
    found = {}
    for name, tensor in tensors.items():
        dtype = stored_dtype(tensor.dtype)
        if dtype is None or dtype.numpy is None:
            raise TypeError(f"tensor {name!r}: numpy has no {tensor.dtype}")
        flat = bytes_of(tensor.detach().cpu().resolve_conj().resolve_neg().contiguous())
        found[name] = flat.view(dtype.numpy).reshape(tuple(tensor.shape))
    return found


def without_aliases(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Of tensors on the same memory only the first, and for each other name that of the first.

    >>> tied = torch.ones(2, 2)
    >>> kept, others = without_aliases({"embed": tied, "head": tied})
    >>> list(kept), others
    (['embed'], {'head': 'embed'})
    """
    kept: dict[str, Tensor] = {}
    others: dict[str, str] = {}
    first: dict[object, str] = {}
    for name, tensor in tensors.items():
        original = first.setdefault(memory(tensor), name)
        if original == name:
            kept[name] = tensor
        else:
            others[name] = original
    return kept, others


def memory(tensor: Tensor) -> object:
    """Equal for tensors on the same memory."""
    if tensor.is_meta or not tensor.numel() or tensor.layout != torch.strided:
        return id(tensor)
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def as_tensor(memory: NDArray[Any], info: TensorInfo, where: str) -> Tensor:
    """A tensor on memory that holds the stored bytes."""
    flat = torch.from_numpy(memory.reshape(-1).view(np.uint8))
    return flat.view(torch_dtype(info, where)).reshape(info.shape)


def as_array(memory: NDArray[np.uint8], info: TensorInfo) -> NDArray[Any]:
    """A flat array on memory that holds the stored bytes."""
    assert info.dtype.numpy is not None, "PyTorch has none of the dtypes that numpy has not"
    return memory.view(info.dtype.numpy)


def read_into(file: File, name: str, level: LevelNumber, tensor: Tensor) -> None:
    """Read one tensor of a level, checked, into the memory of a contiguous tensor of its kind."""
    info = file.network.tensors[name]
    file.tensor(name, level, out=as_array(bytes_of(tensor), info).reshape(info.shape))


def level_into(packed: NDArray[Any], result: NDArray[Any], bits: int, level: LevelNumber) -> int:
    """Write a level of packed weights to existing memory, and return how many weights it has.

    New memory takes ten times as long.

    >>> packed = np.array([4, 5, 6, 7], np.uint32).view(np.float32)
    >>> level_into(packed, packed, bits=2, level=2)
    2
    >>> packed.view(np.uint32).tolist()
    [0, 5, 6, 0]
    """
    if level != "dense":
        return mask_into(packed, result, bits, level)
    np.copyto(result.view(np.uint8), packed.view(np.uint8))
    return packed.size


def run(function: Callable[[T], None], items: Sequence[T], nbytes: int) -> None:
    """Call the function on every item, in threads where there is enough to do."""
    jobs = os.cpu_count() or 1 if nbytes >= PARALLEL_FROM else 1
    Meter(no_progress, nbytes).run(function, items, jobs)
