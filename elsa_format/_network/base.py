"""A network: named tensors that are read by name, and what each of its levels is made of.

What holds it (a file, shards, a delivery file) is a subclass, one a module; who reads a level asks
for tensors, never for byte positions.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from elsa_format._container import DOCUMENTS, RESERVED, Header, Kind, TensorInfo
from elsa_format._counters import MAX_BITS, NOT_ZERO
from elsa_format._errors import InvalidOption, NoSuchLevel, NotElsa
from elsa_format._layouts import LayoutName, TensorMask
from elsa_format._options import renamed
from elsa_format._profile import LevelLike, LevelNumber, Profile
from elsa_format._storage import Closing, Fillable


@dataclass(frozen=True)
class PlannedTensor:
    """What becomes of one stored tensor when a level is read."""

    info: TensorInfo
    name: str | None
    """Its name in the level, or None if the level does not use it."""
    mask: TensorMask | None = None
    """What the level keeps of it, if it carries counters and is not wanted whole."""


class TensorBytes(Closing, ABC):
    """The bytes of stored tensors, one tensor after the other."""

    @abstractmethod
    def seek(self, info: TensorInfo) -> Fillable:
        """Go to the first byte of a tensor; what gives its bytes, until the next is sought."""

    def finish(self) -> None:
        """Raise TrailingData if bytes follow the last tensor."""


class NestedArrays(Protocol):
    """Nested tensors as arrays that can be made those of a denser level."""

    @property
    def arrays(self) -> Mapping[str, NDArray[Any]]:
        """By name; those without elements need not be among them."""
        ...

    def upgrade(self, level: LevelNumber, jobs: int) -> None:
        """Add what a denser level keeps."""
        ...


@dataclass(frozen=True, eq=False)
class Network(Closing, ABC):
    """An open network; past opening nothing is parsed again."""

    name: str
    """For messages."""
    header: Header
    """The tensors with their dtypes and shapes, and the metadata; of shards, those of all."""
    profile: Profile
    extra_metadata: Mapping[str, Any] = field(default_factory=dict, kw_only=True)
    """What else the index says, if there is one."""

    # --- Bytes -----------------------------------------------------------------------------------

    @abstractmethod
    def open(self, level: LevelNumber = "dense", only: TensorInfo | None = None) -> TensorBytes:
        """Get ready to read the stored tensors of a level, or the `only` one that is wanted."""

    def need(self, level: LevelNumber) -> None:
        """Raise Incomplete unless a level can be read; of shards, before any of them is."""

    @abstractmethod
    def check_unchanged(self) -> None:
        """Raise InputChanged if the bytes are no longer those that were opened."""

    @property
    def high_latency(self) -> bool:
        """Whether tensors are better read one after the other than at the same time."""
        return False

    @property
    def files(self) -> Sequence["Network"]:
        """What can be read at the same time: the shards, or the only file."""
        return (self,)

    def rereadable(self) -> "Network":
        """The same, with bytes that can be read more than once."""
        return self

    @abstractmethod
    def place(self, stored: str) -> tuple[str, int]:
        """The name of the file that holds a stored tensor as it is, and where it begins there."""

    def mapped(self, stored: str) -> NDArray[np.uint8] | None:
        """A stored tensor's bytes, not read yet; None where no local file holds it as it is.

        They may be written to, which the file does not notice.
        """
        return None

    @property
    def original_start(self) -> bytes:
        """Of a delivery file: what comes before the tensors in the ELSA file it was made of."""
        raise InvalidOption(f"{self.name}: is not a delivery file, which alone can be restored")

    def decode(self, level: LevelNumber, jobs: int) -> "NestedArrays | None":
        """Nested tensors of a level that grow in place, where these are quicker made together."""
        return None

    # --- Tensors ---------------------------------------------------------------------------------

    @property
    def kind(self) -> Kind:
        """What holds it."""
        return "elsa"

    @property
    def layout(self) -> LayoutName:
        """How a level file holds its nested tensors; in all others they are dense."""
        return "dense"

    @cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """The tensors a level consists of, in stored order."""
        tensors = self.header.tensors
        return {name: info for name, info in tensors.items() if not name.startswith(RESERVED)}

    @property
    def metadata(self) -> dict[str, str]:
        """What the file says besides."""
        found = self.header.metadata
        return {key: text for key, text in found.items() if key not in DOCUMENTS}

    @property
    def stored_header(self) -> Header:
        """The header of the file itself, where that is not as dense tensors would have it."""
        return self.header

    @property
    def file_size(self) -> int:
        """Bytes of the file, or of all shards."""
        return self.header.data_start + self.header.data_size

    @property
    def groups(self) -> Sequence[Sequence[str]]:
        """The tensors of each file."""
        return [list(file.tensors) for file in self.files]

    @cached_property
    def weights(self) -> int:
        """Number of weights that carry counters."""
        return sum(self.header.tensors[name].elements for name in self.profile.nested)

    def checksum(self, stored: str, level: LevelNumber) -> str | None:
        """The checksum of a stored tensor's bytes as they are read with a level, if it has one."""
        return self.profile.checksums.get(stored)

    @property
    def digests(self) -> Sequence[tuple[Iterable[str], str]]:
        """What a level file, and each of its shards, states of tensors that it holds."""
        digest = self.profile.levels[0].digest if self.profile.single else None
        return [(self.tensors, digest)] if digest else []

    # --- Levels ----------------------------------------------------------------------------------

    @property
    def levels(self) -> Sequence[LevelNumber]:
        """Its levels, sparsest first, and then the dense network, which a level file lacks."""
        levels = [level.number for level in self.profile.levels]
        return levels if self.profile.single else [*levels, "dense"]

    @property
    def available(self) -> Sequence[LevelNumber]:
        """The levels that can be read: of a delivery file, those that were downloaded."""
        return self.levels

    @property
    def downloads(self) -> Mapping[LevelNumber, int]:
        """How many of the first bytes of a delivery file each level needs; of others nothing."""
        return {}

    def level_number(self, level: LevelLike) -> LevelNumber:
        """The number of a level, or "dense"."""
        return self.profile.level_number(level, self.name)

    def sparsity(self, level: LevelNumber) -> float | None:
        """The fraction of nested weights that a level zeroes, None if that is not known."""
        kept = self.weights if level == "dense" else self.profile.level(level).nonzero
        if kept is None:
            return None
        return 1 - kept / self.weights if self.weights else 0.0

    def plan(self, level: LevelNumber) -> list[PlannedTensor]:
        """The way from stored tensors to a level's, in stored order."""
        stored_names = self.profile.stored_name
        names = {stored_names(name, level): name for name in self.tensors}
        return [
            PlannedTensor(info, names.get(stored), self.mask(info, level))
            for stored, info in self.header.tensors.items()
            if self.holds(stored, level)
        ]

    def steps(self, level: LevelNumber) -> list[PlannedTensor]:
        """What `plan` was called in earlier releases."""
        renamed("Network.steps", "plan")
        return self.plan(level)

    def holds(self, stored: str, level: LevelNumber) -> bool:
        """Whether reading a level can read a stored tensor: not what only denser ones need."""
        return True

    def mask(self, info: TensorInfo, level: LevelNumber) -> TensorMask | None:
        """What a level keeps of a stored tensor; None if all of it."""
        counts = self.profile.nested.get(info.name)
        if level == "dense" or counts is None:
            return None
        if self.profile.single:  # all that is not zero; without counts if they are not known
            return TensorMask(info, NOT_ZERO, NOT_ZERO, sum(counts), self.name)
        return TensorMask(info, self.profile.bits, level, counts[level - 1], self.name)

    def slack(self, info: TensorInfo) -> int | None:
        """How many low bits of a tensor packing may have changed; None if levels have their own.

        A level file tells neither τ nor which tensors are per level.
        """
        nested = info.name in self.profile.nested
        if self.profile.single:
            return min(MAX_BITS, info.dtype.mantissa) if nested else None
        if info.name in self.profile.varying:
            return None
        return self.profile.bits if nested else 0

    @property
    def counted(self) -> bool:
        """Whether the profile tells what levels keep; that of a dense level file does not."""
        return all(level.nonzero is not None for level in self.profile.levels)

    def with_counts(self, kept: Mapping[str, int]) -> Self:
        """The same with what a level file keeps of its nested tensors, which somebody counted."""
        return self

    # --- Refusals --------------------------------------------------------------------------------

    def need_levels(self) -> None:
        """Refuse what is not an ELSA file."""
        if self.kind == "level":
            raise NotElsa(f"{self.name}: is a level, not a network that holds levels")
        if self.kind == "delivery":
            raise NotElsa(f"{self.name}: is a delivery file already")

    def first_levels(self, level: LevelNumber) -> int:
        """How many levels there are up to one; none in a level file or below the dense network."""
        if self.profile.single:
            raise NoSuchLevel(f"{self.name}: a level file has no levels to keep")
        if level == "dense":
            raise NoSuchLevel(
                f"{self.name}: the dense network has no levels to keep, "
                f"expected a level 1..{len(self.profile.levels)}"
            )
        return level
