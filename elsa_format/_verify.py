"""Check everything the specification asks of a file (spec §2.2)."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elsa_format import _kernels
from elsa_format._container.header import TensorInfo
from elsa_format._counters import refuse_unpackable
from elsa_format._delivery.check import check_delivery, compare_digests
from elsa_format._delivery.network import DeliveryNetwork, DeliveryShards
from elsa_format._digest import LevelDigests, digest_of_lines
from elsa_format._errors import (
    CounterOutOfRange,
    CountMismatch,
    DigestMismatch,
    FormatError,
    NonFinite,
)
from elsa_format._kept import NOT_ZERO
from elsa_format._level_network import LevelNetwork
from elsa_format._level_reader import LevelReader
from elsa_format._network import Network
from elsa_format._open import open_network
from elsa_format._options import whole
from elsa_format._profile import LevelNumber, variant_name
from elsa_format._storage import Source
from elsa_format._threads import Meter, Progress, no_progress


@dataclass(frozen=True)
class Report:
    """What was found to hold.

    >>> verify("net.safetensors")
    Report(path='net.safetensors', levels=3, tensors=2, nested=1, checksums=2, digests=3)
    """

    path: str
    levels: int
    tensors: int
    nested: int
    checksums: int
    """Tensors whose checksum was compared; the others have none."""
    digests: int
    """Levels whose digest was compared; the others have none."""


@dataclass(frozen=True)
class DeliveryReport(Report):
    """What was found to hold of a delivery file, or of its first bytes."""

    there: LevelNumber | None
    """The densest level that is there."""


def verify(
    source: Source,
    *,
    jobs: int = 1,
    max_bytes: int | None = None,
    progress: Progress = no_progress,
) -> Report:
    """Read a whole file or all shards of an index, and raise for the first thing that is wrong.

    The source is a path, a URL or a stream of an ELSA file or a level file; `jobs` shards are read
    at a time. A network of more than `max_bytes` is refused from the header alone.

    >>> verify("net.safetensors").digests
    3
    """
    jobs = whole("jobs", jobs, low=1)
    with open_network(source, along=True, max_bytes=max_bytes) as network:
        if isinstance(network, DeliveryNetwork | DeliveryShards):
            return _verify_delivery(network, progress)
        meter, check = Meter(progress, network.header.data_size), NetworkCheck(network)
        meter.run(lambda part: check.file(part, meter.tick), network.parts, jobs)
        compared, profile = check.finish(), network.profile
    return Report(
        path=network.name,
        levels=len(profile.levels),
        tensors=len(network.header.tensors),
        nested=len(profile.nested),
        checksums=len(profile.checksums),
        digests=compared,
    )


def digest_lines(source: Source) -> list[dict[str, str]]:
    """Check a file, or a lone shard, and give what its tensors add to each level's digest.

    >>> [list(lines) for lines in digest_lines("net.safetensors")]
    [['layer', 'bias'], ['layer', 'bias'], ['layer', 'bias']]
    """
    with open_network(source) as network:
        meter, check = Meter(no_progress, network.header.data_size), NetworkCheck(network)
        for part in network.parts:
            check.file(part, meter.tick)
        return check.lines()


def _verify_delivery(network: DeliveryNetwork | DeliveryShards, progress: Progress) -> Report:
    """Check all parts that are there; of shards, as far as all of them have them."""
    files = [network] if isinstance(network, DeliveryNetwork) else network.deliveries
    levels, parts = network.profile.levels, network.complete
    meter = Meter(progress, network.header.data_size)
    digests = LevelDigests(network.profile.bits, range(1, min(parts, len(levels)) + 1))
    for file in files:
        check_delivery(file.delivery, parts, digests, meter.tick)
    whole = network.profile.shard is None
    compared = compare_digests(network.name, levels, digests) if whole else 0
    return DeliveryReport(
        path=network.name,
        levels=len(levels),
        tensors=len(network.header.tensors),
        nested=len(network.profile.nested),
        checksums=len(network.profile.checksums) if parts > len(levels) else 0,
        digests=compared,
        there=network.there,
    )


def _comes_late(problem: FormatError) -> bool:
    """Spec §11.2: a wrong weight comes before a wrong count."""
    return isinstance(problem, CountMismatch)


class NetworkCheck:
    """Checks the files of a network, and then what they are together."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._digests = LevelDigests(network.profile.bits, network.limits)
        self._problems: list[FormatError] = []

    def file(
        self,
        part: Network,
        tick: Callable[[int], object],
        look: Callable[[TensorInfo, NDArray[np.uint8]], object] | None = None,
    ) -> None:
        """Read a file, one of `network.parts`; its tensors can be looked at block by block."""
        checker = _Checker(part, self._digests)
        with LevelReader(part, tick=tick) as reader:
            for info in part.header.tensors.values():
                blocks = reader.blocks(info)
                checker.check(info, blocks if look is None else _seen(info, blocks, look))
            reader.finish()
        if checker.problem is not None:
            self._problems.append(checker.problem)

    def lines(self) -> list[dict[str, str]]:
        """Raise what is wrong with tensors, or give what they add to each level's digest."""
        for problem in sorted(self._problems, key=_comes_late):
            raise problem
        return self._digests.lines

    def finish(self) -> int:
        """Raise what is wrong, or return how many digests there were to compare."""
        lines_of = self.lines()
        network, levels = self._network, self._network.profile.levels
        stated = [
            (level.name, level.digest, found) for level, found in zip(levels, lines_of, strict=True)
        ]
        if network.profile.shard is not None:
            stated = []  # of the whole network, of which this is a part
        if isinstance(network, LevelNetwork):
            for names, digest in network.digests:
                part = {name: lines_of[0][name] for name in names}
                stated.append((levels[0].name, digest, part))
        compared = 0
        for name, expected, lines in stated:
            found = digest_of_lines(lines)
            if expected not in (None, found):
                raise DigestMismatch(
                    f"{network.name}: level {name!r}: digest {found}, expected {expected}"
                )
            compared += expected is not None
        return compared


