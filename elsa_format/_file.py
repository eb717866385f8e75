"""Open an ELSA file and read what is asked for, no more (spec §2.2)."""

from collections.abc import Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal, overload

import numpy as np
from numpy.typing import NDArray

from elsa_format._choose import check_layout, choose_level
from elsa_format._closing import Closing
from elsa_format._container.arrays import check_out
from elsa_format._container.header import TensorInfo
from elsa_format._errors import NoSuchTensor
from elsa_format._layouts import FORMS, Bitmask, Csr, Layout, Nested
from elsa_format._level_header import LevelSizes, level_tensors
from elsa_format._level_reader import LevelReader, Proof, counted, prove
from elsa_format._memory import Arena
from elsa_format._network import Network, Step, open_network
from elsa_format._profile import Level, LevelLike, LevelNumber, Profile
from elsa_format._storage import Source
from elsa_format._threads import CORES, run
from elsa_format.levels import Sparsity

Tensor = NDArray[Any] | Bitmask | Csr

PARALLEL_FROM = 32 << 20
"""Bytes from which threads repay their start."""


def open(source: Source, *, verify: bool = True, max_bytes: int | None = None) -> "File":
    """Open an ELSA file, a level file, a shard index or a URL of these; only headers are read.

    A header, or tensors, of more than `max_bytes` are refused before there is memory for them.

    >>> with open("net.safetensors") as file:
    ...     weights = file.load(level=2)
    >>> int((weights["layer"] != 0).sum())
    1000
    """
    return File(source, verify=verify, max_bytes=max_bytes)


class File(Closing):
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

    def __init__(
        self, source: Source, *, verify: bool = True, max_bytes: int | None = None
    ) -> None:
        self.network: Network = open_network(source, max_bytes=max_bytes)
        """What the file is made of, for those who read it their own way."""
        self.path = self.network.name
        self._verify, self._proven = verify, False

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

    def size(self, level: LevelLike, layout: Layout = "dense") -> int:
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
        layout: Layout = "dense",
    ) -> LevelNumber:
        """The densest level with at least a sparsity, or with at most a size as a file.

        >>> with open("net.safetensors") as file:
        ...     file.choose(sparsity="85%"), file.choose(max_size=5000, layout="bitmask")
        (2, 1)
        """
        network = self.network if layout == "dense" and sparsity is None else self._counted
        return choose_level(network, sparsity=sparsity, max_size=max_size, layout=layout)

    def tensor(
        self, name: str, level: LevelLike = "dense", *, out: NDArray[Any] | None = None
    ) -> NDArray[Any]:
        """One tensor of a level, without reading the others; into `out`, if that is given.

        >>> with open("net.safetensors") as file:
        ...     int((file.tensor("layer", level=1) != 0).sum())
        500
        """
        number = self.network.level_number(level)
        step = self._step(name, number)
        info, flat = step.info, None
        if out is not None:
            check_out(out, info.dtype.numpy, info.shape, f" for tensor {info.name!r}")
            flat = out.reshape(-1).view(np.uint8)
        self._prove()
        with LevelReader(self.network, number, only=info, verify=self._verify) as reader:
            return reader.array(step, flat)

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
    def load(self, level: LevelLike, layout: Layout) -> Mapping[str, Tensor]: ...

    def load(self, level: LevelLike = "dense", layout: Layout = "dense") -> Mapping[str, Any]:
        """All tensors of a level; in a sparse layout, nested ones are `Bitmask` or `Csr`.

        >>> with open("net.safetensors") as file:
        ...     level = file.load(2, layout="csr")
        >>> level["layer"].matrix_shape, level["layer"].data.size, level["bias"].shape
        ((100, 100), 1000, (100,))
        """
        number = self.network.level_number(level)
        check_layout(self.network, number, layout)
        network = self.network if layout == "dense" else self._counted
        loaded: dict[str, Any] = dict.fromkeys(network.tensors)
        placed = level_tensors(network, number, layout).values()
        arena = Arena(sum(info.nbytes for info in placed))

        def load_one(step: Step, reader: LevelReader) -> None:
            info, name = step.info, str(step.name)
            if layout == "dense" or step.nested is None:
                loaded[name] = reader.array(step, arena.empty(info.nbytes))
            else:
                loaded[name] = _load_sparse(reader, step.nested, layout, arena)

        proof = Proof(network) if self._verify else None

        def load_alone(step: Step) -> None:
            verify, only = self._verify, step.info
            with LevelReader(network, number, only=only, verify=verify, proof=proof) as reader:
                load_one(step, reader)

        steps = [step for step in network.steps(number) if step.name is not None]
        if network.high_latency or self.data_size < PARALLEL_FROM:
            # One request for all of the data is cheaper than one for each tensor.
            with LevelReader(network, number, verify=self._verify, proof=proof) as reader:
                for step in steps:
                    load_one(step, reader)
        else:
            steps.sort(key=lambda step: -step.info.nbytes)
            run(load_alone, steps, CORES)
        if proof is not None:
            proof.finish()
        return loaded

    def _step(self, name: str, level: LevelNumber) -> Step:
        if name not in self.network.tensors:
            raise NoSuchTensor.of(self.path, "no tensor", name, self.network.tensors)
        info = self.network.header.tensors[self.profile.stored_name(name, level)]
        return Step(info, name, self.network.nested(info, level))

    def close(self) -> None:
        """Close the file."""
        self.network.close()

    def __repr__(self) -> str:
        names = ", ".join(level.name for level in self.levels)
        return f"<elsa_format.File {self.path!r}: levels {names}; {len(self.tensors)} tensors>"


def _load_sparse(reader: LevelReader, nested: Nested, layout: Layout, arena: Arena) -> Any:
    info, form = nested.info, FORMS[layout]
    parts: dict[str, NDArray[Any]] = {}

    def room(name: str, start: int, size: int, dtype: Any) -> NDArray[Any]:
        return parts[name][start : start + size].view(dtype)

    encoder = form.encoder(nested, room)
    for part in form.parts(info, nested.expected):
        assert part.dtype.numpy is not None
        parts[part.name] = arena.empty(part.nbytes).view(part.dtype.numpy)
    for block in reader.blocks(info):
        encoder.encode(block.view(info.dtype.words))
    encoder.finish()
    return form.loaded(list(parts.values()), info.shape)
