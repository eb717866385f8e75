"""An open network: where its bytes are, its header and profile, and what a level is made of."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from elsa_format import _level_document
from elsa_format._closing import Closing
from elsa_format._container.header import RESERVED, Header, TensorInfo
from elsa_format._layouts import Layout, Nested
from elsa_format._profile import KEY, LevelLike, LevelNumber, Profile, find_level, variant_name
from elsa_format._storage import Storage


@dataclass(frozen=True)
class Step:
    """What becomes of one stored tensor when a level is read."""

    info: TensorInfo
    name: str | None
    """Its name in the level, or None if the level does not use it."""
    nested: Nested | None = None
    """What the level keeps of it, if it carries counters and is not wanted whole."""


@dataclass(frozen=True, eq=False)
class Network(Closing):
    """A network in a file, a stream, a URL or shards; past opening nothing is parsed again."""

    storage: Storage
    header: Header
    profile: Profile
    shards: tuple["Network", ...] = ()
    """Each file by itself, if there are several; its profile is that of the whole."""
    about: Mapping[str, Any] = field(default_factory=dict, kw_only=True)
    """What else the index says, if there is one."""

    @property
    def name(self) -> str:
        """For messages."""
        return self.storage.name

    @property
    def parts(self) -> tuple["Network", ...]:
        """What can be read at the same time: the shards, or the only file."""
        return self.shards or (self,)

    @cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """The tensors a level consists of, in stored order."""
        tensors = self.header.tensors
        return {name: info for name, info in tensors.items() if not name.startswith(RESERVED)}

    @property
    def metadata(self) -> dict[str, str]:
        """What the file says besides."""
        own = (KEY, _level_document.KEY)
        return {key: text for key, text in self.header.metadata.items() if key not in own}

    @property
    def file_size(self) -> int:
        """Bytes of the file, or of all shards."""
        return self.header.data_start + self.header.data_size

    @cached_property
    def groups(self) -> Sequence[Sequence[str]]:
        """The tensors of each file."""
        return [list(part.tensors) for part in self.parts]

    @cached_property
    def weights(self) -> int:
        """Number of weights that carry counters."""
        return sum(self.header.tensors[name].elements for name in self.profile.nested)

    @property
    def counted(self) -> bool:
        """Whether the profile tells what levels keep; that of a dense level file does not."""
        return all(level.nonzero is not None for level in self.profile.levels)

    def sparsity(self, level: int | None) -> float | None:
        """The fraction of nested weights that a level zeroes, None if that is not known."""
        kept = self.weights if level is None else self.profile.levels[level - 1].nonzero
        if kept is None:
            return None
        return 1 - kept / self.weights if self.weights else 0.0

    def level_number(self, level: LevelLike) -> int | None:
        """The number of a level in the profile; None is the dense network."""
        return find_level(level, [entry.name for entry in self.profile.levels], self.name)

    def readable(self) -> list[int | None]:
        """The levels that can be read, sparsest first, and then the dense network."""
        return [*range(1, len(self.profile.levels) + 1), None]

    def only_level(self) -> int | None:
        """The level that is meant where none is named, if there is but one."""
        return None

    def stated(self, level: int | None) -> LevelNumber:
        """The level as it is told to people."""
        return "dense" if level is None else level

    def steps(self, level: int | None) -> list[Step]:
        """The way from stored tensors to a level's, in stored order; None is the dense network."""
        stored_names = self.profile.stored_name
        names = {stored_names(name, level): name for name in self.tensors}
        return [
            Step(info, names.get(stored), self.nested(info, level))
            for stored, info in self.header.tensors.items()
        ]

    def view(self, level: int | None) -> tuple[Storage, Mapping[str, str]]:
        """Where the tensors of a level are read from, and the checksums they have there."""
        return self.storage, self.profile.checksums

    def nested(self, info: TensorInfo, level: int | None) -> Nested | None:
        """What a level keeps of a stored tensor; None if all of it."""
        counts = self.profile.nested.get(info.name)
        if level is None or counts is None:
            return None
        return Nested(info, self.profile.bits, level, counts[level - 1], self.name)

    @property
    def limits(self) -> Sequence[int]:
        """Of every level the largest counter that it keeps."""
        return range(1, len(self.profile.levels) + 1)

    def describe(self, level: int, layout: Layout, nested: Mapping[str, TensorInfo]) -> str:
        """What the file of a level says of itself."""
        number, entry = int(self.stated(level)), self.profile.levels[level - 1]
        whole = self.profile.shard is None
        return _level_document.describe(number, entry, layout, nested, digest=whole)

    def part(self, names: frozenset[str], shard: tuple[int, int]) -> "Network":
        """The network as far as it is about some of its tensors, to be written as a shard."""
        profile = self.profile
        for name in names & profile.varying:
            names |= {variant_name(name, t) for t in range(1, len(profile.levels) + 1)}
        stored = {name: info for name, info in self.header.tensors.items() if name in names}
        return replace(
            self,
            header=replace(self.header, tensors=stored),
            profile=replace(
                profile,
                nested={name: n for name, n in profile.nested.items() if name in names},
                per_level=tuple(name for name in profile.per_level if name in names),
                shard=shard,
            ),
            shards=(),
        )

    def close(self) -> None:
        """Close the files."""
        self.storage.close()
