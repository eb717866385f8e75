"""The levels of a model that transformers has loaded."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

import elsa_format
from elsa_converters.sparse._choice import Fast, check_fast
from elsa_converters.torch import sparsify, state_dict
from elsa_converters.torch._fast.levels import SparseLayers, sparse_layers
from elsa_converters.torch._fast.sparsify import has_library
from elsa_converters.torch._levels import (
    Packed,
    as_weights,
    check_count,
    show,
)
from elsa_converters.torch._load import changed, level_of, unwrapped
from elsa_converters.torch._tensors import (
    as_array,
    as_tensor,
    bytes_of,
    level_into,
    memory,
    run,
    torch_dtype,
)
from elsa_converters.transformers._names import Place, find_places
from elsa_format import (
    ChecksumMismatch,
    File,
    InvalidOption,
    TensorInfo,
    TensorMismatch,
)
from elsa_format.plugins import LevelChoice, LevelLike, LevelNumber, choose_level


class Network:
    """The ELSA files that a model was loaded from: kept open while the model lives, and mapped.

    A delivery file, or the index of several, is not mapped: levels are decoded from it.
    """

    def __init__(self, paths: Sequence[str], *, delivered: bool = False) -> None:
        self.where = str(paths[0])
        self.files: list[File] = []
        self.infos: dict[str, TensorInfo] = {}
        self.content: dict[str, NDArray[np.uint8]] = {}
        self.checksums: dict[str, str] = {}
        self.nested: dict[str, tuple[int, ...]] = {}
        self.per_level: set[str] = set()
        self.holder: dict[str, File] = {}
        for path in paths:
            file = elsa_format.open(path)
            self.files.append(file)
            if len(file.network.levels) == 1:
                raise InvalidOption(f"{path}: holds one level only; load it without ElsaConfig")
            for name in () if delivered else file.tensors:
                stored = file.network.mapped(name)
                if stored is None:
                    raise InvalidOption(
                        f"{path}: is a delivery file, which transformers cannot read; "
                        "load its directory without variant="
                    )
                self.content[name] = stored
            self.profile = file.profile
            self.infos |= file.tensors
            self.holder |= dict.fromkeys(file.tensors, file)
            self.checksums |= file.profile.checksums
            self.nested |= file.nested
            self.per_level |= set(file.per_level)

    def verify(self) -> None:
        """Compare every tensor with its checksum."""

        def check(name: str) -> None:
            expected = self.checksums.get(name)
            found = f"xxh3:{xxhash.xxh3_64_hexdigest(self.content[name].data)}"
            if expected not in (None, found):
                raise ChecksumMismatch(
                    f"{self.where}: tensor {name!r} has checksum {found}, expected {expected}"
                )

        run(check, list(self.content), sum(info.nbytes for info in self.infos.values()))

    def level_of(self, level: LevelLike) -> LevelNumber:
        """The level that is meant: its number, or "dense"."""
        return level_of(self.files[0], level)

    def choose(self, choice: LevelChoice) -> LevelNumber:
        """The level that is wanted."""
        return choose_level(self.files[0].network, choice)

    def dtype(self, names: Iterable[str]) -> torch.dtype:
        """The dtype in which tensors that become one are stored."""
        found = {torch_dtype(self.infos[name], self.where) for name in names}
        if len(found) > 1:
            raise TensorMismatch(
                f"{self.where}: {sorted(names)[0]!r} and what it is merged with differ in dtype"
            )
        return found.pop()

    def identity(self, name: str) -> object:
        """What two stored tensors have in common only if they are the same."""
        return self.nested.get(name), self.checksums.get(name, name)


class ModelLevels:
    """What is known of a loaded model: the places of nested and per-level tensors."""

    def __init__(self, model: PreTrainedModel, network: Network, places: list[Place]) -> None:
        self.network = network
        self.level: LevelNumber = "dense"
        self.fast: Fast = False
        self.keep_dense = True
        self._sparse: SparseLayers | None = None
        nested = [place for place in places if network.nested.keys() & set(place.stored)]
        for place in nested:
            if not network.nested.keys() >= set(place.stored):
                raise TensorMismatch(
                    f"{network.where}: {place.held[0]!r} is made of nested tensors and others; "
                    "pack it whole or leave it out"
                )
        renamed = {p.stored[0]: p.held[0] for p in nested if not p.converted}
        self.converted = [place for place in nested if place.converted]
        self.direct = {name: held for name, held in renamed.items() if name in network.content}
        self.varying = {name: held for name, held in renamed.items() if name not in self.direct}
        for place in places:
            if network.per_level & set(place.stored):
                if place.converted:
                    raise TensorMismatch(
                        f"{network.where}: per-level tensor {place.stored[0]!r} is converted when "
                        "it is loaded, which is not supported"
                    )
                self.varying[place.stored[0]] = place.held[0]
        self._refuse_different_ties(model, places)

    def _refuse_different_ties(self, model: PreTrainedModel, places: list[Place]) -> None:
        own, first = model.state_dict(keep_vars=True), dict[object, str]()
        for place in places:
            if place.converted or place.held[0] not in own:
                continue
            name = place.stored[0]
            other = first.setdefault(memory(own[place.held[0]]), name)
            if self.network.identity(name) != self.network.identity(other):
                raise TensorMismatch(
                    f"{self.network.where}: tensors {other!r} and {name!r} differ, "
                    "but are one in the model"
                )

    def show(self, model: PreTrainedModel, level: LevelNumber, *, fresh: bool = False) -> None:
        """Write a level of all that was not converted; `fresh` gives mapped weights own memory."""
        straight = self._without_dense(model)
        own, packed, seen = model.state_dict(keep_vars=True), [], set[object]()
        for stored, held in self.direct.items():
            if stored in straight:
                continue
            info = self.network.infos[stored]
            tensor = self._usable(own, held, info.shape)
            dtype = torch_dtype(info, self.network.where)
            if memory(tensor) in seen:
                continue
            if fresh and tensor.dtype == dtype and tensor.device.type == "cpu":
                tensor.data = torch.empty_like(tensor)
            seen.add(memory(tensor))
            counts = self.network.nested[stored]
            weights = as_weights(self.network.content[stored], info)
            packed.append(Packed(stored, counts, weights, dtype, tensor))
        targets = {
            stored: self._usable(own, held, self.network.infos[stored].shape)
            for stored, held in self.varying.items()
            if stored not in straight
        }
        # Read first, so that a failure writes nothing; but of a delivery file, only what is small.
        variants = {
            name: self._variant(name, level) for name in targets if name in self.network.per_level
        }
        show_sparse = self._sparse.read(level) if self._sparse else None
        before = None if fresh else self.level
        show(packed, self.network.profile.bits, level, self.network.where, before)
        for stored, tensor in targets.items():
            variant = variants[stored] if stored in variants else self._variant(stored, level)
            with torch.no_grad():
                tensor.copy_(variant)
        if show_sparse is not None:
            show_sparse()
        self.make_fast(model)
        self.level = level

    def make_fast(self, model: PreTrainedModel) -> None:
        """Let the layers that are dense in memory skip their zeros, if that is wanted."""
        if self.fast is not False:
            sparsify(model, self.fast, keep_dense=self.keep_dense)

    def _without_dense(self, model: PreTrainedModel) -> Collection[str]:
        """The nested tensors that are read straight into packed form."""
        wanted = check_fast(self.fast)
        if self.keep_dense or wanted is False or not has_library():
            return ()
        if self._sparse is None:
            able = sparse_layers(model)
            places = self.direct | self.varying
            layers = {
                s: able[h] for s, h in places.items() if s in self.network.nested and h in able
            }
            self._sparse = SparseLayers(layers, self._flat, wanted)
        return self._sparse.layers

    def _flat(self, name: str, level: LevelNumber, room: Tensor | None) -> Tensor:
        return self._variant(name, level).reshape(-1)

    def _variant(self, name: str, level: LevelNumber) -> Tensor:
        array = self.network.holder[name].tensor(name, level)
        return as_tensor(array, self.network.infos[name], self.network.where)

    def _usable(self, own: Mapping[str, Tensor], name: str, shape: Sequence[int]) -> Tensor:
        tensor = own.get(name)
        if tensor is None or tuple(tensor.shape) != tuple(shape):
            raise TensorMismatch(f"{self.network.where}: the model's {name!r} is not as it was")
        if tensor.is_meta:
            raise InvalidOption(
                f"{name!r} is offloaded to a disk or another device, which levels do not support"
            )
        return tensor

    def mask_converted(
        self, model: PreTrainedModel, level: LevelNumber, wanted: Mapping[str, torch.dtype]
    ) -> None:
        """Mask merged weights where they are: a counter goes where its weight goes."""
        own, bits = model.state_dict(keep_vars=True), self.network.profile.bits
        for place in self.converted:
            dtype = self.network.dtype(place.stored)
            kept = 0
            for held in place.held:
                tensor = self._usable(own, held, own[held].shape)
                if not _holds(tensor.dtype, dtype):
                    raise InvalidOption(
                        f"{held!r} is stored as {dtype} and was loaded as {tensor.dtype}, which "
                        "destroys the counters; load it as it is stored, and cast then"
                    )
                packed = tensor.detach().to(dtype).cpu().contiguous()
                info = self.network.infos[place.stored[0]]
                weights = as_array(bytes_of(packed), info)
                kept += level_into(weights, weights, bits, level)
                tensor.data = packed.to(tensor.device, wanted.get(held, tensor.dtype))
            stated = (self.network.nested[name] for name in place.stored)
            counts = [sum(each) for each in zip(*stated, strict=True)]
            check_count(place.held[0], counts, level, kept, self.network.where)
        self.level = level

    def reload_converted(self, model: PreTrainedModel, level: LevelNumber) -> None:
        """Let transformers convert the level's weights again, and copy them."""
        weights: dict[str, Tensor] = {}
        for file in self.network.files:
            weights |= state_dict(file, level)
        loaded, info = type(model).from_pretrained(
            None, config=model.config, state_dict=weights, output_loading_info=True
        )
        new, own = loaded.state_dict(), model.state_dict(keep_vars=True)
        for held in (name for place in self.converted for name in place.held):
            if held in info["missing_keys"]:
                raise TensorMismatch(f"{self.network.where}: no tensor for the model's {held!r}")
            with torch.no_grad():
                self._usable(own, held, new[held].shape).copy_(new[held])
        changed(own[name] for place in self.converted for name in place.held)


