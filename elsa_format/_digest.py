"""The identity of an extracted level, the same in every layout (spec §7)."""

import threading
from collections.abc import Container, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from elsa_format._container import TensorInfo
from elsa_format._container.dtypes import of_array
from elsa_format._counters import compact
from elsa_format._errors import DigestMismatch
from elsa_format._memory import give_block, take_block
from elsa_format._threads import CORES, Task, start

if TYPE_CHECKING:
    import hashlib

INLINE = 1 << 15
"""Weights up to which handing them to a thread takes longer than hashing them."""


def _sha256() -> "hashlib._Hash":
    import hashlib  # only here, as it takes long to import

    return hashlib.sha256()


class _Scratch(threading.local):
    """Memory of each thread, not of each level: there may be 255 levels."""

    def __init__(self) -> None:
        self.bitmask = np.empty(0, np.uint8)
        self.values = np.empty(0, np.uint8)

    def of(self, words: NDArray[Any]) -> tuple[NDArray[np.uint8], NDArray[Any]]:
        """Room for the bitmask and the values of some words."""
        mask_bytes = -(-words.size // 8)
        if self.bitmask.size < mask_bytes:
            self.bitmask = np.empty(mask_bytes, np.uint8)
        if self.values.size < words.nbytes:
            self.values = np.empty(words.nbytes, np.uint8)
        return self.bitmask[:mask_bytes], self.values[: words.nbytes].view(words.dtype)


_SCRATCH = _Scratch()


class _LevelHash:
    """The two running hashes of one nested tensor at one level."""

    def __init__(self, level: int) -> None:
        self.level = level
        self.mask = _sha256()
        self.values = _sha256()

    def update(self, words: NDArray[Any], bits: int) -> None:
        bitmask, values = _SCRATCH.of(words)
        kept = compact(words, bits, self.level, bitmask, values)
        self.mask.update(bitmask.data)
        self.values.update(values[:kept].data)


class _NestedHash:
    """The running hashes of one nested tensor at every level.

    Threads hash a copy of the last block while the caller reads the next: SHA-256 takes longer than
    all else that is done with a block.
    """

    def __init__(self, limits: Sequence[int]) -> None:
        self.levels = [_LevelHash(limit) for limit in limits]
        self._copy = np.empty(0, np.uint8)
        self._running: list[Task] = []

    def update(self, words: NDArray[Any], bits: int) -> None:
        """Take the next weights."""
        self.wait()
        if words.size <= INLINE or CORES == 1:
            self._hash(words, bits, self.levels)
            return
        if self._copy.size < words.nbytes:
            self._copy = take_block(words.nbytes)
        copy = self._copy[: words.nbytes].view(words.dtype)
        copy[:] = words
        # A task for each core; dealt out from the densest level, which takes longest.
        hands = [self.levels[::-1][i::CORES] for i in range(CORES)]
        self._running = [start(self._hash, copy, bits, hand) for hand in hands if hand]

    def _hash(self, words: NDArray[Any], bits: int, levels: list[_LevelHash]) -> None:
        for level in levels:
            level.update(words, bits)

    def wait(self) -> None:
        """Return when all that was taken is hashed."""
        for running in self._running:
            running.wait()
        self._running = []

    def finish(self) -> None:
        """Nothing follows."""
        self.wait()
        give_block(self._copy)


class LevelDigests:
    """Digests of all levels of a network, from its tensors in any order, even interleaved."""

    def __init__(
        self,
        bits: int,
        limits: Sequence[int],
        nested: Container[str],
        per_level: Container[str] = (),
        variants: Mapping[str, tuple[str, int]] = MappingProxyType({}),
    ) -> None:
        """Of each level, `limits` has the largest counter that it keeps.

        Names tell what a tensor adds to the digests: nested ones to each what it keeps, variants of
        per-level ones to that of their level, all others to each the same.
        """
        self.bits, self._limits = bits, limits
        self.lines: list[dict[str, str]] = [{} for _ in limits]
        """Of each level: the lines of the tensors that are complete."""
        self._names, self._per_level, self._variants = nested, per_level, variants
        self._plain: dict[str, Any] = {}
        self._nested: dict[str, _NestedHash] = {}

    def take(self, info: TensorInfo, block: NDArray[np.uint8]) -> None:
        """Take the next bytes of a tensor.

        Blocks of a nested one hold, but for the last, a multiple of 8 weights.
        """
        name = info.name
        if name not in self._names:
            self._plain.setdefault(name, _sha256()).update(block.data)
            return
        if name not in self._nested:
            self._nested[name] = _NestedHash(self._limits)
        self._nested[name].update(block.view(info.dtype.words), self.bits)

    def end(self, info: TensorInfo) -> None:
        """Finish a tensor."""
        if info.name in self._names:
            hashes = self._nested.pop(info.name, None) or _NestedHash(self._limits)
            hashes.finish()
            for level, lines in zip(hashes.levels, self.lines, strict=True):
                both = level.mask.hexdigest(), level.values.hexdigest()
                lines[info.name] = digest_line(info.name, info, *both)
            return
        content = self._plain.pop(info.name, None) or _sha256()
        name, only = self._variants.get(info.name, (info.name, None))
        if only is None and name in self._per_level:
            return
        line = digest_line(name, info, content.hexdigest())
        for lines in self.lines if only is None else self.lines[only - 1 : only]:
            lines[name] = line


def digest_line(name: str, info: TensorInfo, *hashes: str) -> str:
    """One tensor's line; the length before the name keeps any name unambiguous."""
    size, shape = len(name.encode("utf-8")), ",".join(map(str, info.shape))
    return f"{size}:{name} {info.dtype.name} [{shape}] {' '.join(hashes)}\n"


def digest_of_lines(lines: Mapping[str, str]) -> str:
    """The digest of a level from the lines of its tensors."""
    total = _sha256()
    for name in sorted(lines, key=lambda name: name.encode("utf-8")):
        total.update(lines[name].encode("utf-8"))
    return f"sha256:{total.hexdigest()}"


def compare_digest(where: str, name: str, stated: str | None, lines: Mapping[str, str]) -> bool:
    """Compare the digest of a level with the one that is stated; whether there is one."""
    if stated is None:
        return False
    if (found := digest_of_lines(lines)) != stated:
        raise DigestMismatch(f"{where}: level {name!r}: digest {found}, expected {stated}")
    return True


def level_digest(tensors: Mapping[str, NDArray[Any]], nested: Iterable[str]) -> str:
    """The digest of a level given as dense arrays; `nested` names those that carry counters.

    >>> level_digest({"bias": np.zeros(2, np.float32)}, nested=[])[:20]
    'sha256:eb405646a3a8a'
    """
    lines, nested = {}, set(nested)
    for name, array in tensors.items():
        info = TensorInfo(name, of_array(array.dtype), array.shape)
        flat = np.ascontiguousarray(array).reshape(-1)
        lines[name] = tensor_line(info, [flat], nested=name in nested)
    return digest_of_lines(lines)


def tensor_line(info: TensorInfo, blocks: Iterable[NDArray[Any]], *, nested: bool) -> str:
    """The line of one tensor of a level, given dense, block after block.

    Blocks of a nested tensor hold, but for the last, a multiple of 8 elements.

    >>> bias = TensorInfo("bias", of_array(np.dtype(np.float32)), (2,))
    >>> tensor_line(bias, [np.zeros(2, np.float32)], nested=False)[:15]
    '4:bias F32 [2] '
    """
    hashes = [_sha256() for _ in range(2 if nested else 1)]
    for block in blocks:
        contents: list[Any] = [block.view(np.uint8)]
        if nested:
            words = block.view(info.dtype.words)
            kept = words != 0
            contents = [np.packbits(kept, bitorder="little"), words[kept]]
        for running, content in zip(hashes, contents, strict=True):
            running.update(content.data)
    return digest_line(info.name, info, *(running.hexdigest() for running in hashes))
