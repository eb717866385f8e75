"""What PyTorch saves, as a checkpoint to pack: state dicts, and the files that hold them."""

import errno
import os
import pickle
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from elsa_converters.torch._tensors import bytes_of, stored_dtype, without_aliases
from elsa_format import InvalidCheckpoint
from elsa_format.plugins import Checkpoint, TensorInfo

WITHIN = ("state_dict", "model_state_dict", "model")
"""Keys under which training scripts and Lightning keep the state dict."""


class TorchCheckpoint(Checkpoint):
    """A state dict of any dtype and device, or a file that `torch.load(weights_only=True)` reads.

    Files are mapped, not read whole. Of tied tensors the first is stored; the metadata has the
    names of the others, as `safetensors.torch.save_model` writes them.

    >>> linear = torch.nn.Linear(100, 100, dtype=torch.bfloat16)
    >>> torch.save(linear.state_dict(), "linear.pt")
    >>> checkpoint = TorchCheckpoint("linear.pt")
    >>> checkpoint.tensors["weight"].dtype.name, checkpoint.nestable("bias")
    ('BF16', False)
    """

    def __init__(self, source: str | os.PathLike[str] | Mapping[str, Tensor]) -> None:
        if isinstance(source, Mapping):
            self.path, found = "<state dict>", source
        else:
            self.path, found = os.fspath(source), _load(source)
        state = _state_dict(found, self.path)
        for name, tensor in state.items():
            self._check(name, tensor)
        self._tensors, aliases = without_aliases(state)
        self.metadata: Mapping[str, str] = {**aliases, "format": "pt"}
        self.tensors: Mapping[str, TensorInfo] = {
            name: self._info(name, tensor) for name, tensor in self._tensors.items()
        }
        self.refuse_reserved()

    @classmethod
    def matches(cls, path: str, first: bytes) -> bool:
        """Whether a file is a zip archive or a pickle, as torch.save writes them."""
        return first.startswith((b"PK\x03\x04", b"\x80")) and b".npy" not in first

    def _check(self, name: str, tensor: Tensor) -> None:
        where = f"{self.path}: tensor {name!r}"
        if tensor.is_meta:
            raise InvalidCheckpoint(f"{where}: is on the meta device, without data")
        if hasattr(tensor, "to_local"):
            raise InvalidCheckpoint(f"{where}: is sharded over processes; gather it first")
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise InvalidCheckpoint(f"{where}: is sparse or quantized; make it dense first")

    def _info(self, name: str, tensor: Tensor) -> TensorInfo:
        dtype = stored_dtype(tensor.dtype)
        if dtype is None:
            raise InvalidCheckpoint(
                f"{self.path}: tensor {name!r}: safetensors has no {tensor.dtype}"
            )
        return TensorInfo(name, dtype, tuple(tensor.shape))

    def blocks(self, name: str, size: int) -> Iterator[NDArray[np.uint8]]:
        """Slices of the tensor's memory; only what lies elsewhere or in another order is copied."""
        tensor = self._tensors[name].detach().resolve_conj().resolve_neg()
        flat = bytes_of(tensor.cpu().contiguous())
        for start in range(0, flat.size, size):
            yield flat[start : start + size]

    def close(self) -> None:
        """Let go of the memory."""
        self._tensors = {}


def _load(path: str | os.PathLike[str]) -> Any:
    where = os.fspath(path)
    try:
        with open(path, "rb") as file:
            zipped = file.read(4) == b"PK\x03\x04"  # before PyTorch 1.6: a pickle, not to be mapped
        return torch.load(where, map_location="cpu", weights_only=True, mmap=zipped)
    except MemoryError:
        raise
    except OSError as error:
        if error.errno != errno.EINVAL:  # a seek before the start
            raise
        raise _damaged(where, error) from None
    except pickle.UnpicklingError:
        raise InvalidCheckpoint(
            f"{where}: holds more than tensors, or is damaged: torch.load(weights_only=True) "
            "refuses it; save model.state_dict()"
        ) from None
    except Exception as error:  # whatever a damaged pickle does
        raise _damaged(where, error) from None


def _damaged(where: str, error: Exception) -> InvalidCheckpoint:
    first, *_ = str(error).splitlines() or [""]
    return InvalidCheckpoint(f"{where}: not a PyTorch checkpoint: {first or type(error).__name__}")


def _state_dict(found: Any, where: str) -> Mapping[str, Tensor]:
    """The tensors by name, which may be one entry of what a training script has saved."""
    if isinstance(found, Mapping):
        for key in WITHIN:
            inner = found.get(key)
            if isinstance(inner, Mapping) and inner:
                found = inner
                break
    if not isinstance(found, Mapping) or not found:
        raise InvalidCheckpoint(f"{where}: holds no state dict")
    for name, value in found.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise InvalidCheckpoint(
                f"{where}: entry {name!r} is of type {type(value).__name__}, expected a tensor"
            )
    return found