def _holds(dtype: torch.dtype, stored: torch.dtype) -> bool:
    """Whether every value of the stored dtype is one of the other, too."""
    return bool(torch.promote_types(dtype, stored) == dtype)


LEVELS: WeakKeyDictionary[PreTrainedModel, ModelLevels] = WeakKeyDictionary()


def use_level(model: PreTrainedModel, level: LevelLike) -> None:
    """Switch a model that was loaded with `ElsaConfig` to another level, in the memory it has.

    What takes part are the nested weights and per-level tensors; they are those of the files again,
    whatever training has made of them.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from elsa_converters.transformers import ElsaConfig
    >>> sizes = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 50}
    >>> heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    >>> LlamaForCausalLM(LlamaConfig(**sizes, **heads)).save_pretrained("dense")
    >>> LlamaConfig(**sizes, **heads).save_pretrained("tiny")
    >>> options = {"scope": "uniform", "include": "*_proj.weight"}
    >>> report = elsa_format.pack(
    ...     "dense/model.safetensors", "tiny/model.safetensors", sparsities=[90, 50], **options
    ... )
    >>> model = LlamaForCausalLM.from_pretrained("tiny", quantization_config=ElsaConfig(level=1))
    >>> int((model.model.layers[0].mlp.up_proj.weight != 0).sum())
    205
    >>> use_level(model, "50%")
    >>> int((model.model.layers[0].mlp.up_proj.weight != 0).sum())
    1024
    """
    model = unwrapped(model)
    levels = levels_of(model)
    network = levels.network
    number = network.level_of(level)
    if levels.converted:
        levels.reload_converted(model, number)
    levels.show(model, number)


def levels_of(model: PreTrainedModel) -> ModelLevels:
    """The levels of a model that was loaded with `ElsaConfig`."""
    if model not in LEVELS:
        raise InvalidOption(
            f"this {type(model).__name__} was not loaded with quantization_config=ElsaConfig(...)"
        )
    return LEVELS[model]


def places_of(model: PreTrainedModel, network: Network, conversions: Sequence[Any]) -> list[Place]:
    """The places of all stored tensors that the model has a place for."""
    return find_places(model, network.infos, conversions)
