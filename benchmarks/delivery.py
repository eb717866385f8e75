"""Delivery files: coding against memory and links.

Coding is in one thread, and its processor time counts, the least of the repeats. The time of a link
is not measured: it is the bytes of the payloads by the stated speed.
"""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from internals import DELIVERY_BLOCK as BLOCK
from internals import Dtype, decode_nested, encode_nested, of_array

import elsa_format as elsa
from benchmarks._files import Files, chunked_copy, no_fsync
from benchmarks._rows import MIB, Peak, Race, Rate, row, unsynced

GIGABIT = 1e9 / 8
"""Bytes that a link of 1 Gbit/s brings in a second."""
LINK = "1 Gbit/s that bring it, computed"


class Coded:
    """The nested weights of a file as blocks of words and their payloads, in memory."""

    def __init__(self, path: Path) -> None:
        self.blocks: list[np.ndarray] = []
        with elsa.open(path) as file:
            self.bits, self.levels = file.bits, len(file.levels)
            tensors = file.load("dense")
            words = [tensors[name].reshape(-1) for name in file.nested]
        self.dtype: Dtype = of_array(words[0].dtype)
        self.words = np.concatenate(words).view(self.dtype.words)
        self.blocks = [
            self.words[at : at + (1 << BLOCK)] for at in range(0, self.words.size, 1 << BLOCK)
        ]
        self.payloads = [self.encode(block) for block in self.blocks]
        self.out = np.zeros_like(self.words)

    def encode(self, block: np.ndarray) -> list[np.ndarray]:
        """The payloads of a block."""
        return encode_nested(block, self.dtype, self.bits, self.levels)

    def encode_all(self) -> object:
        """Code all blocks."""
        return [self.encode(block) for block in self.blocks]

    def decoder(self, parts: int) -> tuple[Callable[[], None], int]:
        """Decodes the first parts of all blocks; and the bytes that it reads."""
        joined: list[tuple[Any, list[int]]] = []
        for payloads in self.payloads:
            data = np.concatenate(payloads[:parts])
            joined.append((data, [len(payload) for payload in payloads[:parts]]))

        def decode() -> None:
            at = 0
            for data, sizes in joined:
                words = self.out[at : at + (1 << BLOCK)]
                decode_nested(data, sizes, 1, words, self.dtype, self.bits, self.levels)
                at += words.size

        return decode, sum(data.size for data, _ in joined)

    def against_link(self, parts: int) -> tuple[Callable[[], None], int, int, float]:
        """The fields of a `Rate`."""
        decode, nbytes = self.decoder(parts)
        return decode, self.words.nbytes, nbytes, GIGABIT


_CODED: dict[Path, Coded] = {}


def coded(path: Path) -> Coded:
    """Made once."""
    if path not in _CODED:
        _CODED.clear()  # one at a time
        _CODED[path] = Coded(path)
    return _CODED[path]


@row("decode to dense, one thread", "memcpy of the weights", target="≤ 10 ×")
def dense_memcpy(files: Files) -> Race:
    """Both into memory that was used before; processor time."""
    made = coded(files.elsa())
    decode, _ = made.decoder(4)
    copy = partial(np.copyto, made.out, made.words)
    return Race(decode, copy, files.size, clock=time.thread_time)


@row("decode to dense, one thread", LINK, target="≥ 7 × faster")
def dense_link(files: Files) -> Rate:
    """Per byte of the delivery file."""
    return Rate(*coded(files.elsa()).against_link(4))


@row("decode level 1, one thread", LINK, target="≥ 3 × faster")
def level_1_link(files: Files) -> Rate:
    """Per byte of the delivery file."""
    return Rate(*coded(files.elsa()).against_link(1))


@row("encode, one thread", "200 MB/s, computed", target="≥ 1 × faster")
def encode(files: Files) -> Rate:
    """All levels of weights in memory."""
    made = coded(files.elsa())
    return Rate(made.encode_all, made.words.nbytes, made.words.nbytes, 200e6)


@row("decode to dense, BF16, one thread", LINK, target="≥ 3 × faster")
def dense_link_bf16(files: Files) -> Rate:
    """Per byte of the delivery file."""
    return Rate(*coded(files.bfloat16()).against_link(4))


@row("decode level 1, BF16, one thread", LINK, target="≥ 1.5 × faster")
def level_1_link_bf16(files: Files) -> Rate:
    """Per byte of the delivery file."""
    return Rate(*coded(files.bfloat16()).against_link(1))


@row("encode, BF16, one thread", "200 MB/s, computed", target="≥ 1 × faster")
def encode_bf16(files: Files) -> Rate:
    """All levels of weights in memory."""
    made = coded(files.bfloat16())
    return Rate(made.encode_all, made.words.nbytes, made.words.nbytes, 200e6)


def shipped(files: Files, source: Path) -> Path:
    """The delivery file of a file, made once."""
    target = source.with_suffix(".ship.safetensors")
    if not target.exists():
        with no_fsync():
            elsa.ship(source, target)
    return target


def load(path: Path, level: int | str) -> object:
    """All arrays of a level."""
    with elsa.open_delivery(path) as delivery:
        return delivery.load(level)


@row("load level 1 of the delivery file, all threads", "load it from the ELSA file")
def load_level_1(files: Files) -> Race:
    """Fresh arrays; checksums on."""
    source = files.elsa()
    target = shipped(files, source)

    def peer() -> object:
        with elsa.open(source) as file:
            return file.load(1)

    return Race(lambda: load(target, 1), peer, files.size)


@row("ship: verify, encode, write", "copy of the file")
def ship(files: Files) -> Race:
    """Not waiting for the disk."""
    source, out = files.elsa(), files.path("shipped")
    return Race(
        unsynced(lambda: elsa.ship(source, out)),
        lambda: chunked_copy(source, out),
        files.size,
        after=lambda: out.unlink(missing_ok=True),
    )


@row("ship, per byte", "of a file a 16th as large", target="≤ 1.2 ×")
def ship_growth(files: Files) -> Race:
    """Not waiting for the disk."""
    little = files.size // 16
    source, small, out = files.elsa(), files.elsa(little), files.path("shipped")
    return Race(
        unsynced(lambda: elsa.ship(source, out)),
        unsynced(lambda: elsa.ship(small, out)),
        files.size,
        little,
        after=lambda: out.unlink(missing_ok=True),
    )


@row("peak memory of ship", "64 MiB", target="≤ 1 ×")
def ship_peak(files: Files) -> Peak:
    """Imports included."""
    program = "import sys, elsa_format as e; e.ship(sys.argv[1], '/dev/null')"
    return Peak(program, (files.elsa(),), files.size, 64 * MIB)


@row("peak memory of the whole file back", "64 MiB", target="≤ 1 ×")
def whole_peak(files: Files) -> Peak:
    """Imports included."""
    program = "import sys, elsa_format as e; e.extract(sys.argv[1], '/dev/null', restore=True)"
    return Peak(program, (shipped(files, files.elsa()),), files.size, 64 * MIB)
