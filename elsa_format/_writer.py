"""Write an ELSA file in one pass: data first, then the header that describes it (spec §3.5)."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from elsa_format import _kernels
from elsa_format._container import (
    DOCUMENTS,
    RESERVED,
    TensorInfo,
    lay_out,
    serialize,
)
from elsa_format._container.dtypes import of_array
from elsa_format._container.json import MAX_SAFE_INTEGER
from elsa_format._counters import MAX_BITS, bits_for, check_bits, refuse_unpackable
from elsa_format._destination import Destination, open_destination
from elsa_format._digest import LevelDigests, digest_of_lines
from elsa_format._errors import CounterOutOfRange, InvalidHeader, InvalidProfile, TensorMismatch
from elsa_format._memory import BLOCK
from elsa_format._options import check_int, strings
from elsa_format._output import Output, Target
from elsa_format._profile import (
    KEY,
    ZEROS,
    Level,
    MetricInfo,
    Profile,
    check_level_table,
    join_profiles,
    plain_number,
    plain_numbers,
    signed,
    variant_name,
)
from elsa_format._threads import Progress, no_progress

_LONGEST = -0.0000012345678901234567
"""No number takes more characters."""


@dataclass(frozen=True)
class LevelSpec:
    """What a writer is told about a level; the rest is counted.

    >>> LevelSpec("90%", target=0.9, metrics={"accuracy": 0.98}).name
    '90%'
    """

    name: str
    target: float | None = None
    pattern: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    errors: Mapping[str, float] = field(default_factory=dict)
    """Standard errors of metrics."""


@dataclass(frozen=True)
class Totals:
    """What the data says about every level: of one shard, or added up, of the network."""

    nonzero: tuple[int, ...]
    lines: tuple[dict[str, str], ...] | None
    """The digest's lines; None if no digests are wanted."""

    def __add__(self, other: "Totals") -> "Totals":
        lines = None
        if self.lines is not None and other.lines is not None:
            pairs = zip(self.lines, other.lines, strict=True)
            lines = tuple({**one, **more} for one, more in pairs)
        kept = zip(self.nonzero, other.nonzero, strict=True)
        return Totals(tuple(one + more for one, more in kept), lines)

    @cached_property
    def digests(self) -> Sequence[str | None]:
        """The digest of each level."""
        if self.lines is None:
            return [None] * len(self.nonzero)
        return [digest_of_lines(lines) for lines in self.lines]


@dataclass(frozen=True)
class Contents:
    """What a network to be written consists of, besides its tensors."""

    bits: int
    levels: Sequence[LevelSpec | Level]
    """What is told of each; what a Level has counted is counted anew."""
    nested: frozenset[str]
    per_level: frozenset[str] = frozenset()
    metadata: Mapping[str, str] = field(default_factory=dict)
    dense_metrics: Mapping[str, float] = field(default_factory=dict)
    digests: bool = True
    dense_errors: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, MetricInfo] = field(default_factory=dict)
    extra_metadata: Mapping[str, Any] = field(default_factory=dict)
    """What else an index is to say."""

    def checked(self) -> "Contents":
        """The same with Python's numbers; what no reader would accept of it is refused."""
        for key, value in self.metadata.items():
            if key in DOCUMENTS:
                raise InvalidHeader(f"metadata {key!r}: the name is reserved")
            if not isinstance(key, str) or not isinstance(value, str):
                raise InvalidHeader(f"metadata {key!r}: {value!r}, expected strings")
        levels = tuple(
            replace(
                s,
                target=plain_number(s.target),
                metrics=plain_numbers(s.metrics),
                errors=plain_numbers(s.errors),
            )
            for s in self.levels
        )
        contents = replace(
            self,
            levels=levels,
            dense_metrics=plain_numbers(self.dense_metrics),
            dense_errors=plain_numbers(self.dense_errors),
        )
        check_level_table(
            contents.table(Totals((0,) * len(levels), None)),
            contents.dense_metrics,
            contents.dense_errors,
            contents.metrics,
        )
        return contents

    def measured(self, found: Sequence[Mapping[str, float]]) -> "Contents":
        """The same with the metrics of each level, then of the dense network."""
        *levels, dense = found
        return replace(
            self,
            levels=[replace(s, metrics=m) for s, m in zip(self.levels, levels, strict=True)],
            dense_metrics=dense,
        ).checked()

    def unmeasured(self, metrics: Mapping[str, MetricInfo]) -> "Contents":
        """The same with room for metrics that are known only after the data."""
        room = [dict.fromkeys(metrics, _LONGEST)] * (len(self.levels) + 1)
        return replace(self, metrics=metrics).measured(room) if metrics else self

    def only(self, names: AbstractSet[str]) -> "Contents":
        """As far as it is about some of the tensors."""
        return replace(self, nested=self.nested & names, per_level=self.per_level & names)

    def variants(self) -> dict[str, tuple[str, int]]:
        """Under which name each level's variant of a tensor is stored."""
        return {
            variant_name(name, t): (name, t)
            for name in sorted(self.per_level)
            for t in range(1, len(self.levels) + 1)
        }

    def table(self, network: Totals) -> tuple[Level, ...]:
        """The level table, with what was counted."""
        return tuple(
            Level(
                name=level.name,
                nonzero=network.nonzero[t],
                target=level.target,
                pattern=level.pattern,
                digest=network.digests[t],
                metrics=level.metrics,
                errors=level.errors,
            )
            for t, level in enumerate(self.levels)
        )


