"""Open a network and read what is asked for, no more (spec §2.2)."""

from _thread import allocate_lock
from collections.abc import Iterator, Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal, overload

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64

from elsa_format import _kernels
from elsa_format._choose import LevelChoice, Metrics, check_layout, choose_level
from elsa_format._container import TensorInfo, check_out
from elsa_format._errors import InvalidOption, NoSuchTensor
from elsa_format._layouts import LAYOUTS, Bitmask, Csr, LayoutName, TensorMask
from elsa_format._level_header import LevelSizes, level_tensors
from elsa_format._level_reader import LevelReader, Proof, compare_checksum, counted, prove
from elsa_format._memory import Arena
from elsa_format._network import Network, PlannedTensor, open_level, open_network
from elsa_format._network.base import NestedArrays
from elsa_format._profile import Level, LevelLike, LevelNumber, Profile
from elsa_format._storage import Closing, Source
from elsa_format._threads import CORES, Renewed, run
from elsa_format.levels import Sparsity

Tensor = NDArray[Any] | Bitmask | Csr

PARALLEL_FROM = 32 << 20
"""Bytes from which threads repay their start."""


def open(source: Source, *, verify: bool = True, max_bytes: int | None = None) -> "File":
    """Open an ELSA file, a level file, a delivery file, or a shard index of these.

    Only headers are read. Of a delivery file the first bytes will do: the levels they hold can be
    loaded. Of a pipe, or a URL, no more is read than the requested levels need.

    Args:
        source: A path, a URL, a model directory or a binary stream.
        verify: Compare checksums.
        max_bytes: Refuse headers, or tensors as dense arrays, that take more than this.

    >>> with open("net.safetensors") as file:
    ...     weights = file.load(level=2)
    >>> int((weights["layer"] != 0).sum())
    1000
    """
    return File(source, verify=verify, max_bytes=max_bytes)


