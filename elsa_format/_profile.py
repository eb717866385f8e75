"""The ELSA profile: what a file says about its levels (spec §5)."""

import contextlib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, islice
from typing import Any, Literal, SupportsIndex

import xxhash

from elsa_format._container import LENGTH_BYTES, RESERVED, Header, TensorInfo
from elsa_format._container.json import MAX_SAFE_INTEGER, check_version, dump, parse_document
from elsa_format._counters import MAX_BITS, NOT_ZERO
from elsa_format._errors import (
    ChecksumMismatch,
    CountMismatch,
    InvalidProfile,
    NoSuchLevel,
    NotElsa,
    ProfileMismatch,
)
from elsa_format._options import as_int

VERSION = "1.0"
KEY = "elsa"
ZEROS = "0" * 16

LevelLike = SupportsIndex | str
"""A level is 1..T, its name, or "dense" for the whole network."""
LevelNumber = int | Literal["dense"]
"""A level as it is given back."""
MOST_NAMES = 10
"""Levels that a message lists."""

_CHECKSUM = re.compile(r"xxh3:[0-9a-f]{16}")
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_NUMBER = re.compile(r"[0-9]{1,9}")
_PATTERN = re.compile(r"[1-9][0-9]*:[1-9][0-9]*")


def variant_name(name: str, level: int) -> str:
    """The stored name of a per-level tensor's variant."""
    return f"{RESERVED}{level}.{name}"


Better = Literal["higher", "lower"]
"""Which values of a metric are better."""
BETTER: tuple[Better, Better] = ("higher", "lower")


@dataclass(frozen=True)
class MetricInfo:
    """How a metric was measured (spec §5.4).

    >>> MetricInfo("higher", samples=10000).to_json()
    {'better': 'higher', 'samples': 10000}
    """

    better: Better
    samples: int | None = None
    recorded: str | None = None
    """The program that measured it."""

    def to_json(self) -> dict[str, Any]:
        """The metric's object in the profile."""
        entry = {"better": self.better, "recorded": self.recorded, "samples": self.samples}
        return {key: value for key, value in entry.items() if value is not None}


@dataclass(frozen=True)
class Level:
    """One nested network as the profile describes it.

    >>> Level("90%", nonzero=1000, target=0.9, metrics={"accuracy": 0.98}).to_json()
    {'metrics': {'accuracy': 0.98}, 'name': '90%', 'nonzero': 1000, 'target': 0.9}
    """

    name: str
    nonzero: int | None
    """Kept weights in nested tensors, over the whole network; None where no header tells, which is
    so in a level file in the dense layout."""
    target: float | None = None
    """The fraction of zeros that was asked for."""
    pattern: str | None = None
    """The N:M pattern that was asked for."""
    digest: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    errors: Mapping[str, float] = field(default_factory=dict)
    """Standard errors of metrics."""
    number: int = field(default=0, compare=False)
    """1 for the sparsest of the network; a level file holds one that may have any number."""

    def to_json(self) -> dict[str, Any]:
        """The level's object in the profile."""
        entry: dict[str, Any] = {"name": self.name, "nonzero": self.nonzero}
        for key in ("target", "pattern", "digest"):
            if getattr(self, key) is not None:
                entry[key] = getattr(self, key)
        entry |= measured(self.metrics, self.errors)
        return dict(sorted(entry.items()))