class ShardWriter:
    """Places every tensor in advance, takes their bytes in any order, then writes the header.

    The header has room reserved for its longest form: counts are known only after the data, and
    a shard's level table only after all shards' data.
    """

    def __init__(
        self,
        output: Output,
        tensors: Sequence[TensorInfo],
        contents: Contents,
        shard: tuple[int, int] | None = None,
    ) -> None:
        self.output, self.shard = output, shard
        self.contents = contents = contents.only({info.name for info in tensors})
        bits, self._numbers = contents.bits, range(1, len(contents.levels) + 1)
        self.counts = {name: np.zeros(1 << bits, np.int64) for name in sorted(contents.nested)}
        self.variants = contents.variants()
        self.tensors = lay_out(tensors, first=self.variants)
        self._positions = {name: info.start for name, info in self.tensors.items()}
        # Hashes live only while their tensor is written: each takes half a kilobyte.
        self._hashes: dict[str, xxhash.xxh3_64] = {}
        self._checksums = dict.fromkeys(self.tensors, f"xxh3:{ZEROS}")
        self._digests: LevelDigests | None = None
        if contents.digests:
            names = contents.nested, contents.per_level, self.variants
            self._digests = LevelDigests(bits, self._numbers, *names)
        self._reserved = 0
        self._reserved = len(self._header(self._longest_profile()))

    def taken(self, name: str) -> int:
        """How many elements of a tensor are stored."""
        info = self.tensors[name]
        return (self._positions[name] - info.start) * 8 // info.dtype.size

    def append(self, name: str, data: NDArray[Any]) -> None:
        """Store the next bytes of a tensor.

        Blocks of a nested tensor hold, but for the last, a multiple of 8 elements.
        """
        info = self.tensors[name]
        block = data.reshape(-1).view(np.uint8)
        position = self._positions[name]
        self._positions[name] = position + block.size
        self.output.write_at(self._reserved + position, block)
        self._look_at(name, block, info)
        if self._positions[name] == info.stop:
            self._end_tensor(name, info)

    def _look_at(self, name: str, block: NDArray[np.uint8], info: TensorInfo) -> None:
        """Take a block into checksum, counts and digests."""
        if name not in self._hashes:
            self._hashes[name] = xxhash.xxh3_64()
        self._hashes[name].update(block.data)
        if name in self.counts:
            words = block.view(info.dtype.words)
            self.counts[name] += _kernels.count(words, self.contents.bits)
        if self._digests:
            self._digests.take(info, block)

    def _end_tensor(self, name: str, info: TensorInfo) -> None:
        self._checksums[name] = f"xxh3:{self._hashes.pop(name).hexdigest()}"
        if self._digests:
            self._digests.end(info)

    def close_data(self) -> Totals:
        """Check that all bytes are there, and add up what they hold."""
        for name, info in self.tensors.items():
            if not info.nbytes:
                self.append(name, np.empty(0, np.uint8))
            if self._positions[name] != info.stop:
                raise ValueError(f"tensor {name!r} is incomplete")
        for name, counts in self.counts.items():
            if counts[self._numbers.stop :].any():
                top = int(counts.nonzero()[0][-1])
                raise CounterOutOfRange(
                    f"tensor {name!r}: counter {top}, expected 0..{len(self._numbers)}"
                )
        return self._totals()

    def write_header(self, network: Totals) -> Profile:
        """Write the header; the level table is that of the whole network."""
        profile = self._profile(network)
        header = self._header(profile)
        if len(header) > self._reserved:
            raise ValueError(f"header of {len(header)} bytes, expected {self._reserved}")
        self.output.write_at(0, header)
        return profile

    def _totals(self) -> Totals:
        kept = self._kept().values()
        lines = tuple(self._digests.lines) if self._digests else None
        return Totals(tuple(sum(c[t] for c in kept) for t in range(len(self._numbers))), lines)

    def _kept(self) -> dict[str, tuple[int, ...]]:
        return {
            name: tuple(int(n) for n in counts[1 : self._numbers.stop].cumsum())
            for name, counts in self.counts.items()
        }

    def _profile(self, network: Totals) -> Profile:
        return Profile(
            bits=self.contents.bits,
            levels=self.contents.table(network),
            nested=self._kept(),
            per_level=tuple(sorted(self.contents.per_level)),
            checksums=self._checksums,
            dense_metrics=self.contents.dense_metrics,
            dense_errors=self.contents.dense_errors,
            metrics=self.contents.metrics,
            shard=self.shard,
        )

    def _longest_profile(self) -> Profile:
        sizes = {name: self.tensors[name].elements for name in self.counts}
        # A shard does not know how large the others are.
        most = MAX_SAFE_INTEGER if self.shard else sum(sizes.values())
        profile = self._profile(self._totals())
        return replace(
            profile,
            levels=tuple(replace(level, nonzero=most) for level in profile.levels),
            nested={name: (size,) * len(self._numbers) for name, size in sizes.items()},
        )

    def _header(self, profile: Profile) -> bytes:
        def with_checksum(digits: str) -> bytes:
            metadata = {**self.contents.metadata, KEY: profile.to_json(digits)}
            return serialize(self.tensors, metadata, reserve=self._reserved)

        return signed(with_checksum)