class File(Closing, Renewed):
    """An open network: header questions at once, tensors on request.

    >>> file = open("net.safetensors")
    >>> file
    <elsa_format.File 'net.safetensors': levels 95%, 90%, 80%; 2 tensors>
    >>> file.bits, file.nested_weights, file.nested["layer"], file.per_level
    (2, 10000, (500, 1000, 2000), ())
    >>> file.tensors["layer"].shape, file.data_size, file.file_size > file.data_size
    ((100, 100), 40400, True)
    >>> file.close()
    """

    def __init__(
        self, source: Source, *, verify: bool = True, max_bytes: int | None = None
    ) -> None:
        self.network: Network = open_network(source, max_bytes=max_bytes)
        """What the file is made of, for those who read it their own way."""
        self.path = self.network.name
        self._verify, self._proven = verify, False
        self._loaded: _Loaded | None = None
        super().__init__()

    def renew(self) -> None:
        """Be unlocked."""
        self._loading = allocate_lock()

    @property
    def profile(self) -> Profile:
        """What the file says about its levels."""
        return self.network.profile

    @property
    def bits(self) -> int:
        """τ, the number of counter bits."""
        return self.profile.bits

    @property
    def levels(self) -> tuple[Level, ...]:
        """The nested networks, sparsest first; level t is `levels[t - 1]`."""
        return self.profile.levels

    @property
    def available(self) -> tuple[LevelNumber, ...]:
        """The levels that can be read: of a delivery file, those that were downloaded.

        >>> with open("net.ship.safetensors") as file:
        ...     file.available
        (1, 2, 3, 'dense')
        """
        return tuple(self.network.available)

    @property
    def downloads(self) -> Mapping[LevelNumber, int]:
        """How many of the first bytes of a delivery file each level needs; of others nothing."""
        return dict(self.network.downloads)

    @property
    def nested(self) -> Mapping[str, tuple[int, ...]]:
        """Kept weights of every nested tensor at each level.

        Of a level file in the dense layout there are names alone: its header has no counts.
        """
        return MappingProxyType(dict(self.profile.nested))

    @property
    def per_level(self) -> tuple[str, ...]:
        """Tensors with a variant for each level."""
        return self.profile.per_level

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """The network's tensors, in stored order."""
        return dict(self.network.tensors)

    @property
    def metadata(self) -> Mapping[str, str]:
        """The file's metadata, without the document that says what kind of file it is."""
        return self.network.metadata

    @property
    def data_size(self) -> int:
        """Bytes of the data section."""
        return self.network.header.data_size

    @property
    def file_size(self) -> int:
        """Bytes of the whole file."""
        return self.network.file_size

    @property
    def nested_weights(self) -> int:
        """Number of weights that carry counters."""
        return self.network.weights

    def sparsity(self, level: LevelLike) -> float | None:
        """The fraction of nested weights that a level zeroes.

        None, unknown, of a level file in the dense layout: its header has no counts. The dense
        network zeroes none; it may have zeros of its own, which no header tells either.

        >>> with open("net.safetensors") as file:
        ...     file.sparsity(2)
        0.9
        """
        return self.network.sparsity(self.network.level_number(level))

    def size(self, level: LevelLike, layout: LayoutName = "dense") -> int:
        """Bytes of the file that extracting the level would give, from the header alone.

        A level file in the dense layout is read for the size in a sparse one, as for `choose`.

        >>> with open("net.safetensors") as file:
        ...     file.size(2) > file.size(2, "csr") > file.size(2, "bitmask")
        True
        """
        number = self.network.level_number(level)
        check_layout(self.network, number, layout)
        known = layout == "dense" or self.network.counted
        return (self._sizes if known else LevelSizes(self._counted)).size(number, layout)

    @cached_property
    def _counted(self) -> Network:
        """The network with what each level keeps, where the data has to be read for it."""
        return counted(self.network)

    @cached_property
    def _sizes(self) -> LevelSizes:
        return LevelSizes(self.network)

    def choose(
        self,
        *,
        sparsity: Sparsity | None = None,
        max_size: int | None = None,
        min: Metrics | None = None,
        max: Metrics | None = None,
        layout: LayoutName = "dense",
    ) -> LevelNumber:
        """The densest level with at least a sparsity, or with at most a size as a file.

        Or the sparsest with metrics of at least `min` and at most `max`, such as
        `{"accuracy": 0.9}`; with `max_size`, the best of these that is small enough.

        >>> with open("net.safetensors") as file:
        ...     file.choose(sparsity="85%"), file.choose(max_size=5000, layout="bitmask")
        (2, 1)
        """
        network = self.network if layout == "dense" and sparsity is None else self._counted
        choice = LevelChoice(sparsity=sparsity, max_size=max_size, min=min, max=max)
        return choose_level(network, choice, layout=layout)

    def tensor(
        self, name: str, level: LevelLike = "dense", *, out: NDArray[Any] | None = None
    ) -> NDArray[Any]:
        """One tensor of a level, without reading the others; into `out`, if that is given.

        >>> with open("net.safetensors") as file:
        ...     int((file.tensor("layer", level=1) != 0).sum())
        500
        """
        number = self.network.level_number(level)
        planned = self._planned(name, number)
        info, flat = planned.info, None
        if out is not None:
            check_out(out, info.dtype.numpy, info.shape, f" for tensor {info.name!r}")
            flat = out.reshape(-1).view(np.uint8)
        self._prove()
        with LevelReader(self.network, number, only=info, verify=self._verify) as reader:
            return reader.array(planned, flat)

    def _prove(self) -> None:
        """See, once, that a level file is what it states: its tensors have no checksums."""
        if self._verify and not self._proven:
            prove(self.network)
        self._proven = True

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
    def load(self, level: LevelLike, layout: LayoutName) -> Mapping[str, Tensor]: ...

    def load(self, level: LevelLike = "dense", layout: LayoutName = "dense") -> Mapping[str, Any]:
        """All tensors of a level; in a sparse layout, nested ones are `Bitmask` or `Csr`.

        Dense arrays of a delivery file are kept for `upgrade`, which changes them, until another
        level is loaded or the file is closed.

        >>> with open("net.safetensors") as file:
        ...     level = file.load(2, layout="csr")
        >>> level["layer"].matrix_shape, level["layer"].data.size, level["bias"].shape
        ((100, 100), 1000, (100,))
        """
        number = self.network.level_number(level)
        check_layout(self.network, number, layout)
        network = self.network if layout == "dense" else self._counted
        loaded: dict[str, Any] = dict.fromkeys(network.tensors)
        self._loaded = None  # gives its memory back
        if layout == "dense" and (decoded := _decode(network, number)):
            self._loaded = _Loaded(network, number, loaded, decoded)
        placed = level_tensors(network, number, layout).values()
        arena = Arena(sum(info.nbytes for info in placed if loaded.get(info.name) is None))

        def load_one(planned: PlannedTensor, reader: LevelReader) -> None:
            info, name = planned.info, str(planned.name)
            if layout == "dense" or planned.mask is None:
                loaded[name] = reader.array(planned, arena.empty(info.nbytes))
            else:
                loaded[name] = _load_sparse(reader, planned.mask, layout, arena)

        proof = Proof(network, verify=self._verify)

        def load_alone(planned: PlannedTensor) -> None:
            verify, only = self._verify, planned.info
            with LevelReader(network, number, only=only, verify=verify, proof=proof) as reader:
                load_one(planned, reader)

        plan = [s for s in network.plan(number) if s.name is not None and loaded[s.name] is None]
        if network.high_latency or self.data_size < PARALLEL_FROM:
            # One request for all of the data is cheaper than one for each tensor.
            with LevelReader(network, number, verify=self._verify, proof=proof) as reader:
                for planned in plan:
                    load_one(planned, reader)
        else:
            plan.sort(key=lambda planned: -planned.info.nbytes)
            run(load_alone, plan, CORES)
        proof.finish()
        return loaded

    def upgrade(self, level: LevelLike) -> Mapping[str, NDArray[Any]]:
        """Make what was loaded from a delivery file a denser level, in the arrays that it is in.

        Only the difference is read. Of two upgrades at once the second waits for the first. If one
        fails, the arrays are of no use any more: load them again.

        >>> with open("net.ship.safetensors") as file:
        ...     weights = file.load(1)
        ...     file.upgrade(2) is weights
        True
        """
        number = self.network.level_number(level)
        with self._loading:
            loaded = self._loaded
            if loaded is None:
                raise InvalidOption(
                    f"{self.path}: no level is loaded that could be upgraded; only the dense "
                    "arrays of a delivery file can be"
                )
            if loaded.level == "dense" or (number != "dense" and number < loaded.level):
                if number != loaded.level:
                    raise InvalidOption(
                        f"{self.path}: level {loaded.level} is loaded, "
                        f"and {level!r} is not above it"
                    )
                return loaded.arrays
            self.network.need(number)
            self._loaded = None
            loaded.upgrade(number)
            self._loaded = loaded
        return loaded.arrays

    def stream(self, level: LevelLike = "dense") -> Iterator[tuple[str, NDArray[Any]]]:
        """The tensors of a level one after the other, in the order in which they are stored.

        >>> with open("net.ship.safetensors") as file:
        ...     [name for name, array in file.stream(1)]
        ['layer', 'bias']
        """
        return _stream(self.network, level, verify=self._verify)

    def _planned(self, name: str, level: LevelNumber) -> PlannedTensor:
        if name not in self.network.tensors:
            raise NoSuchTensor.of(self.path, "no tensor", name, self.network.tensors)
        info = self.network.header.tensors[self.profile.stored_name(name, level)]
        return PlannedTensor(info, name, self.network.mask(info, level))

    def close(self) -> None:
        """Close the file."""
        self._loaded = None
        self.network.close()

    def __repr__(self) -> str:
        names = ", ".join(level.name for level in self.levels)
        return f"<elsa_format.File {self.path!r}: levels {names}; {len(self.tensors)} tensors>"


