"""Check everything the specification asks of a file (spec §2.2)."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elsa_format import _kernels
from elsa_format._container import LENGTH_BYTES, TensorInfo
from elsa_format._counters import refuse_unpackable
from elsa_format._digest import LevelDigests, compare_digest
from elsa_format._errors import (
    ChecksumMismatch,
    CounterOutOfRange,
    CountMismatch,
    FormatError,
    InvalidOption,
    NonFinite,
    OutdatedDelivery,
)
from elsa_format._level_reader import LevelReader, Proof
from elsa_format._network import Network, open_network
from elsa_format._options import check_int, renamed
from elsa_format._profile import LevelNumber
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

    available: LevelNumber | None
    """The densest level that is downloaded."""

    @property
    def there(self) -> LevelNumber | None:
        """What `available` was called in earlier releases."""
        renamed("DeliveryReport.there", "available")
        return self.available


def verify(
    source: Source,
    *,
    original: Source | None = None,
    jobs: int = 1,
    max_bytes: int | None = None,
    progress: Progress = no_progress,
) -> Report:
    """Read a whole file or all shards of an index, and raise for the first thing that is wrong.

    The source is a path, a URL or a stream of an ELSA file or a level file; `jobs` shards are read
    at a time. A network of more than `max_bytes` is refused from the header alone. A delivery file
    that was not made of the `original` as it is now, with its metrics, is an `OutdatedDelivery`.

    >>> verify("net.safetensors").digests
    3
    """
    jobs = check_int("jobs", jobs, low=1)
    with open_network(source, sequential=True, max_bytes=max_bytes) as network:
        if original is not None:
            _compare_original(network, original, max_bytes)
        meter, check = Meter(progress, network.header.data_size), NetworkCheck(network)
        meter.run(lambda file: check.file(file, meter.tick), network.files, jobs)
        compared, profile, available = check.finish(), network.profile, network.available
    complete = not network.downloads or available[-1:] == ["dense"]
    report = Report(
        path=network.name,
        levels=len(profile.levels),
        tensors=len(network.header.tensors),
        nested=len(profile.nested),
        checksums=len(profile.checksums) if complete else 0,
        digests=compared,
    )
    if not network.downloads:
        return report
    return DeliveryReport(**vars(report), available=available[-1] if available else None)


def _compare_original(network: Network, original: Source, max_bytes: int | None) -> None:
    """Refuse a delivery file whose network has another header by now."""
    if not network.downloads:
        raise InvalidOption(f"{network.name}: is not a delivery file", "{original} is for those")
    with open_network(original, max_bytes=max_bytes) as found:
        made_of = [file.original_start[LENGTH_BYTES:] for file in network.files]
        if made_of != [file.header.raw for file in found.files]:
            raise OutdatedDelivery(
                f"{network.name}: is older than {found.name}, or of another network: its header "
                "differs; run elsa-ship again"
            )


def digest_lines(source: Source) -> list[dict[str, str]]:
    """Check a file, or a lone shard, and give what its tensors add to each level's digest.

    >>> [list(lines) for lines in digest_lines("net.safetensors")]
    [['layer', 'bias'], ['layer', 'bias'], ['layer', 'bias']]
    """
    with open_network(source) as network:
        meter, check = Meter(no_progress, network.header.data_size), NetworkCheck(network)
        for file in network.files:
            check.file(file, meter.tick)
        return check.lines()


_ORDER = ((ChecksumMismatch,), (CounterOutOfRange, NonFinite), (CountMismatch,))
"""What can be wrong with the tensors of a file, by the lines of spec §11.2."""


def _line(problem: FormatError) -> int:
    return next(at for at, kinds in enumerate(_ORDER) if isinstance(problem, kinds))


class NetworkCheck:
    """Checks the files of a network, and then what they are together.

    Of a delivery file, as far as it was downloaded.
    """

    def __init__(self, network: Network) -> None:
        self._network, self._available = network, network.available
        self._proof, self._digests = Proof(network), _digests(network, self._available)
        self._problems: list[FormatError] = []

    def file(
        self,
        file: Network,
        on_bytes: Callable[[int], object],
        on_block: Callable[[TensorInfo, NDArray[np.uint8]], object] | None = None,
    ) -> None:
        """Read one of `network.files`; its tensors can be looked at block by block."""
        own = file.available
        if len(own) > len(self._available):  # of shards, one may have more than others
            self._read(file, own[-1], _digests(file, own), on_bytes)
        if self._available:
            self._read(file, self._available[-1], self._digests, on_bytes, on_block)
        else:
            file.check_unchanged()

    def _read(
        self,
        file: Network,
        level: LevelNumber,
        digests: LevelDigests,
        on_bytes: Callable[[int], object],
        on_block: Callable[[TensorInfo, NDArray[np.uint8]], object] | None = None,
    ) -> None:
        checker, problem = _Checker(file, digests, self._problems), self._problems.append
        with LevelReader(
            file, level, proof=self._proof, on_bytes=on_bytes, problem=problem
        ) as reader:
            for info in file.header.tensors.values():
                if file.holds(info.name, level):
                    blocks = reader.blocks(info)
                    checker.check(
                        info, blocks if on_block is None else _seen(info, blocks, on_block)
                    )
            reader.finish()

    def lines(self) -> list[dict[str, str]]:
        """Raise what is wrong with tensors, or give what they add to each level's digest."""
        for problem in sorted(self._problems, key=_line):
            raise problem
        return self._digests.lines

    def finish(self) -> int:
        """Raise what is wrong, or return how many digests there were to compare."""
        lines_of, network = self.lines(), self._network
        if network.profile.shard is not None:  # digests are of the whole, of which this is a part
            return 0
        return self._proof.finish() + sum(
            compare_digest(network.name, level.name, level.digest, lines)
            for level, lines in zip(network.profile.levels, lines_of, strict=False)
        )