@dataclass(frozen=True)
class Profile:
    """A checked profile; past `parse` nothing of it is checked again.

    >>> levels = (Level("90%", nonzero=1), Level("80%", nonzero=2))
    >>> profile = Profile(bits=2, levels=levels, nested={"w": (1, 2)}, per_level=("norm/mean",))
    >>> profile.level_number(2), profile.level_number("80%"), profile.level_number("dense")
    (2, 2, 'dense')
    >>> profile.stored_name("norm/mean", 2)
    '__elsa__.2.norm/mean'
    """

    bits: int
    levels: tuple[Level, ...]
    nested: Mapping[str, tuple[int, ...]]
    per_level: tuple[str, ...] = ()
    checksums: Mapping[str, str] = field(default_factory=dict)
    dense_metrics: Mapping[str, float] = field(default_factory=dict)
    dense_errors: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, MetricInfo] = field(default_factory=dict)
    shard: tuple[int, int] | None = None
    """(number, of): this file's place among the shards of one network."""
    version: str = VERSION

    def __post_init__(self) -> None:
        numbered = (
            level if level.number else replace(level, number=t)
            for t, level in enumerate(self.levels, 1)
        )
        object.__setattr__(self, "levels", tuple(numbered))

    def to_json(self, header_checksum: str = ZEROS) -> str:
        """The canonical text of the profile."""
        document: dict[str, Any] = {
            "version": self.version,
            "bits": self.bits,
            "levels": [level.to_json() for level in self.levels],
            "nested": dict(sorted(self.nested.items())),
            "header": f"xxh3:{header_checksum}",
        }
        if self.per_level:
            document["per_level"] = sorted(self.per_level)
        if self.checksums:
            document["checksums"] = dict(sorted(self.checksums.items()))
        if dense := measured(self.dense_metrics, self.dense_errors):
            document["dense"] = dense
        if self.metrics:
            document["metrics"] = {k: m.to_json() for k, m in sorted(self.metrics.items())}
        if self.shard:
            document["shard"] = {"number": self.shard[0], "of": self.shard[1]}
        return dump(dict(sorted(document.items())))

    @property
    def single(self) -> bool:
        """Whether it is that of a level file: one level, whose counters nobody reads."""
        return self.bits == NOT_ZERO

    def level_number(self, level: LevelLike, where: str = "") -> LevelNumber:
        """The level's number, or "dense"."""
        if not self.single:
            return find_level(level, [entry.name for entry in self.levels], where)
        held = self.levels[0]
        with contextlib.suppress(NoSuchLevel):
            if find_level(level, [""] * (held.number - 1) + [held.name]) == held.number:
                return held.number
        raise NoSuchLevel(
            f"{where}: no level {level!r}, it holds level {held.number} ({held.name})"
        )

    def level(self, number: int) -> Level:
        """What is known of a level."""
        return self.levels[number - self.levels[0].number]

    def kept(self, name: str, number: int) -> int:
        """How many weights of a nested tensor a level keeps."""
        return self.nested[name][number - self.levels[0].number]

    def stored_name(self, name: str, level: LevelNumber) -> str:
        """The tensor that holds `name` at a level."""
        return name if level == "dense" or name not in self.varying else variant_name(name, level)

    def check_counts(
        self, name: str, counts: Iterable[int], where: str, levels: int | None = None
    ) -> None:
        """Raise CountMismatch unless levels, the first or all, keep what so many counters say."""
        levels = len(self.levels) if levels is None else levels
        kept, expected = tuple(accumulate(islice(counts, 1, levels + 1))), self.nested[name]
        if kept != expected[:levels]:
            raise CountMismatch(
                f"{where}: tensor {name!r}: levels keep {list(kept)}, "
                f"expected {list(expected[:levels])}"
            )

    @cached_property
    def variants(self) -> Mapping[str, tuple[str, int]]:
        """What is stored once for each level: the tensor and the level, by the stored names."""
        numbers = range(1, len(self.levels) + 1)
        return {variant_name(name, t): (name, t) for name in self.per_level for t in numbers}

    @cached_property
    def varying(self) -> frozenset[str]:
        """The per-level tensors, to look names up in."""
        return frozenset(self.per_level)


def join_profiles(parts: Sequence[Profile]) -> Profile:
    """The profile of a network from those of its shards, whose level tables are the same."""
    return replace(
        parts[0],
        nested={name: counts for part in parts for name, counts in part.nested.items()},
        per_level=tuple(sorted(name for part in parts for name in part.per_level)),
        checksums={name: xxh for part in parts for name, xxh in part.checksums.items()},
        shard=None,
    )


def find_level(level: LevelLike, names: Sequence[str], where: str = "") -> LevelNumber:
    """The number of a level, or "dense"; what is a number is not taken as a name.

    >>> find_level("1:4", ["1:8", "1:4"]), find_level("1", ["2", "1"])
    (2, 1)
    """
    number, found = 0, []
    if isinstance(level, str):
        if level == "dense":
            return "dense"
        number = int(level) if _NUMBER.fullmatch(level) else 0
        found = [t for t, name in enumerate(names, 1) if name == level]
    else:
        number = as_int(level) or 0
    if 1 <= number <= len(names):
        return number
    if len(found) == 1:
        return found[0]
    known = ", ".join(names[:MOST_NAMES]) + (", …" if len(names) > MOST_NAMES else "")
    problem = f"levels {found} are called {level!r}" if found else f"no level {level!r}"
    prefix = f"{where}: " if where else ""
    raise NoSuchLevel(f"{prefix}{problem}, expected 1..{len(names)}, 'dense' or a name: {known}")


