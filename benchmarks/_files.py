"""The files that rows read: made once, in a scratch directory, their pages in the cache."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
from internals import Contents, of_array, open_writer
from numpy.typing import NDArray
from safetensors.numpy import save_file

import elsa_format as elsa
from elsa_format import TensorInfo

CHUNK = 1 << 20
LEVELS = (95, 90, 80)
LEVEL = 2
"""The level that rows load: 90 % zeros."""
SIDE = 1024
"""Layers are matrices of this many rows."""


@contextlib.contextmanager
def no_fsync() -> Iterator[None]:
    """Take the disk out of a measurement: what is written stays in the page cache."""
    with mock.patch.object(os, "fsync", return_value=None):
        yield


class Files:
    """Makes files of random weights on demand."""

    def __init__(self, folder: Path, size: int, largest: int) -> None:
        self.folder, self.size, self.largest = folder, size, largest
        needed, free = 2 * largest + 16 * size, shutil.disk_usage(folder).free
        if free < needed:
            raise OSError(f"{folder}: {free >> 20} MiB free, expected {needed >> 20}")
        self._made: dict[str, Path] = {}

    def path(self, name: str) -> Path:
        """A path in the scratch directory."""
        return self.folder / name

    def dense(self, size: int | None = None) -> Path:
        """A plain checkpoint: layers of 16 MiB, or four if that is less, and their biases."""
        size = size or self.size

        def make(path: Path) -> None:
            save_file(network(size), path)

        return self._once(f"dense-{size}.safetensors", make)

    def elsa(self, size: int | None = None) -> Path:
        """The same checkpoint with three nested levels."""
        size = size or self.size

        def make(path: Path) -> None:
            elsa.pack(network(size), path, sparsities=LEVELS)

        return self._once(f"elsa-{size}.safetensors", make)

    def one_tensor(self) -> Path:
        """All weights in one tensor."""

        def make(path: Path) -> None:
            elsa.pack({"w": weights(self.size).reshape(SIDE, -1)}, path, sparsities=LEVELS)

        return self._once("one.safetensors", make)

    def many_levels(self, levels: int) -> Path:
        """A checkpoint with this many levels, from 99 % to 50 % zeros."""

        def make(path: Path) -> None:
            sparsities = list(np.linspace(0.99, 0.5, levels))
            elsa.pack(network(self.size), path, sparsities=sparsities)

        return self._once(f"levels-{levels}.safetensors", make)

    def bfloat16(self) -> Path:
        """The checkpoint in BF16, with half the bytes."""

        def make(path: Path) -> None:
            tensors = {n: a.astype(ml_dtypes.bfloat16) for n, a in network(self.size).items()}
            elsa.pack(tensors, path, sparsities=LEVELS)

        return self._once("bf16.safetensors", make)

    def counters(self, size: int | None = None) -> Path:
        """The paper's N for the dense checkpoint: a byte a weight."""
        size = size or self.size

        def make(path: Path) -> None:
            packed = elsa.open(self.elsa(size))
            with packed:
                tensors = packed.load()
                nested = {n: elsa.read_counters(tensors[n], packed.bits) for n in packed.nested}
            save_file(nested, path)

        return self._once(f"counters-{size}.safetensors", make)

    def levels(self) -> list[Path]:
        """Nested sparse checkpoints, and the dense one they are nested in last."""
        paths = []
        with elsa.open(self.elsa()) as file:
            for t in (1, 2, 3, "dense"):

                def make(path: Path, t: Any = t) -> None:
                    save_file(file.load(t), path)

                paths.append(self._once(f"level-{t}.safetensors", make))
        return paths

    def repeated(self, size: int) -> Path:
        """A file of any size with 16 tensors, so that two differ in size alone."""

        def make(path: Path) -> None:
            layer = packed_layer(size // 16)
            info = TensorInfo("", of_array(layer.dtype), (SIDE, layer.size // SIDE))
            infos = [TensorInfo(f"layer.{i:03}", info.dtype, info.shape) for i in range(16)]
            specs = [elsa.LevelSpec(f"{s}%") for s in LEVELS]
            names = [info.name for info in infos]
            contents = Contents(2, specs, frozenset(names), digests=False)
            with open_writer(path, [infos], contents) as writer:
                for name in names:
                    for start in range(0, layer.size, CHUNK):
                        writer.append(name, layer[start : start + CHUNK])
                writer.finish()

        return self._once(f"repeated-{size}.safetensors", make)

    def _once(self, name: str, make: Any) -> Path:
        if name not in self._made:
            path = self.path(name)
            with no_fsync():
                make(path)
            self._made[name] = path
        return self._made[name]


@cache
def weights(size: int) -> NDArray[np.float32]:
    """Random weights of this many bytes, none zero, as zeros cannot carry counters."""
    drawn = np.random.default_rng(0).standard_normal(size // 4, np.float32)
    drawn[drawn == 0] = 1
    return drawn


def network(size: int) -> dict[str, NDArray[Any]]:
    """Layers of 16 MiB, or four if that is less, and their biases."""
    tensors: dict[str, NDArray[Any]] = {}
    for i, layer in enumerate(np.split(weights(size), max(4, size >> 24))):
        tensors[f"layer.{i:02}/kernel"] = layer.reshape(SIDE, -1)
        tensors[f"layer.{i:02}/bias"] = np.zeros(SIDE, np.float32)
    return tensors


def packed_layer(size: int) -> NDArray[np.float32]:
    """Weights that carry random counters: 5, 10 and 20 % of them are kept."""
    chances = np.random.default_rng(1).random(size // 4, np.float32)
    counters = np.select([chances < 0.05, chances < 0.1, chances < 0.2], [1, 2, 3]).astype(np.uint8)
    return elsa.embed_counters(weights(size), counters, bits=2)


def aligned(size: int) -> NDArray[np.uint8]:
    """Fresh memory that starts on a cache line.

    Large arrays start 16 bytes into a page, and reading the start of a page of a file to there runs
    at a seventh of the speed on some processors (measured: 1.1 against 7 to 13 GiB/s on a Zen 3).
    A peer so handicapped would make any subject look good.
    """
    memory = np.empty(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size]


def chunked_read(path: Path) -> int:
    """Read a file through one reused buffer: the least that any streaming reader does."""
    buffer, total = aligned(CHUNK).data, 0
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            total += count
    return total


def chunked_copy(source: Path, target: Path, *, sync: bool = False) -> None:
    """Copy a file as `cp` without reflinks does."""
    view = aligned(CHUNK).data
    with open(source, "rb", buffering=0) as file, open(target, "wb", buffering=0) as out:
        while count := file.readinto(view):
            out.write(view[:count])
        if sync:
            os.fsync(out.fileno())
