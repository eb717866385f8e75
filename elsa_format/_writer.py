"""Write an ELSA file in one pass: data first, then the header that describes it (spec §3.5)."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from elsa_format import _kernels, _level_document
from elsa_format._codec import check_bits, refuse_unpackable
from elsa_format._digest import LevelDigests, digest_of_lines
from elsa_format._dtypes import of_array
from elsa_format._errors import CounterOutOfRange, InvalidHeader, InvalidProfile, TensorMismatch
from elsa_format._header import LENGTH_BYTES, TensorInfo, lay_out, serialize
from elsa_format._index import index_bytes
from elsa_format._json import MAX_SAFE_INTEGER
from elsa_format._memory import BLOCK
from elsa_format._options import strings, whole
from elsa_format._output import Output, Target
from elsa_format._profile import (
    KEY,
    MAX_BITS,
    RESERVED,
    ZEROS,
    Level,
    Profile,
    bits_for,
    check_levels,
    join_profiles,
    plain_number,
    plain_numbers,
    variant_name,
)
from elsa_format._shard_output import Destination, open_destination


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


class Writer:
    """Places every tensor in advance, takes their bytes in any order, then writes the header.

    The header has room reserved for its longest form: counts are known only after the data, and
    a shard's level table only after all shards' data.
    """

    def __init__(
        self,
        output: Output,
        tensors: Iterable[TensorInfo],
        *,
        bits: int,
        levels: Sequence[LevelSpec],
        nested: Iterable[str],
        per_level: Iterable[str] = (),
        metadata: Mapping[str, str] | None = None,
        dense_metrics: Mapping[str, float] | None = None,
        digests: bool = True,
        shard: tuple[int, int] | None = None,
    ) -> None:
        self.output, self.bits = output, bits
        self.levels = tuple(
            replace(s, target=plain_number(s.target), metrics=plain_numbers(s.metrics))
            for s in levels
        )
        self.shard = shard
        self.metadata = _checked(metadata or {})
        self.counts = {name: np.zeros(1 << bits, np.int64) for name in nested}
        self.per_level = tuple(sorted(per_level))
        self._varying = frozenset(self.per_level)
        self.dense_metrics = plain_numbers(dense_metrics or {})
        numbers = range(1, len(self.levels) + 1)
        self._variants = {
            variant_name(name, t): (name, t) for name in self.per_level for t in numbers
        }
        self.tensors = lay_out(tensors, first=self._variants)
        self._positions = {name: info.start for name, info in self.tensors.items()}
        # Hashes live only while their tensor is written: each takes half a kilobyte.
        self._hashes: dict[str, xxhash.xxh3_64] = {}
        self._checksums = dict.fromkeys(self.tensors, f"xxh3:{ZEROS}")
        self._digests = LevelDigests(bits, range(1, len(self.levels) + 1)) if digests else None
        self._reserved = 0
        longest = self._longest_profile()
        check_levels(longest.levels, self.dense_metrics)
        self._reserved = len(self._header(longest))

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
            self.counts[name] += _kernels.count(words, self.bits)
            if self._digests:
                self._digests.update_nested(name, words)
        elif self._digests:
            self._digests.update_plain(name, block)

    def _end_tensor(self, name: str, info: TensorInfo) -> None:
        self._checksums[name] = f"xxh3:{self._hashes.pop(name).hexdigest()}"
        if self._digests is None:
            return
        if name in self.counts:
            self._digests.end_nested(info)
        elif name in self._variants:
            plain, level = self._variants[name]
            self._digests.end_plain(info, plain, [level])
        elif name not in self._varying:
            self._digests.end_plain(info, name, range(1, len(self.levels) + 1))

    def close_data(self) -> Totals:
        """Check that all bytes are there, and add up what they hold."""
        for name, info in self.tensors.items():
            if not info.nbytes:
                self.append(name, np.empty(0, np.uint8))
            if self._positions[name] != info.stop:
                raise ValueError(f"tensor {name!r} is incomplete")
        for name, counts in self.counts.items():
            if counts[len(self.levels) + 1 :].any():
                top = int(counts.nonzero()[0][-1])
                raise CounterOutOfRange(
                    f"tensor {name!r}: counter {top}, expected 0..{len(self.levels)}"
                )
        return self._totals()

    def finish(self) -> Profile:
        """Write the header of a file that is no shard, and give the file its name."""
        profile = self.write_header(self.close_data())
        self.output.commit()
        return profile

    def write_header(self, network: Totals) -> Profile:
        """Write the header; the level table is that of the whole network."""
        profile = self._profile(network)
        self.output.write_at(0, self._header(profile))
        return profile

    def _totals(self) -> Totals:
        kept = self._kept().values()
        lines = tuple(self._digests.lines) if self._digests else None
        return Totals(tuple(sum(c[t] for c in kept) for t in range(len(self.levels))), lines)

    def _kept(self) -> dict[str, tuple[int, ...]]:
        top = len(self.levels) + 1
        return {
            name: tuple(int(n) for n in counts[1:top].cumsum())
            for name, counts in self.counts.items()
        }

    def _profile(self, network: Totals) -> Profile:
        return Profile(
            bits=self.bits,
            levels=tuple(
                Level(
                    name=level.name,
                    nonzero=network.nonzero[t],
                    target=level.target,
                    pattern=level.pattern,
                    digest=network.digests[t],
                    metrics=level.metrics,
                )
                for t, level in enumerate(self.levels)
            ),
            nested=self._kept(),
            per_level=self.per_level,
            checksums=self._checksums,
            dense_metrics=self.dense_metrics,
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
            nested={name: (size,) * len(self.levels) for name, size in sizes.items()},
        )

    def _header(self, profile: Profile) -> bytes:
        def with_checksum(digits: str) -> bytes:
            metadata = self.metadata | {KEY: profile.to_json(digits)}
            return serialize(self.tensors, metadata, reserve=self._reserved)

        return with_checksum(xxhash.xxh3_64_hexdigest(with_checksum(ZEROS)[LENGTH_BYTES:]))


def _checked(metadata: Mapping[str, str]) -> dict[str, str]:
    for key, value in metadata.items():
        if key in (KEY, _level_document.KEY):
            raise InvalidHeader(f"metadata {key!r}: the name is reserved")
        if not isinstance(key, str) or not isinstance(value, str):
            raise InvalidHeader(f"metadata {key!r}: {value!r}, expected strings")
    return dict(metadata)


class Writers:
    """The writers of a network: one for a file, or one for each shard."""

    def __init__(self, destination: Destination, parts: Sequence[Writer]) -> None:
        self.destination, self.parts = destination, parts
        self._part_of = {name: part for part in parts for name in part.tensors}

    def append(self, name: str, data: NDArray[Any]) -> None:
        """Store the next bytes of a tensor; see `Writer.append`."""
        self._part_of[name].append(name, data)

    def finish(self) -> Profile:
        """Write the headers, let the files appear, and give the profile of the network."""
        totals = [part.close_data() for part in self.parts]
        network = totals[0]
        for more in totals[1:]:
            network += more
        profiles = [part.write_header(network) for part in self.parts]
        tensors = [part.tensors.values() for part in self.parts]
        if self.destination.sharded:
            self.destination.commit(index_bytes(self.destination.names, tensors))
        else:
            self.destination.commit()
        return join_profiles(profiles)


@contextlib.contextmanager
def open_writers(
    target: Target,
    groups: Sequence[Sequence[TensorInfo]],
    *,
    nested: Iterable[str],
    per_level: Iterable[str] = (),
    force: bool = False,
    **options: Any,
) -> Iterator[Writers]:
    """A writer for each group of tensors if the target is an index, else for the only one."""
    nested, per_level = set(nested), set(per_level)
    with open_destination(target, len(groups), force=force) as destination:
        parts = []
        for number, (output, infos) in enumerate(zip(destination.outputs, groups, strict=True), 1):
            names = {info.name for info in infos}
            parts.append(
                Writer(
                    output,
                    infos,
                    nested=sorted(nested & names),
                    per_level=per_level & names,
                    shard=(number, len(groups)) if destination.sharded else None,
                    **options,
                )
            )
        yield Writers(destination, parts)


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
    force: bool = False,
) -> Profile:
    """Write arrays whose nested weights carry their counters already, as a trainer has them.

    `per_level` gives, for each such tensor, one array per level; `tensors` holds its dense variant.

    >>> from elsa_format import embed_counters
    >>> weights = np.array([[0.5, -2.0], [3.0, 0.1]], np.float32)
    >>> nested = embed_counters(weights, np.array([[0, 2], [1, 0]]), bits=2)
    >>> levels = [LevelSpec("75%"), LevelSpec("50%")]
    >>> profile = write("tiny.safetensors", {"w": nested}, levels=levels, nested=["w"])
    >>> [level.nonzero for level in profile.levels]
    [1, 2]
    """
    bits = bits_for(len(levels)) if bits is None else whole("bits", bits, low=1, high=MAX_BITS)
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
    with open_writers(
        path,
        [infos],
        bits=bits,
        levels=levels,
        nested=nested,
        per_level=per_level,
        metadata=metadata,
        dense_metrics=dense_metrics,
        digests=digests,
        force=force,
    ) as writers:
        for name in writers.parts[0].tensors:
            flat = arrays[name].reshape(-1)
            step = BLOCK // flat.itemsize
            for start in range(0, flat.size, step):
                writers.append(name, flat[start : start + step])
        return writers.finish()
