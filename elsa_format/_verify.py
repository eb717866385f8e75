"""Check everything the specification asks of a file (spec §2.2)."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elsa_format import _kernels
from elsa_format._blocks import (
    BlockReader,
    Progress,
    Source,
    Track,
    ignore,
    open_source,
    read_profile,
    tracks,
)
from elsa_format._codec import refuse_unpackable
from elsa_format._digest import LevelDigests
from elsa_format._errors import (
    CounterOutOfRange,
    CountMismatch,
    DigestMismatch,
    FormatError,
    NonFinite,
)
from elsa_format._header import TensorInfo
from elsa_format._options import whole
from elsa_format._profile import Profile, variant_name
from elsa_format._threads import Meter


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


def verify(source: Source, *, jobs: int = 1, progress: Progress = ignore) -> Report:
    """Read a whole file or all shards of an index, and raise for the first thing that is wrong.

    The source is a path, a URL or a stream; `jobs` shards are read at a time.

    >>> verify("net.safetensors").digests
    3
    """
    jobs = whole("jobs", jobs, low=1)
    with open_source(source) as opened:
        header, profile = read_profile(opened)
        meter = Meter(progress, header.data_size)
        digests = LevelDigests(profile.bits, len(profile.levels))

        def check(track: Track) -> FormatError | None:
            with track.open() as reader:
                checker = _Checker(profile, digests, reader.source.name)
                for info in track.tensors:
                    checker.check(info, reader)
                reader.finish()
            return checker.problem

        found = meter.run(check, tracks(opened, header, profile, meter), jobs)
        problems = [problem for problem in found if problem is not None]
        for problem in sorted(problems, key=_comes_late):
            raise problem
        compared = 0
        if profile.shard is None:
            for level, digest in zip(profile.levels, digests.result(), strict=True):
                if level.digest not in (None, digest):
                    raise DigestMismatch(
                        f"{opened.name}: level {level.name!r}: digest {digest}, "
                        f"expected {level.digest}"
                    )
                compared += level.digest is not None
    return Report(
        path=opened.name,
        levels=len(profile.levels),
        tensors=len(header.tensors),
        nested=len(profile.nested),
        checksums=len(profile.checksums),
        digests=compared,
    )


def _comes_late(problem: FormatError) -> bool:
    """Spec §11.2: a wrong weight comes before a wrong count."""
    return isinstance(problem, CountMismatch)


class _Checker:
    """Checks tensors one after the other."""

    def __init__(self, profile: Profile, digests: LevelDigests, where: str) -> None:
        self.profile, self.digests, self.where = profile, digests, where
        numbers = range(1, len(profile.levels) + 1)
        self.all_levels = list(numbers)
        self.variants = {variant_name(n, t): (n, t) for n in profile.per_level for t in numbers}
        self.problem: FormatError | None = None

    def check(self, info: TensorInfo, reader: BlockReader) -> None:
        blocks = reader.blocks(info)
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
            self._check_words(info, words, counts, position)
            self.digests.update_nested(info.name, words)
            position += words.size
        self._check_counts(info, counts)
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

    def _check_counts(self, info: TensorInfo, counts: NDArray[np.int64]) -> None:
        found = tuple(int(n) for n in counts[1 : len(self.profile.levels) + 1].cumsum())
        expected = self.profile.nested[info.name]
        if found != expected:
            raise CountMismatch(
                f"{self.where}: tensor {info.name!r}: levels keep {list(found)}, "
                f"expected {list(expected)}"
            )
