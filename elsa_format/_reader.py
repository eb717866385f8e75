"""Open an ELSA file and read what is asked for, no more (spec §2.2)."""

from collections.abc import Iterator, Mapping
from contextlib import closing
from functools import cached_property
from types import MappingProxyType, TracebackType
from typing import Any, Literal, Self, overload

import numpy as np
from numpy.typing import NDArray

from elsa_format import _profile
from elsa_format._blocks import Checksum, as_array
from elsa_format._choose import check_layout, choose_level
from elsa_format._header import TensorInfo
from elsa_format._layouts import Bitmask, Csr, Layout, encoder, mask_of, nested_at, parts
from elsa_format._memory import BLOCK, Arena, give_block, take_block
from elsa_format._plan import LevelSizes, level_tensors, plain_names
from elsa_format._profile import Level, LevelLike, LevelNumber, Profile
from elsa_format._shards import open_network
from elsa_format._storage import Reader, Source, fill
from elsa_format._threads import CORES, run
from elsa_format.levels import Sparsity

Tensor = NDArray[Any] | Bitmask | Csr

PARALLEL_FROM = 32 << 20
"""Bytes from which threads repay their start."""


def open(source: Source, *, verify: bool = True) -> "File":
    """Open an ELSA file, a shard index or a URL of either; only headers are read.

    >>> with open("net.safetensors") as file:
    ...     weights = file.load(level=2)
    >>> int((weights["layer"] != 0).sum())
    1000
    """
    return File(source, verify=verify)


