"""Check everything that is to hold of a delivery file or its first bytes (ELSA-D-006)."""

from dataclasses import dataclass

import numpy as np

from elsa_format import _kernels
from elsa_format._container.header import TensorInfo
from elsa_format._counters import refuse_unpackable
from elsa_format._delivery.reader import Delivery, open_delivery
from elsa_format._digest import LevelDigests
from elsa_format._errors import CountMismatch, DigestMismatch, FormatError, NonFinite
from elsa_format._profile import LevelNumber, variant_name
from elsa_format._storage import Source
from elsa_format._threads import Progress, no_progress


@dataclass(frozen=True)
class DeliveryReport:
    """What was found to hold.

    >>> verify_delivery("net.ship.safetensors")
    DeliveryReport(path='net.ship.safetensors', there='dense', levels=3, tensors=2, digests=3)
    """

    path: str
    there: LevelNumber | None
    """The densest level that is there; None if none is."""
    levels: int
    tensors: int
    digests: int
    """Levels that are there and whose digest was compared."""


def verify_delivery(source: Source, *, progress: Progress = no_progress) -> DeliveryReport:
    """Read all parts that are there, and raise for the first thing that is wrong."""
    with open_delivery(source) as delivery:
        parts = delivery.prefix.parts
        for part in range(1, parts + 1):
            delivery.prefix.payloads(part)
        compared = 0
        if parts:
            digests = check_tensors(delivery, parts, progress)
            delivery.finish()
            if delivery.profile.shard is None:
                compared = compare_digests(delivery, digests)
        return DeliveryReport(
            path=delivery.path,
            there=delivery.there,
            levels=len(delivery.levels),
            tensors=len(delivery.header.tensors),
            digests=compared,
        )


def compare_digests(delivery: Delivery, digests: LevelDigests) -> int:
    """Compare the digests of the levels that are there; how many have one."""
    compared = 0
    for level, digest in zip(delivery.levels, digests.result(), strict=False):
        if level.digest not in (None, digest):
            raise DigestMismatch(
                f"{delivery.path}: level {level.name!r}: digest {digest}, expected {level.digest}"
            )
        compared += level.digest is not None
    return compared


def check_tensors(
    delivery: Delivery, parts: int, progress: Progress, into: LevelDigests | None = None
) -> LevelDigests:
    """Decode what the first parts have, and check it but for digests, which are returned."""
    profile, levels = delivery.profile, min(parts, len(delivery.levels))
    digests = into or LevelDigests(profile.bits, range(1, levels + 1))
    variants = {
        variant_name(name, t): (name, t)
        for name in profile.per_level
        for t in range(1, len(delivery.levels) + 1)
    }
    problems: list[FormatError] = []
    done, total = 0, delivery.header.data_size
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
        done += info.nbytes
        progress(done, total)
    for problem in sorted(problems, key=lambda error: isinstance(error, CountMismatch)):
        raise problem
    return digests


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