class NetworkWriter:
    """Writes a network: one file, or as many as it has shards."""

    def __init__(
        self, destination: Destination, shards: Sequence[ShardWriter], contents: Contents
    ) -> None:
        self.destination, self.shards, self._contents = destination, shards, contents
        self._shard_of = {name: shard for shard in shards for name in shard.tensors}

    def append(self, name: str, data: NDArray[Any]) -> None:
        """Store the next bytes of a tensor; see `ShardWriter.append`."""
        self._shard_of[name].append(name, data)

    def finish(
        self, progress: Progress = no_progress, measured: Sequence[Mapping[str, float]] = ()
    ) -> Profile:
        """Write the headers, let the files appear, and give the profile of the network.

        `measured` has the metrics that `Contents.unmeasured` left room for.
        """
        for shard in self.shards if measured else ():
            shard.contents = shard.contents.measured(measured)
        totals = [shard.close_data() for shard in self.shards]
        network = totals[0]
        for more in totals[1:]:
            network += more
        profiles = [shard.write_header(network) for shard in self.shards]
        tensors = [shard.tensors.values() for shard in self.shards]
        self.destination.finish(tensors, self._contents.extra_metadata, progress)
        return join_profiles(profiles)


@contextlib.contextmanager
def open_writer(
    target: Target,
    groups: Sequence[Sequence[TensorInfo]],
    contents: Contents,
    *,
    force: bool = False,
) -> Iterator[NetworkWriter]:
    """A writer for groups of tensors, one for each shard if the target is an index, else one."""
    contents = contents.checked()
    with open_destination(target, len(groups), force=force) as destination:
        shards = []
        for number, (output, infos) in enumerate(zip(destination.weights, groups, strict=True), 1):
            place = (number, len(groups)) if destination.index else None
            shards.append(ShardWriter(output, infos, contents, place))
        yield NetworkWriter(destination, shards, contents)


def refuse_same_names(names: Sequence[str]) -> None:
    """Refuse two levels of one name: people ask for levels by name."""
    for at, name in enumerate(names):
        if name in names[:at]:
            raise InvalidProfile(f"level {at + 1}: name {name!r} is that of another level")