def measured(metrics: Mapping[str, float], errors: Mapping[str, float]) -> dict[str, Any]:
    """Metrics as they are written: as doubles, whatever kind of number was given."""
    found = {"errors": errors, "metrics": metrics}
    return {
        key: {name: float(value) for name, value in sorted(numbers.items())}
        for key, numbers in found.items()
        if numbers
    }


def parse(header: Header, where: str) -> Profile:
    """The profile in a header, checked against the schema and the tensors."""
    text = header.metadata.get(KEY)
    if text is None:
        raise NotElsa(
            f"{where}: has no ELSA profile", "{pack()} makes an ELSA file of a checkpoint"
        )
    document = parse_document(text, f"{where}: profile")
    check_version(document, f"{where}: profile", InvalidProfile)
    _check_header(header, document, where)
    profile = _Parser(f"{where}: profile").profile(document)
    _check_tensors(profile, header.tensors, where)
    return profile


def _check_header(header: Header, document: Mapping[str, Any], where: str) -> None:
    if "header" not in document:
        return
    stated = document["header"]
    if not isinstance(stated, str) or not _CHECKSUM.fullmatch(stated):
        raise InvalidProfile(
            f"{where}: profile header {stated!r}, expected xxh3: and 16 hex digits"
        )
    found = header_checksum(header.raw, stated)
    if found != stated:
        raise ChecksumMismatch(f"{where}: header has checksum {found}, expected {stated}")


def header_checksum(raw: bytes, stated: str) -> str:
    """The checksum of a header, the digits of the one it states taken as zeros (spec §8.2)."""
    digits = stated.removeprefix("xxh3:").encode()
    return f"xxh3:{xxhash.xxh3_64_hexdigest(raw.replace(digits, ZEROS.encode()))}"


def signed(header: Callable[[str], bytes]) -> bytes:
    """A header that states its own checksum, made of its digits, for which zeros stand at first."""
    return header(xxhash.xxh3_64_hexdigest(header(ZEROS)[LENGTH_BYTES:]))


def _check_tensors(profile: Profile, tensors: Mapping[str, TensorInfo], where: str) -> None:
    for name in (*profile.nested, *profile.per_level, *profile.checksums):
        if name not in tensors:
            raise ProfileMismatch(
                f"{where}: profile names tensor {name!r}, which is not in the file"
            )
    for name, counts in profile.nested.items():
        info = tensors[name]
        if not info.dtype.nestable or profile.bits > info.dtype.mantissa:
            raise ProfileMismatch(
                f"{where}: tensor {name!r}: {info.dtype.name} cannot carry "
                f"{profile.bits}-bit counters"
            )
        if counts[-1] > info.elements:
            raise ProfileMismatch(
                f"{where}: tensor {name!r}: keeps {counts[-1]} of {info.elements} weights"
            )
    _check_variants(profile, tensors, where)
    for t, level in enumerate(profile.levels):
        kept, stated = sum(counts[t] for counts in profile.nested.values()), level.nonzero
        if kept != stated and (stated is None or kept > stated or profile.shard is None):
            raise CountMismatch(
                f"{where}: level {t + 1}: nonzero {stated}, but its tensors keep {kept}"
            )


def _check_variants(profile: Profile, tensors: Mapping[str, TensorInfo], where: str) -> None:
    """Every level has its variant, and variants come first, so that a device has them at hand."""
    variants = set()
    for name in profile.per_level:
        plain = tensors[name]
        # Stops at the first that is missing: T times as many names could fill the memory.
        for level in range(1, len(profile.levels) + 1):
            variant = variant_name(name, level)
            other = tensors.get(variant)
            if other is None or (other.dtype, other.shape) != (plain.dtype, plain.shape):
                found = "missing" if other is None else f"{other.dtype.name}{list(other.shape)}"
                raise ProfileMismatch(
                    f"{where}: tensor {variant!r} is {found}, expected as {name!r}"
                )
            variants.add(variant)
    plain_seen = False
    for name, info in tensors.items():
        if name.startswith(RESERVED) and name not in variants:
            raise ProfileMismatch(f"{where}: tensor {name!r}: a reserved name without a meaning")
        if name in variants and plain_seen and info.nbytes:
            raise ProfileMismatch(f"{where}: tensor {name!r} is stored after tensors of all levels")
        plain_seen |= name not in variants and info.nbytes > 0