class File:
    """An open ELSA file, or the shards of one: header questions at once, tensors on request.

    >>> file = open("net.safetensors")
    >>> file
    <elsa_format.File 'net.safetensors': levels 95%, 90%, 80%; 2 tensors>
    >>> file.bits, file.nested_weights, file.nested["layer"], file.per_level
    (2, 10000, (500, 1000, 2000), ())
    >>> file.tensors["layer"].shape, file.data_size, file.file_size > file.data_size
    ((100, 100), 40400, True)
    >>> file.close()
    """

    def __init__(self, source: Source, *, verify: bool = True) -> None:
        self.profile: Profile
        self._storage, self._header, self.profile = open_network(source)
        self.path = self._storage.name
        self._checked = self.profile if verify else None

    @property
    def bits(self) -> int:
        """τ, the number of counter bits."""
        return self.profile.bits

    @property
    def levels(self) -> tuple[Level, ...]:
        """The nested networks, sparsest first; level t is `levels[t - 1]`."""
        return self.profile.levels

    @property
    def nested(self) -> Mapping[str, tuple[int, ...]]:
        """Kept weights of every nested tensor at each level."""
        return MappingProxyType(dict(self.profile.nested))

    @property
    def per_level(self) -> tuple[str, ...]:
        """Tensors with a variant for each level."""
        return self.profile.per_level

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """The network's tensors, in stored order."""
        return {name: self._header.tensors[name] for name in plain_names(self._header)}

    @property
    def metadata(self) -> Mapping[str, str]:
        """The file's metadata other than the profile."""
        return {k: v for k, v in self._header.metadata.items() if k != _profile.KEY}

    @property
    def data_size(self) -> int:
        """Bytes of the data section."""
        return self._header.data_size

    @property
    def file_size(self) -> int:
        """Bytes of the whole file."""
        return self._header.data_start + self._header.data_size

    @property
    def nested_weights(self) -> int:
        """Number of weights that carry counters."""
        return sum(self._header.tensors[name].elements for name in self.profile.nested)

    def sparsity(self, level: LevelLike) -> float:
        """The fraction of nested weights that a level zeroes.

        >>> with open("net.safetensors") as file:
        ...     file.sparsity(2)
        0.9
        """
        number = self.profile.level_number(level, self.path)
        total = self.nested_weights
        kept = total if number is None else self.levels[number - 1].nonzero
        return 1 - kept / total if total else 0.0

    def size(self, level: LevelLike, layout: Layout = "dense") -> int:
        """Bytes of the file that extracting the level would give, from the header alone.

        >>> with open("net.safetensors") as file:
        ...     file.size(2) > file.size(2, "csr") > file.size(2, "bitmask")
        True
        """
        number = self.profile.level_number(level, self.path)
        check_layout(self.profile, number, layout, self.path)
        return self._sizes.size(number, layout)

    @cached_property
    def _sizes(self) -> LevelSizes:
        return LevelSizes(self._header, self.profile)

    def choose(
        self,
        *,
        sparsity: Sparsity | None = None,
        max_size: int | None = None,
        layout: Layout = "dense",
    ) -> LevelNumber:
        """The densest level with at least a sparsity, or with at most a size as a file.

        >>> with open("net.safetensors") as file:
        ...     file.choose(sparsity="85%"), file.choose(max_size=5000, layout="bitmask")
        (2, 1)
        """
        number = choose_level(
            self._header,
            self.profile,
            self.path,
            sparsity=sparsity,
            max_size=max_size,
            layout=layout,
        )
        return "dense" if number is None else number

    def tensor(self, name: str, level: LevelLike = "dense") -> NDArray[Any]:
        """One tensor of a level, without reading the others.

        >>> with open("net.safetensors") as file:
        ...     int((file.tensor("layer", level=1) != 0).sum())
        500
        """
        number = self.profile.level_number(level, self.path)
        info = self._info(name, number)
        return self._dense(info, number, Arena(info.nbytes))

    @overload
    def load(
        self, level: LevelLike = "dense", layout: Literal["dense"] = "dense"
    ) -> dict[str, NDArray[Any]]: ...
    @overload
    def load(
        self, level: LevelLike, layout: Literal["bitmask"]
    ) -> dict[str, NDArray[Any] | Bitmask]: ...
    @overload
    def load(self, level: LevelLike, layout: Literal["csr"]) -> dict[str, NDArray[Any] | Csr]: ...
    @overload
    def load(self, level: LevelLike, layout: Layout) -> Mapping[str, Tensor]: ...

    def load(self, level: LevelLike = "dense", layout: Layout = "dense") -> Mapping[str, Any]:
        """All tensors of a level; in a sparse layout, nested ones are `Bitmask` or `Csr`.

        >>> with open("net.safetensors") as file:
        ...     level = file.load(2, layout="csr")
        >>> level["layer"].matrix_shape, level["layer"].data.size, level["bias"].shape
        ((100, 100), 1000, (100,))
        """
        number = self.profile.level_number(level, self.path)
        check_layout(self.profile, number, layout, self.path)
        names = plain_names(self._header)
        loaded: dict[str, Any] = dict.fromkeys(names)
        placed = level_tensors(self._header, self.profile, number, layout).values()
        arena = Arena(sum(info.nbytes for info in placed))

        def load_one(name: str, along: Reader | None = None) -> None:
            info = self._info(name, number)
            if layout == "dense" or number is None or name not in self.profile.nested:
                loaded[name] = self._dense(info, number, arena, along)
            else:
                loaded[name] = self._sparse(info, number, layout, arena, along)

        if self._storage.high_latency:
            # One request for all of the data is cheaper than one for each tensor.
            start = self._header.data_start
            with closing(self._storage.reader(start, start + self.data_size)) as along:
                for name in sorted(names, key=lambda name: self._info(name, number).start):
                    load_one(name, along)
            return loaded
        by_size = sorted(names, key=lambda name: -self._header.tensors[name].nbytes)
        run(load_one, by_size, CORES if self._header.data_size >= PARALLEL_FROM else 1)
        return loaded

    def _info(self, name: str, level: int | None) -> TensorInfo:
        if name not in self._header.tensors or name.startswith(_profile.RESERVED):
            raise KeyError(name)
        return self._header.tensors[self.profile.stored_name(name, level)]

    def _dense(
        self, info: TensorInfo, level: int | None, arena: Arena, along: Reader | None = None
    ) -> NDArray[Any]:
        flat = arena.empty(info.nbytes)
        level_mask = mask_of(self.profile, info, level, self.path)
        for block in self._blocks(info, flat, along):
            level_mask.apply(block)
        level_mask.finish()
        return as_array(flat, info, self.path)

    def _sparse(
        self, info: TensorInfo, level: int, layout: Layout, arena: Arena, along: Reader | None
    ) -> Bitmask | Csr:
        tensor = nested_at(self.profile, info, level, self.path)
        filled: dict[str, NDArray[Any]] = {}

        def room(name: str, start: int, size: int, dtype: Any) -> NDArray[Any]:
            return filled[name][start : start + size].view(dtype)

        encode = encoder(layout, tensor, room)
        for part in parts(layout, info.name, info.dtype, info.shape, tensor.expected):
            assert part.dtype.numpy is not None
            filled[part.name] = arena.empty(part.nbytes).view(part.dtype.numpy)
        memory = take_block()
        for block in self._blocks(info, memory[: info.nbytes], along):
            encode.encode(block.view(info.dtype.words))
        give_block(memory)
        encode.finish()
        if layout == "bitmask":
            bitmask, values = filled.values()
            return Bitmask(bitmask, values, info.shape)
        indptr, indices, values = filled.values()
        return Csr(values, indices, indptr, info.shape)

    def _blocks(
        self, info: TensorInfo, into: NDArray[np.uint8], along: Reader | None
    ) -> Iterator[NDArray[np.uint8]]:
        """Read a tensor in cache-sized blocks, along `into` or, if that is smaller, over it."""
        checksum = Checksum(self._checked, info.name, self.path)
        start = self._header.data_start + info.start
        reader = self._storage.reader(start, start + info.nbytes) if along is None else along
        try:
            if info.nbytes:
                reader.seek(start)
            step = min(BLOCK, into.size)
            for position in range(0, info.nbytes, step or 1):
                size = min(step, info.nbytes - position)
                at = position if into.size == info.nbytes else 0
                block = into[at : at + size]
                fill(reader, block.data, self.path)
                checksum.update(block.data)
                yield block
            checksum.finish()
        finally:
            if along is None:
                reader.close()

    def close(self) -> None:
        """Close the file."""
        self._storage.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        names = ", ".join(level.name for level in self.levels)
        return f"<elsa_format.File {self.path!r}: levels {names}; {len(self.tensors)} tensors>"
