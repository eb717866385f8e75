"""The identity of an extracted level, the same in every layout (spec §7)."""

import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elsa_format import _kernels
from elsa_format._header import TensorInfo
from elsa_format._json import dump


@cache
def workers() -> ThreadPoolExecutor:
    """Threads for loops that release the GIL: hashing, kernels, file reads."""
    return ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="elsa")


def each(function: Callable[[Any], object], items: Sequence[Any], *, parallel: bool) -> None:
    """Call the function on every item, in threads where it pays."""
    if parallel and len(items) > 1 and (os.cpu_count() or 1) > 1:
        for _ in workers().map(function, items):
            pass
    else:
        for item in items:
            function(item)


class _LevelHash:
    """The two running hashes of one nested tensor at one level."""

    def __init__(self, level: int) -> None:
        self.level = level
        self.kept = 0
        self.mask = hashlib.sha256()
        self.values = hashlib.sha256()
        self._bitmask = np.empty(0, np.uint8)
        self._values = np.empty(0, np.uint8)

    def update(self, words: NDArray[Any], bits: int) -> None:
        if self._values.nbytes < words.nbytes:
            self._bitmask = np.empty(-(-words.size // 8), np.uint8)
            self._values = np.empty(words.nbytes, np.uint8)
        bitmask = self._bitmask[: -(-words.size // 8)]
        values = self._values[: words.nbytes].view(words.dtype)
        kept = _kernels.compact(words, bits, self.level, bitmask, values)
        self.mask.update(bitmask)
        self.values.update(values[:kept])
        self.kept += kept


class LevelDigests:
    """Digests of all levels of a network, from its tensors in any order."""

    def __init__(self, bits: int, levels: int) -> None:
        self.bits = bits
        self._lines: list[dict[str, str]] = [{} for _ in range(levels)]
        self._open: list[_LevelHash] = []
        self._plain = hashlib.sha256()

    def begin(self) -> None:
        """Start a tensor."""
        self._plain = hashlib.sha256()
        self._open = []

    def update_plain(self, block: NDArray[np.uint8]) -> None:
        """Take the next bytes of a tensor without counters."""
        self._plain.update(block)

    def update_nested(self, words: NDArray[Any]) -> None:
        """Take the next weights of a nested tensor; all blocks but the last hold a multiple of 8."""
        if not self._open:
            self._open = [_LevelHash(t) for t in range(1, len(self._lines) + 1)]
        each(lambda level: level.update(words, self.bits), self._open, parallel=words.size > 1 << 15)

    def end_plain(self, info: TensorInfo, name: str, levels: Iterable[int]) -> None:
        """Finish a tensor that the given levels share under `name`."""
        line = digest_line(name, info, self._plain.hexdigest())
        for level in levels:
            self._lines[level - 1][name] = line

    def end_nested(self, info: TensorInfo) -> None:
        """Finish a nested tensor."""
        empty = hashlib.sha256().hexdigest()
        for t, lines in enumerate(self._lines):
            hashes = (empty, empty)
            if self._open:
                hashes = (self._open[t].mask.hexdigest(), self._open[t].values.hexdigest())
            lines[info.name] = digest_line(info.name, info, *hashes)

    def result(self) -> list[str]:
        """The digest of each level."""
        return [digest_of_lines(lines) for lines in self._lines]


def digest_line(name: str, info: TensorInfo, *hashes: str) -> str:
    """One tensor's line; the length before the name keeps any name unambiguous."""
    size = len(name.encode("utf-8"))
    return f"{size}:{name} {info.dtype.name} {dump(info.shape)} {' '.join(hashes)}\n"


def digest_of_lines(lines: dict[str, str]) -> str:
    """The digest of a level from the lines of its tensors."""
    total = hashlib.sha256()
    for name in sorted(lines, key=lambda name: name.encode("utf-8")):
        total.update(lines[name].encode("utf-8"))
    return f"sha256:{total.hexdigest()}"