class _Parser:
    """Checks a profile document against its schema, field by field."""

    def __init__(self, where: str) -> None:
        self.where = where

    def fail(self, field_name: str, value: Any, expected: str) -> InvalidProfile:
        return InvalidProfile(f"{self.where} {field_name}: {_brief(value)}, expected {expected}")

    def profile(self, document: Mapping[str, Any]) -> Profile:
        for key in ("bits", "levels", "nested"):
            if key not in document:
                raise InvalidProfile(f"{self.where}: {key} is missing")
        bits = self.integer("bits", document["bits"], 1, MAX_BITS)
        entries = document["levels"]
        if not isinstance(entries, list) or not 1 <= len(entries) < 2**bits:
            raise self.fail("levels", entries, f"a list of 1..{2**bits - 1} levels")
        levels = tuple(self.level(t, entry) for t, entry in enumerate(entries, 1))
        nested = self.nested(document["nested"], len(levels))
        per_level = self.names(document.get("per_level", []))
        for name in per_level:
            if name in nested:
                raise InvalidProfile(f"{self.where}: tensor {name!r} is both nested and per-level")
        for name in (*nested, *per_level):
            if name.startswith(RESERVED):
                raise InvalidProfile(f"{self.where}: tensor {name!r}: the name is reserved")
        checksums = self.checksums(document.get("checksums", {}))
        dense_metrics, dense_errors = self.dense(document.get("dense", {}))
        return Profile(
            bits=bits,
            levels=levels,
            nested=nested,
            per_level=per_level,
            checksums=checksums,
            dense_metrics=dense_metrics,
            dense_errors=dense_errors,
            metrics=self.infos(document.get("metrics", {})),
            shard=self.shard(document["shard"]) if "shard" in document else None,
            version=document["version"],
        )

    def level(self, number: int, entry: Any) -> Level:
        label = f"level {number}"
        if not isinstance(entry, dict) or not {"name", "nonzero"} <= entry.keys():
            raise self.fail(label, entry, "an object with name and nonzero")
        name: Any = entry["name"]
        target: Any = entry.get("target")
        pattern: Any = entry.get("pattern")
        digest: Any = entry.get("digest")
        if not isinstance(name, str) or not name:
            raise self.fail(f"{label} name", name, "a non-empty string")
        if "target" in entry and (not _is_number(target) or not 0 <= target <= 1):
            raise self.fail(f"{label} target", target, "a number in 0..1")
        if "pattern" in entry and not _is_pattern(pattern):
            raise self.fail(f"{label} pattern", pattern, "N:M with 1 <= N <= M")
        if "digest" in entry and not _matches(DIGEST, digest):
            raise self.fail(f"{label} digest", digest, "sha256: and 64 hex digits")
        nonzero = self.integer(f"{label} nonzero", entry["nonzero"], 0)
        metrics, errors = self.metrics(label, entry)
        return Level(
            name=name,
            nonzero=nonzero,
            target=None if target is None else float(target),
            pattern=pattern,
            digest=digest,
            metrics=metrics,
            errors=errors,
        )

    def nested(self, value: Any, levels: int) -> dict[str, tuple[int, ...]]:
        if not isinstance(value, dict):
            raise self.fail("nested", value, "an object")
        for name, counts in value.items():
            if (
                not isinstance(counts, list)
                or len(counts) != levels
                or not all(type(n) is int and n >= 0 for n in counts)
                or sorted(counts) != counts
            ):
                raise self.fail(f"nested {name!r}", counts, f"{levels} non-decreasing counts")
        return {name: tuple(counts) for name, counts in value.items()}

    def names(self, value: Any) -> tuple[str, ...]:
        if (
            not isinstance(value, list)
            or not all(isinstance(name, str) for name in value)
            or sorted(set(value)) != value
        ):
            raise self.fail("per_level", value, "sorted, distinct tensor names")
        return tuple(value)

    def checksums(self, value: Any) -> dict[str, str]:
        if not isinstance(value, dict):
            raise self.fail("checksums", value, "an object")
        for name, checksum in value.items():
            if not _matches(_CHECKSUM, checksum):
                raise self.fail(f"checksum of {name!r}", checksum, "xxh3: and 16 hex digits")
        return value

    def dense(self, value: Any) -> tuple[dict[str, float], dict[str, float]]:
        if not isinstance(value, dict):
            raise self.fail("dense", value, "an object")
        return self.metrics("dense", value)

    def shard(self, value: Any) -> tuple[int, int]:
        if not isinstance(value, dict):
            raise self.fail("shard", value, "an object")
        of = self.integer("shard of", value.get("of"), 1)
        return self.integer("shard number", value.get("number"), 1, of), of

    def metrics(
        self, label: str, entry: Mapping[str, Any]
    ) -> tuple[dict[str, float], dict[str, float]]:
        """The metrics of a level, or of the dense network, and their standard errors."""
        metrics, errors = entry.get("metrics", {}), entry.get("errors", {})
        for key, value in (("metrics", metrics), ("errors", errors)):
            if not isinstance(value, dict) or not all(
                isinstance(name, str) and _is_number(n) for name, n in value.items()
            ):
                raise self.fail(f"{label} {key}", value, "an object of numbers")
        for name, error in errors.items():
            if name not in metrics or error < 0:
                expected = "a number from 0" if name in metrics else "a metric of this name"
                raise self.fail(f"{label} error of {name!r}", error, expected)
        return metrics, errors

    def infos(self, value: Any) -> dict[str, MetricInfo]:
        """How metrics were measured."""
        if not isinstance(value, dict) or not all(
            isinstance(name, str) and isinstance(entry, dict) for name, entry in value.items()
        ):
            raise self.fail("metrics", value, "an object of objects")
        return {name: self.info(f"metric {name!r}", entry) for name, entry in value.items()}

    def info(self, label: str, entry: Mapping[str, Any]) -> MetricInfo:
        better: Any = entry.get("better")
        recorded: Any = entry.get("recorded")
        if better not in BETTER:
            raise self.fail(f"{label} better", better, "'higher' or 'lower'")
        if "recorded" in entry and not isinstance(recorded, str):
            raise self.fail(f"{label} recorded", recorded, "a string")
        samples = None
        if "samples" in entry:
            samples = self.integer(f"{label} samples", entry["samples"], 0, MAX_SAFE_INTEGER)
        return MetricInfo(better, samples, recorded)

    def integer(self, label: str, value: Any, low: int, high: int | None = None) -> int:
        if type(value) is not int or value < low or (high is not None and value > high):
            bound = f"{low}.." if high is None else f"{low}..{high}"
            raise self.fail(label, value, f"an integer in {bound}")
        return value


