"""Decoded blocks of a delivery file; those that follow are decoded while one is used."""

import time
from collections import OrderedDict
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elsa_format._delivery.codec import decode_nested, decode_plain
from elsa_format._delivery.payloads import CHECKSUM
from elsa_format._delivery.prefix import Prefix
from elsa_format._delivery.sequences import Place, Sequence
from elsa_format._threads import CORES, PATIENCE, Task, start

MEMORY = 20 << 20
"""Bytes of decoded blocks that are kept: tensors of several sequences follow one another. And bytes
that blocks take while they are decoded."""
TAKEN = 6
"""How often its words a block takes then, at most: words, payloads, what decoders work with."""
SMALL = 1 << 16
"""Bytes of a block up to which a thread would cost more than it does."""

Words = NDArray[np.unsignedinteger[Any]]


class Decoder:
    """Blocks of a delivery file as words."""

    def __init__(self, prefix: Prefix) -> None:
        self.prefix = prefix

    def plain(self, part: int, sequence: Sequence, number: int, words: Words) -> None:
        """Fill a plain block of a part."""
        payloads = self.prefix.payloads(part)
        at = payloads.first(sequence) + number
        payload = np.empty(CHECKSUM + payloads.size(at), np.uint8)
        payloads.read(at, payload)
        decode_plain(payload[CHECKSUM:], words, sequence.dtype, payloads.where(at))

    def nested(
        self, sequence: Sequence, number: int, words: Words, last: int, first: int = 1
    ) -> bool:
        """Put the words of parts `first` to `last` into a block; whether it is a stored one."""
        places = []
        for part in range(first, last + 1):
            payloads = self.prefix.payloads(part)
            places.append((payloads, payloads.first(sequence) + number))
        sizes = [payloads.size(at) for payloads, at in places]
        end = CHECKSUM + sum(sizes)
        joined = np.empty(end, np.uint8)
        # From the last to the first: a checksum lies where the payload before it will end.
        for (payloads, at), size in zip(reversed(places), reversed(sizes), strict=True):
            payloads.read(at, joined[end - size - CHECKSUM : end])
            end -= size
        payloads, at = places[-1]
        bits, levels = self.prefix.profile.bits, self.prefix.levels
        where = payloads.where(at)
        return decode_nested(
            joined[CHECKSUM:], sizes, first, words, sequence.dtype, bits, levels, where
        )


def at_once(sequence: Sequence, jobs: int = CORES) -> int:
    """How many blocks of a sequence are decoded at a time: as many as there is memory for."""
    size = sequence.block * sequence.words.itemsize
    return 1 if size <= SMALL else max(1, min(jobs, MEMORY // (TAKEN * size)))


class Blocks:
    """The blocks that were used last, and those that will be used next."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder, self._lock = decoder, Lock()
        self._found: OrderedDict[tuple[int, int, int], _Block] = OrderedDict()

    def get(self, place: Place, part: int, number: int, stop: int) -> Words:
        """A block as the first parts have it; blocks up to `stop` will be asked for after it."""
        with self._lock:
            block = self._block(place, part, number)
            last = min(number + at_once(place.sequence), stop)
            following = [self._block(place, part, n) for n in range(number + 1, last)]
        for other in following:
            other.begin()
        try:
            return block.get()
        except BaseException:  # Ctrl-C, perhaps: whoever asks again gets it anew
            with self._lock:
                self._found = OrderedDict(
                    (key, found) for key, found in self._found.items() if found is not block
                )
            raise

    def _block(self, place: Place, part: int, number: int) -> "_Block":
        sequence = place.sequence
        key = id(sequence), number, part if place.part == 0 else 0
        if key in self._found:
            self._found.move_to_end(key)
            return self._found[key]
        room = sequence.block * sequence.words.itemsize
        held = sum(block.words.nbytes for block in self._found.values())
        while self._found and held + room > MEMORY:
            held -= self._found.popitem(last=False)[1].words.nbytes
        words: Words = np.empty(sequence.size(number), sequence.words)
        if place.part == 0:
            task = Task(self._decoder.nested, sequence, number, words, part)
        else:
            task = Task(self._decoder.plain, place.part, sequence, number, words)
        self._found[key] = _Block(words, task)
        return self._found[key]

    def close(self) -> None:
        """Forget them, when no thread reads the file any more."""
        until = time.monotonic() + PATIENCE
        for block in self._found.values():
            block.abandon(until)
        self._found.clear()


class _Block:
    """A block that is decoded by whoever needs it first, or before that in a thread."""

    def __init__(self, words: Words, task: Task) -> None:
        self.words, self._task = words, task
        self._lock, self._begun = Lock(), False

    def _first(self) -> bool:
        """Whether nobody has begun with it."""
        with self._lock:
            begun, self._begun = self._begun, True
        return not begun

    def begin(self) -> None:
        """Let a thread decode it."""
        if self._first():
            start(self._task)

    def get(self) -> Words:
        """Its words."""
        if self._first():
            self._task()
        self._task.wait()
        return self.words

    def abandon(self, until: float) -> None:
        """Be done with it, and wait for its thread no longer than until then."""
        if not self._first():
            self._task.abandon(until)