def write(
    path: Target,
    tensors: Mapping[str, NDArray[Any]],
    *,
    levels: Sequence[LevelSpec],
    nested: str | Iterable[str],
    bits: int | None = None,
    per_level: Mapping[str, Sequence[NDArray[Any]]] | None = None,
    dense_metrics: Mapping[str, float] | None = None,
    metadata: Mapping[str, str] | None = None,
    digests: bool = True,
    dense_errors: Mapping[str, float] | None = None,
    metrics: Mapping[str, MetricInfo] | None = None,
    force: bool = False,
) -> Profile:
    """Write arrays whose nested weights carry their counters already, as a trainer has them.

    >>> from elsa_format import embed_counters
    >>> weights = np.array([[0.5, -2.0], [3.0, 0.1]], np.float32)
    >>> nested = embed_counters(weights, np.array([[0, 2], [1, 0]]), bits=2)
    >>> levels = [LevelSpec("75%"), LevelSpec("50%")]
    >>> profile = write("tiny.safetensors", {"w": nested}, levels=levels, nested=["w"])
    >>> [level.nonzero for level in profile.levels]
    [1, 2]

    Args:
        path: A file, a URL of a store, or a stream.
        tensors: The arrays of the dense network, by name.
        levels: What is told of each level, sparsest first; the rest is counted.
        nested: Names of the tensors whose weights carry counters.
        bits: Low bits of a weight that hold its counter. Default: as few as the levels take.
        per_level: Tensors that each level has its own of: for each name, one array per level.
        dense_metrics: What was measured of the dense network.
        metadata: Strings for the header.
        digests: Compute the digest of each level.
        dense_errors: Standard errors of `dense_metrics`.
        metrics: How the metrics of the levels and of the dense network were measured.
        force: Replace a file that exists.

    Returns:
        What the file says of itself.
    """
    bits = bits_for(len(levels)) if bits is None else check_int("bits", bits, low=1, high=MAX_BITS)
    if not 1 <= len(levels) < 1 << bits:
        raise InvalidProfile(f"{len(levels)} levels do not fit {bits}-bit counters")
    refuse_same_names([level.name for level in levels])
    arrays = {name: np.asarray(array, order="C") for name, array in tensors.items()}
    strings("tensors", arrays)
    nested, per_level = dict.fromkeys(sorted(strings("nested", nested))), per_level or {}
    for name in (*nested, *per_level):
        if name not in arrays:
            raise TensorMismatch(f"tensor {name!r} is not among the tensors to write")
    for name in arrays:
        if name.startswith(RESERVED) or name == "__metadata__":
            raise TensorMismatch(f"tensor {name!r}: the name is reserved")
    for name, variants in per_level.items():
        if name in nested or len(variants) != len(levels):
            raise TensorMismatch(
                f"tensor {name!r}: {len(variants)} variants for {len(levels)} levels"
            )
        for t, variant in enumerate(map(np.asarray, variants), 1):
            if (variant.shape, variant.dtype) != (arrays[name].shape, arrays[name].dtype):
                raise TensorMismatch(
                    f"tensor {name!r}: level {t}'s variant has another shape or dtype"
                )
            arrays[variant_name(name, t)] = np.asarray(variant, order="C")
    infos = [TensorInfo(name, of_array(a.dtype), a.shape) for name, a in arrays.items()]
    for info in infos:
        if info.name in nested:
            check_bits(info.dtype, bits, f"tensor {info.name!r}")
            words = arrays[info.name].reshape(-1).view(info.dtype.words)
            refuse_unpackable(words, None, info.dtype, len(levels), f"tensor {info.name!r}")
    contents = Contents(
        bits,
        levels,
        frozenset(nested),
        frozenset(per_level),
        metadata or {},
        dense_metrics or {},
        digests,
        dense_errors or {},
        metrics or {},
    )
    with open_writer(path, [infos], contents, force=force) as writer:
        for name in writer.shards[0].tensors:
            flat = arrays[name].reshape(-1)
            step = BLOCK // flat.itemsize
            for start in range(0, flat.size, step):
                writer.append(name, flat[start : start + step])
        return writer.finish()