def _seen(
    info: TensorInfo,
    blocks: Iterator[NDArray[np.uint8]],
    look: Callable[[TensorInfo, NDArray[np.uint8]], object],
) -> Iterator[NDArray[np.uint8]]:
    for block in blocks:
        look(info, block)
        yield block


class _Checker:
    """Checks tensors one after the other."""

    def __init__(self, network: Network, digests: LevelDigests) -> None:
        profile = network.profile
        self.profile, self.digests, self.where = profile, digests, network.name
        self.checked = profile.bits != NOT_ZERO  # a level file's counters are its own
        numbers = range(1, len(profile.levels) + 1)
        self.all_levels = list(numbers)
        self.variants = {variant_name(n, t): (n, t) for n in profile.per_level for t in numbers}
        self.problem: FormatError | None = None

    def check(self, info: TensorInfo, blocks: Iterator[NDArray[np.uint8]]) -> None:
        if info.name in self.profile.nested:
            try:
                self._check_nested(info, blocks)
            except (CounterOutOfRange, NonFinite, CountMismatch) as error:
                # Spec §11.2: a wrong checksum in what follows comes first.
                if self.problem is None or _comes_late(error) < _comes_late(self.problem):
                    self.problem = error
                for _ in blocks:
                    pass
            return
        for block in blocks:
            self.digests.update_plain(info.name, block)
        if info.name in self.variants:
            plain, level = self.variants[info.name]
            self.digests.end_plain(info, plain, [level])
        elif info.name not in self.profile.varying:
            self.digests.end_plain(info, info.name, self.all_levels)

    def _check_nested(self, info: TensorInfo, blocks: Iterator[NDArray[np.uint8]]) -> None:
        counts = np.zeros(1 << self.profile.bits, np.int64)
        position = 0
        for block in blocks:
            words = block.view(info.dtype.words)
            if self.checked:
                self._check_words(info, words, counts, position)
            self.digests.update_nested(info.name, words)
            position += words.size
        if self.checked:
            self.profile.check_counts(info.name, counts.tolist(), self.where)
        self.digests.end_nested(info)

    def _check_words(
        self, info: TensorInfo, words: NDArray[Any], counts: NDArray[np.int64], position: int
    ) -> None:
        where, levels = f"{self.where}: tensor {info.name!r}", len(self.profile.levels)
        found = _kernels.count(words, self.profile.bits)
        counts += found
        if found[levels + 1 :].any():
            low = words & words.dtype.type((1 << self.profile.bits) - 1)
            at = int((low > levels).argmax())
            raise CounterOutOfRange(
                f"{where}: weight {position + at} has counter {low[at]}, expected 0..{levels}"
            )
        refuse_unpackable(words, None, info.dtype, levels, where, first=position)