class _Loaded:
    """A level of delivery files as arrays that grow."""

    def __init__(
        self,
        network: Network,
        level: LevelNumber,
        arrays: dict[str, NDArray[Any]],
        decoded: list[NestedArrays],
    ) -> None:
        self.network, self.level, self.arrays, self._decoded = network, level, arrays, decoded
        for nested in decoded:
            arrays |= nested.arrays
        self._check()

    def upgrade(self, level: LevelNumber) -> None:
        """Add what a denser level keeps, and replace what it has of its own."""
        for nested in self._decoded:
            nested.upgrade(level, CORES)
        self.level = level
        with LevelReader(self.network, level) as reader:
            for planned in self.network.plan(level):
                if planned.name in self.network.profile.varying:
                    reader.array(planned, self.arrays[planned.name].reshape(-1).view(np.uint8))
        self._check()

    def _check(self) -> None:
        """Compare counts, and checksums of the dense network: payloads have their own."""
        network, profile = self.network, self.network.profile
        levels = len(profile.levels) if self.level == "dense" else self.level
        for name in (name for nested in self._decoded for name in nested.arrays):
            info, words = network.header.tensors[name], self.arrays[name].reshape(-1)
            counts = _kernels.count(words.view(info.dtype.words), profile.bits)
            profile.check_counts(name, counts.tolist(), network.name, levels)
            if stated := network.checksum(name, self.level):
                compare_checksum(network.name, info, xxh3_64(words.view(np.uint8).data), stated)


