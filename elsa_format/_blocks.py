"""Read a file front to back in blocks, from anything that can be read (spec §2.2)."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from elsa_format import _profile
from elsa_format._errors import (
    ChecksumMismatch,
    TrailingData,
    Truncated,
    UnknownDtype,
    UnsupportedFeature,
)
from elsa_format._header import Header, Readable, TensorInfo, check_size, read_header
from elsa_format._index import is_index
from elsa_format._memory import BLOCK, aligned, give_block, take_block
from elsa_format._profile import Profile
from elsa_format._shards import Shard, Shards, open_elsa_shards
from elsa_format._storage import InputFile, Source, is_url, open_storage, stream_name
from elsa_format._threads import Meter

__all__ = [
    "BlockReader",
    "Checksum",
    "OpenSource",
    "Progress",
    "Source",
    "Track",
    "as_array",
    "check_size",
    "ignore",
    "open_source",
    "read_profile",
    "tracks",
]

Progress = Callable[[int, int], object]
"""Told how many bytes are done, of how many."""


def ignore(done: int, total: int) -> None:
    """Show no progress."""


@dataclass(frozen=True)
class OpenSource:
    """A source being read, with a name for messages."""

    stream: Readable
    name: str
    size: int | None
    """Bytes in all, where that is known before reading."""
    shards: Shards | None = None
    profile: Profile | None = None
    """Of all shards, where there are several; `stream` is then at the first byte of data."""
    check_unchanged: Callable[[], None] = lambda: None
    """Raises InputChanged if what was read may not have been one and the same file."""


@contextlib.contextmanager
def open_source(source: Source) -> Iterator[OpenSource]:
    """Open a path (unbuffered: blocks are large), an index or a URL, or take a stream as it is."""
    if not isinstance(source, str | os.PathLike):
        yield OpenSource(source, stream_name(source), None)
    elif is_index(source):
        shards, profile = open_elsa_shards(source)
        check = shards.check_unchanged
        with (
            contextlib.closing(shards),
            contextlib.closing(shards.reader(shards.header.data_start, shards.size)) as data,
        ):
            yield OpenSource(data, shards.name, shards.size, shards, profile, check)
    elif is_url(source):
        with contextlib.closing(open_storage(source)) as storage:
            end = sys.maxsize if storage.size is None else storage.size
            with contextlib.closing(storage.reader(0, end)) as stream:
                yield OpenSource(stream, storage.name, storage.size)
    else:
        with InputFile(source) as file:
            size = os.fstat(file.fileno()).st_size if os.path.isfile(source) else None
            check = file.check_unchanged
            yield OpenSource(file, os.fspath(source), size, check_unchanged=check)


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
        self._buffer = take_block()

    def blocks(
        self, info: TensorInfo, into: NDArray[np.uint8] | None = None
    ) -> Iterator[NDArray[np.uint8]]:
        """The tensor's bytes: parts of `into`, or else each block is overwritten by the next.

        Tensors must be asked for in the order they are stored. Blocks hold whole elements, and all
        but the last a multiple of 8 of them, so that a block starts on a byte of a bitmask.
        """
        checksum = Checksum(self.profile, info.name, self.source.name)
        left = info.nbytes
        while left:
            start = 0 if into is None else info.nbytes - left
            block = (self._buffer if into is None else into)[start : start + min(left, BLOCK)]
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
            return aligned(info.nbytes)
        except MemoryError:
            # A stream that does not hold what it declares is Truncated, however much that is.
            self.skip(info)
            raise

    def skip(self, info: TensorInfo) -> None:
        """Read a tensor for its checksum alone, and because a pipe cannot skip."""
        for _ in self.blocks(info):
            pass

    def finish(self) -> None:
        """Check that nothing follows the last tensor, and that the input is what it was."""
        if self.source.size is None and self.source.stream.read(1):
            raise TrailingData(f"{self.source.name}: bytes follow the last tensor")
        self.source.check_unchanged()
        give_block(self._buffer)
        del self._buffer  # it is another's now

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


@dataclass(frozen=True)
class Track:
    """Tensors that are read one after the other; tracks can be read at the same time."""

    tensors: tuple[TensorInfo, ...]
    open: Callable[[], contextlib.AbstractContextManager[BlockReader]]


def tracks(
    source: OpenSource, header: Header, profile: Profile | None, meter: Meter
) -> list[Track]:
    """A track for each shard, or one for a file."""
    check_size(header, source.size, source.name)

    def whole() -> BlockReader:
        return BlockReader(source, header, profile, progress=_steps(meter))

    @contextlib.contextmanager
    def one(shard: Shard) -> Iterator[BlockReader]:
        with contextlib.closing(shard.data()) as data:
            check = shard.storage.check_unchanged
            opened = OpenSource(data, shard.storage.name, None, check_unchanged=check)
            yield BlockReader(opened, shard.header, profile, progress=_steps(meter))

    if source.shards is None:
        return [Track(tuple(header.tensors.values()), lambda: contextlib.nullcontext(whole()))]
    return [
        Track(tuple(shard.header.tensors.values()), partial(one, shard))
        for shard in source.shards.shards
    ]


def _steps(meter: Meter) -> Progress:
    """What a reader did since it last told."""
    before = 0

    def told(done: int, total: int) -> None:
        nonlocal before
        before, step = done, done - before
        meter.tick(step)

    return told


def read_profile(source: OpenSource) -> tuple[Header, Profile]:
    """The header and profile of a source."""
    if source.shards is not None and source.profile is not None:
        return source.shards.header, source.profile
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