def _is_number(value: Any) -> bool:
    if type(value) is int:
        return abs(value) <= MAX_SAFE_INTEGER
    return type(value) is float and math.isfinite(value)


def plain_number(value: Any) -> Any:
    """A number of numpy, JAX and the like as Python's."""
    return value.item() if getattr(value, "shape", None) == () else value


def plain_numbers(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics as Python's numbers."""
    return {name: plain_number(value) for name, value in dict(metrics).items()}


def check_level_table(
    levels: Sequence[Level],
    dense_metrics: Mapping[str, float],
    dense_errors: Mapping[str, float],
    metrics: Mapping[str, MetricInfo],
) -> None:
    """Refuse, before anything is written, what no reader would accept of a level table."""
    parser = _Parser("profile")
    for number, level in enumerate(levels, 1):
        parser.metrics(
            f"level {number}", {"metrics": dict(level.metrics), "errors": dict(level.errors)}
        )
        parser.level(number, level.to_json())
    parser.metrics("dense", {"metrics": dict(dense_metrics), "errors": dict(dense_errors)})
    parser.infos({name: metric.to_json() for name, metric in metrics.items()})


def _matches(pattern: re.Pattern[str], value: Any) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None


def _is_pattern(value: Any) -> bool:
    """Whether a value is N:M; there may be more digits than int() takes."""
    if not _matches(_PATTERN, value):
        return False
    n, m = value.split(":")
    return (len(n), n) <= (len(m), m)


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