def _decode(network: Network, level: LevelNumber) -> list[NestedArrays]:
    """The nested tensors of all files, if they can be had together."""
    network.need(level)
    return [nested for file in network.files if (nested := file.decode(level, CORES))]


def _load_sparse(reader: LevelReader, nested: TensorMask, layout: LayoutName, arena: Arena) -> Any:
    info, form = nested.info, LAYOUTS[layout]
    parts: dict[str, NDArray[Any]] = {}

    def buffer(name: str, start: int, size: int, dtype: Any) -> NDArray[Any]:
        return parts[name][start : start + size].view(dtype)

    encoder = form.encoder(nested, buffer)
    for part in form.parts(info, nested.expected):
        assert part.dtype.numpy is not None
        parts[part.name] = arena.empty(part.nbytes).view(part.dtype.numpy)
    for block in reader.blocks(info):
        encoder.encode(block.view(info.dtype.words))
    encoder.finish()
    return form.loaded(list(parts.values()), info.shape)


def stream(
    source: Source,
    *,
    level: LevelLike = "dense",
    verify: bool = True,
    max_bytes: int | None = None,
) -> Iterator[tuple[str, NDArray[Any]]]:
    """The tensors of a level as they arrive, one array at a time, from a source that need not seek.

    A network of more than `max_bytes` is refused from the header alone.

    >>> for name, array in stream("net.safetensors", level=2):
    ...     print(name, array.shape)
    layer (100, 100)
    bias (100,)
    """
    with open_network(source, sequential=True, max_bytes=max_bytes) as network:
        yield from _stream(network, level, verify=verify)


def _stream(
    network: Network, level: LevelLike, *, verify: bool
) -> Iterator[tuple[str, NDArray[Any]]]:
    number = network.level_number(level)
    with LevelReader(network, number, verify=verify) as reader:
        for planned in reader.tensors():
            if planned.name is None:
                reader.skip(planned.info)
            else:
                yield planned.name, reader.array(planned)


def load_level(
    source: Source, *, verify: bool = True, max_bytes: int | None = None
) -> dict[str, NDArray[Any]]:
    """A level that `extract` wrote, in whatever layout, as dense arrays; its digest is verified.

    A level of more than `max_bytes` is refused from the header alone: few bytes in a sparse layout
    may stand for many.

    >>> from elsa_format import extract
    >>> level = extract("net.safetensors", "level3.safetensors", level=3, layout="bitmask")
    >>> layer = load_level("level3.safetensors")["layer"]
    >>> layer.tobytes() == open("net.safetensors").tensor("layer", level).tobytes()
    True
    """
    with open_level(source, sequential=True, max_bytes=max_bytes) as network:
        return dict(_stream(network, network.available[0], verify=verify))
