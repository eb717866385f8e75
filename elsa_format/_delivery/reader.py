"""The tensors of a delivery file or its first bytes, out of the blocks that they are in."""

from collections.abc import Iterator
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elsa_format._container import as_array
from elsa_format._delivery.blocks import BlockDecoder, Blocks, Words, at_once
from elsa_format._delivery.prefix import Growing, Prefix
from elsa_format._delivery.sequences import Sequence
from elsa_format._errors import TrailingData
from elsa_format._memory import aligned
from elsa_format._profile import LevelNumber
from elsa_format._storage import Closing
from elsa_format._threads import run


class Delivery(Closing):
    """A delivery file, or its first bytes, as far as it is decoded."""

    def __init__(self, prefix: Prefix) -> None:
        self.prefix, self.decoder = prefix, BlockDecoder(prefix)
        self.blocks = Blocks(self.decoder)

    def finish(self) -> None:
        """Nothing follows what was read, and it is what it was."""
        storage, end = self.prefix.storage, self.prefix.document.ends[-1]
        if isinstance(storage, Growing) and storage.have >= end and storage.keep(end + 1) > end:
            raise TrailingData(f"{self.prefix.name}: bytes follow the last part")
        storage.check_unchanged(grows=True)

    def close(self) -> None:
        """Close the file."""
        self.blocks.close()
        self.prefix.close()


class NestedArrays:
    """The nested tensors of a level, which grow in place: views of the sequences they lie in."""

    def __init__(self, delivery: Delivery, part: int, jobs: int) -> None:
        prefix = delivery.prefix
        self._decoder, self._prefix, self._part = delivery.decoder, prefix, part
        self._sequences = [(s, _empty(s)) for s in prefix.plan.nested]
        self._stored: set[tuple[int, int]] = set()
        self._decode(1, part, jobs)
        words_of = {id(sequence): words for sequence, words in self._sequences}
        self.arrays: dict[str, NDArray[Any]] = {}
        for name in prefix.profile.nested:
            info, place = prefix.header.tensors[name], prefix.plan.places.get(name)
            if place is not None:
                size = info.nbytes // place.sequence.words.itemsize
                words = words_of[id(place.sequence)][place.start : place.start + size]
                self.arrays[name] = as_array(words.view(np.uint8), info, prefix.name)

    def upgrade(self, level: LevelNumber, jobs: int) -> None:
        """Add the words of more parts."""
        part = self._prefix.part(level)
        self._prefix.check_indexes(part)
        if part > self._part:
            self._decode(self._part + 1, part, jobs)
            self._part = part

    def _decode(self, first: int, last: int, jobs: int) -> None:
        for which, (sequence, _) in enumerate(self._sequences):

            def one(batch: int, which: int = which) -> None:
                sequence, words = self._sequences[which]
                for start, blocks in self._runs(which, sequence.blocks_of(batch), first):
                    own = words[blocks.start * sequence.block : blocks.stop * sequence.block]
                    stored = self._decoder.nested(sequence, blocks, own, last, start)
                    self._stored.update((which, number) for number in stored)

            run(one, range(sequence.batches), at_once(sequence, jobs))

    def _runs(self, which: int, blocks: range, first: int) -> Iterator[tuple[int, range]]:
        """Blocks in a row, and the part to decode from: stored ones are in part 1 alone."""
        for stored, numbers in groupby(blocks, lambda number: (which, number) in self._stored):
            run = list(numbers)
            yield 1 if stored else first, range(run[0], run[-1] + 1)


def _empty(sequence: Sequence) -> Words:
    words: Words = aligned(sequence.length * sequence.words.itemsize).view(sequence.words)
    return words