def _digests(network: Network, available: Sequence[LevelNumber]) -> LevelDigests:
    """For the digests of the levels that can be read; a level file has a Proof instead."""
    dense = "dense" in network.levels
    sparse = [level for level in available if dense and level != "dense"]
    profile, numbers = network.profile, range(1, len(sparse) + 1)
    names = profile.nested, profile.varying, profile.variants
    return LevelDigests(profile.bits, numbers, *names)


def _seen(
    info: TensorInfo,
    blocks: Iterator[NDArray[np.uint8]],
    on_block: Callable[[TensorInfo, NDArray[np.uint8]], object],
) -> Iterator[NDArray[np.uint8]]:
    for block in blocks:
        on_block(info, block)
        yield block


class _Checker:
    """Checks tensors one after the other."""

    def __init__(
        self, network: Network, digests: LevelDigests, problems: list[FormatError]
    ) -> None:
        profile, self.problems = network.profile, problems
        self.profile, self.digests, self.where = profile, digests, network.name
        self.checked = "dense" in network.levels  # a level file has no counters

    def check(self, info: TensorInfo, blocks: Iterator[NDArray[np.uint8]]) -> None:
        try:
            if self.checked:
                self._check(info, blocks)
        except (CounterOutOfRange, NonFinite, CountMismatch) as error:
            self.problems.append(error)  # a wrong checksum in what follows comes first
        for _ in blocks:
            pass

    def _check(self, info: TensorInfo, blocks: Iterator[NDArray[np.uint8]]) -> None:
        nested, position = info.name in self.profile.nested, 0
        counts = np.zeros(1 << self.profile.bits, np.int64)
        for block in blocks:
            if nested:
                words = block.view(info.dtype.words)
                self._check_words(info, words, counts, position)
                position += words.size
            self.digests.take(info, block)
        if nested:
            levels = len(self.digests.lines)
            self.profile.check_counts(info.name, counts.tolist(), self.where, levels)
        self.digests.end(info)

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
