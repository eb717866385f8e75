"""Read a file front to back in blocks, from anything that can be read (spec §8.3)."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from elsa_format import _profile
from elsa_format._errors import (
    ChecksumMismatch,
    InputChanged,
    TrailingData,
    Truncated,
    UnknownDtype,
    UnsupportedFeature,
)
from elsa_format._header import Header, Readable, TensorInfo, read_header
from elsa_format._profile import Profile

Source = str | os.PathLike[str] | IO[bytes]
"""A path, or a readable binary stream, which need not seek."""

Progress = Callable[[int, int], object]
"""Told how many bytes are done, of how many."""

BLOCK = 1 << 20
"""Bytes read at a time, a multiple of 64: large for few calls, small to stay in the cache."""


def ignore(done: int, total: int) -> None:
    """Show no progress."""


@dataclass(frozen=True)
class OpenSource:
    """A source being read, with a name for messages."""

    stream: Readable
    name: str
    size: int | None
    """Bytes in all, where that is known before reading."""


@contextlib.contextmanager
def open_source(source: Source) -> Iterator[OpenSource]:
    """Open a path (unbuffered: blocks are large) or take a stream as it is."""
    if not isinstance(source, str | os.PathLike):
        yield OpenSource(source, stream_name(source), None)
        return
    with open(source, "rb", buffering=0) as file:
        before = os.fstat(file.fileno())
        regular = os.path.isfile(source)
        yield OpenSource(file, os.fspath(source), before.st_size if regular else None)
        after = os.fstat(file.fileno())
        if regular and (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
            raise InputChanged(f"{os.fspath(source)}: changed while it was read; run again")


def stream_name(stream: IO[bytes]) -> str:
    """A name for messages."""
    if stream is getattr(sys.stdin, "buffer", None):
        return "<stdin>"
    name = getattr(stream, "name", None)
    return name if isinstance(name, str) else "<stream>"


def check_size(header: Header, size: int | None, where: str) -> None:
    """Compare a known file size with what the header declares."""
    expected = header.data_start + header.data_size
    if size is not None and size < expected:
        raise Truncated(f"{where}: {size} bytes, expected {expected}")
    if size is not None and size > expected:
        raise TrailingData(f"{where}: {size} bytes, expected {expected}")


class Checksum:
    """Compares a tensor's bytes with the checksum the profile gives, if it gives one."""

    def __init__(self, profile: Profile | None, name: str, where: str) -> None:
        self.expected = profile.checksums.get(name) if profile else None
        self.hash = xxhash.xxh3_64() if self.expected else None
        self.message = f"{where}: tensor {name!r}"

    def update(self, block: Any) -> None:
        """Take the next bytes."""
        if self.hash is not None:
            self.hash.update(block)

    def finish(self) -> None:
        """Raise ChecksumMismatch unless the bytes were the right ones."""
        if self.hash is None:
            return
        found = f"xxh3:{self.hash.hexdigest()}"
        if found != self.expected:
            raise ChecksumMismatch(f"{self.message}: checksum {found}, expected {self.expected}")


class BlockReader:
    """The data section as blocks, one tensor after the other, in constant memory."""

    def __init__(
        self,
        source: OpenSource,
        header: Header,
        profile: Profile | None,
        *,
        progress: Progress = ignore,
    ) -> None:
        check_size(header, source.size, source.name)
        self.source = source
        self.profile = profile
        self.progress = progress
        self._done, self._total = 0, header.data_size
        self._readinto: Callable[[Any], int | None] = getattr(
            source.stream, "readinto", self._read_and_copy
        )
        self._buffer = np.empty(BLOCK, np.uint8)

    def blocks(self, info: TensorInfo) -> Iterator[NDArray[np.uint8]]:
        """The tensor's bytes; each block is overwritten by the next.

        Tensors must be asked for in the order they are stored. Blocks hold whole elements, and all
        but the last a multiple of 8 of them, so that a block starts on a byte of a bitmask.
        """
        checksum = Checksum(self.profile, info.name, self.source.name)
        left = info.nbytes
        while left:
            block = self._buffer[: min(left, self._buffer.size)]
            self._fill(block, info, left)
            checksum.update(block.data)
            left -= block.size
            if not left:
                checksum.finish()
            yield block
            self._done += block.size
            self.progress(self._done, self._total)
        if not info.nbytes:
            checksum.finish()

    def room(self, info: TensorInfo) -> NDArray[np.uint8]:
        """Memory for a whole tensor."""
        try:
            return np.empty(info.nbytes, np.uint8)
        except MemoryError:
            # A stream that does not hold what it declares is Truncated, however much that is.
            for _ in self.blocks(info):
                pass
            raise

    def finish(self) -> None:
        """Check that nothing follows the last tensor."""
        if self.source.size is None and self.source.stream.read(1):
            raise TrailingData(f"{self.source.name}: bytes follow the last tensor")

    def _fill(self, block: NDArray[np.uint8], info: TensorInfo, left: int) -> None:
        view = block.data
        while view:
            count = self._readinto(view)
            if not count:
                missing = left - (block.size - len(view))
                raise Truncated(
                    f"{self.source.name}: tensor {info.name!r} ends {missing} bytes early, "
                    f"expected {info.nbytes}"
                )
            view = view[count:]

    def _read_and_copy(self, view: memoryview) -> int:
        data = self.source.stream.read(len(view)) or b""
        view[: len(data)] = data
        return len(data)


def read_profile(source: OpenSource) -> tuple[Header, Profile]:
    """The header and profile at the front of a source."""
    header = read_header(source.stream, source.name)
    return header, _profile.parse(header, source.name)


def as_array(flat: NDArray[np.uint8], info: TensorInfo, where: str) -> NDArray[Any]:
    """Bytes as an array of the tensor's dtype and shape."""
    if info.dtype.numpy is None:
        raise UnknownDtype(f"{where}: tensor {info.name!r}: numpy has no dtype {info.dtype.name}")
    try:
        return flat.view(info.dtype.numpy).reshape(info.shape)
    except ValueError:
        raise UnsupportedFeature(
            f"{where}: tensor {info.name!r}: numpy has no arrays of {len(info.shape)} dimensions"
        ) from None
