"""Check everything that is to hold of a delivery file or its first bytes (ELSA-D-006)."""

from collections.abc import Callable, Sequence

import numpy as np

from elsa_format import _kernels
from elsa_format._container.header import TensorInfo
from elsa_format._counters import refuse_unpackable
from elsa_format._delivery.reader import Delivery
from elsa_format._digest import LevelDigests
from elsa_format._errors import CountMismatch, DigestMismatch, FormatError, NonFinite
from elsa_format._profile import Level, variant_name


def check_delivery(
    delivery: Delivery, parts: int, digests: LevelDigests, tick: Callable[[int], object]
) -> None:
    """Check all that is there of a file, and take its first parts into the digests of levels.

    Of shards, one may have more than others.
    """
    there = delivery.prefix.parts
    for part in range(1, there + 1):
        delivery.prefix.payloads(part)
    if there > parts:
        own = LevelDigests(delivery.profile.bits, range(1, min(there, len(delivery.levels)) + 1))
        _check_tensors(delivery, there, own, tick)
    if parts:
        _check_tensors(delivery, parts, digests, tick)
    delivery.finish()


def compare_digests(where: str, levels: Sequence[Level], digests: LevelDigests) -> int:
    """Compare the digests of the levels that are there; how many have one."""
    compared = 0
    for level, digest in zip(levels, digests.result(), strict=False):
        if level.digest not in (None, digest):
            raise DigestMismatch(
                f"{where}: level {level.name!r}: digest {digest}, expected {level.digest}"
            )
        compared += level.digest is not None
    return compared


def _check_tensors(
    delivery: Delivery, parts: int, digests: LevelDigests, tick: Callable[[int], object]
) -> None:
    """Decode what the first parts have, and check it but for digests."""
    profile, levels = delivery.profile, min(parts, len(delivery.levels))
    variants = {
        variant_name(name, t): (name, t)
        for name in profile.per_level
        for t in range(1, len(delivery.levels) + 1)
    }
    problems: list[FormatError] = []
    for info in delivery.header.tensors.values():
        place = delivery.prefix.plan.places.get(info.name)
        if place is not None and place.part > parts:
            continue
        nested = info.name in profile.nested
        if nested:
            try:
                _check_nested(delivery, info, parts, digests)
            except (NonFinite, CountMismatch) as error:
                problems.append(error)  # a wrong checksum in what follows comes first
        else:
            for block in delivery.blocks(info, parts):
                digests.update_plain(info.name, block)
            name, level = variants.get(info.name, (info.name, 0))
            if level:
                if level <= levels:
                    digests.end_plain(info, name, [level])
            elif info.name not in profile.varying:
                digests.end_plain(info, info.name, range(1, levels + 1))
        tick(info.nbytes)
    for problem in sorted(problems, key=lambda error: isinstance(error, CountMismatch)):
        raise problem


def _check_nested(delivery: Delivery, info: TensorInfo, parts: int, digests: LevelDigests) -> None:
    profile, where = delivery.profile, f"{delivery.path}: tensor {info.name!r}"
    counts, position, problem = np.zeros(1 << profile.bits, np.int64), 0, None
    for block in delivery.blocks(info, parts):
        words = block.view(info.dtype.words)
        counts += _kernels.count(words, profile.bits)
        try:
            refuse_unpackable(words, None, info.dtype, len(profile.levels), where, first=position)
        except NonFinite as error:
            problem = problem or error
        digests.update_nested(info.name, words)
        position += words.size
    digests.end_nested(info)
    if problem is not None:
        raise problem
    levels = len(digests.lines)
    found = tuple(counts[1 : levels + 1].cumsum().tolist())
    if found != profile.nested[info.name][:levels]:
        raise CountMismatch(
            f"{where}: levels keep {list(found)}, "
            f"expected {list(profile.nested[info.name][:levels])}"
        )
