"""Which tensors are in which part, as sequences of words cut into blocks (delivery-1.0 §4.2)."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np

from elsa_format._container import Header, TensorInfo
from elsa_format._container.dtypes import Dtype
from elsa_format._profile import Profile, variant_name

BATCH = 1 << 17
"""Words that are decoded together, if blocks are smaller: those of a block as Writers have it."""


@dataclass(frozen=True)
class Sequence:
    """The words of tensors of one dtype, one tensor after the other (ELSA-D-016)."""

    dtype: Dtype
    tensors: tuple[TensorInfo, ...]
    block: int
    """Words in a block."""
    words: "np.dtype[Any]" = field(init=False, repr=False)
    """Of elements of fewer than 8 bits the bytes are the words."""
    starts: tuple[int, ...] = field(init=False, repr=False)
    """The first word of each tensor, and one past the last of all."""

    def __post_init__(self) -> None:
        words = np.dtype(f"<u{max(self.dtype.size, 8) // 8}")
        sizes = (info.nbytes // words.itemsize for info in self.tensors)
        object.__setattr__(self, "words", words)
        object.__setattr__(self, "starts", tuple(accumulate(sizes, initial=0)))

    @property
    def length(self) -> int:
        """Words in all."""
        return self.starts[-1]

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return -(-self.length // self.block)

    def size(self, number: int) -> int:
        """Words of a block (ELSA-D-017)."""
        return min(self.block, self.length - number * self.block)

    @property
    def batch(self) -> int:
        """Words of a batch, the blocks that are decoded together: as many as each costs time."""
        return max(self.block, BATCH)

    @property
    def batches(self) -> int:
        """Number of batches."""
        return -(-self.length // self.batch)

    def blocks_of(self, batch: int) -> range:
        """The numbers of the blocks of a batch."""
        many = self.batch // self.block
        return range(batch * many, min((batch + 1) * many, self.blocks))

    def batch_size(self, batch: int) -> int:
        """Words of a batch."""
        return min(self.batch, self.length - batch * self.batch)

    def limit(self, number: int) -> int:
        """The most bytes that a payload of a block may have (ELSA-D-018)."""
        n = self.size(number)
        return n * self.words.itemsize + -(-n // 8) + 1024

    def pieces(self, number: int) -> Iterator[tuple[TensorInfo, int, int]]:
        """What a block has of tensors: the tensor, the first byte in it, and the bytes."""
        at, stop = number * self.block, number * self.block + self.size(number)
        which = bisect_right(self.starts, at) - 1
        while at < stop:
            info, begin, end = self.tensors[which], self.starts[which], self.starts[which + 1]
            size = min(end, stop) - at
            yield info, (at - begin) * self.words.itemsize, size * self.words.itemsize
            at, which = at + size, which + 1


def _sequences(tensors: Iterable[TensorInfo], block: int) -> list[Sequence]:
    """The sequences of tensors in the order of their data."""
    found: dict[str, list[TensorInfo]] = {}
    for info in tensors:
        if info.nbytes:
            found.setdefault(info.dtype.name, []).append(info)
    return [Sequence(infos[0].dtype, tuple(infos), 1 << block) for infos in found.values()]


@dataclass(frozen=True)
class Place:
    """Where a tensor is."""

    part: int
    """The part that has it: 1…T, T + 1 for the dense part; 0 if it is nested, and in all."""
    sequence: Sequence
    start: int
    """Its first word."""


class BlockPlan:
    """The sequences of a network's delivery file."""

    def __init__(self, header: Header, profile: Profile, block: int) -> None:
        levels, tensors = len(profile.levels), header.tensors
        parts: list[list[TensorInfo]] = [[] for _ in range(levels + 2)]
        variants = {variant_name(n, t): t for n in profile.per_level for t in range(1, levels + 1)}
        for name, info in tensors.items():
            if name in profile.nested:
                parts[0].append(info)
            elif name in profile.varying:
                parts[levels + 1].append(info)
            else:
                parts[variants.get(name, 1)].append(info)
        self.levels = levels
        self.nested, *self.plain = (_sequences(infos, block) for infos in parts)
        """Sequences that every part has; those of parts 1…T and the dense part alone."""
        self.places: dict[str, Place] = {}
        for part, sequences in enumerate([self.nested, *self.plain]):
            for sequence in sequences:
                for info, start in zip(sequence.tensors, sequence.starts, strict=False):
                    self.places[info.name] = Place(part, sequence, start)

    def of_part(self, part: int) -> list[Sequence]:
        """The sequences of a part, in order."""
        return [*self.plain[part - 1], *self.nested]
