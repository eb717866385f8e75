"""Read a network block by block, from whatever holds it: the one way from bytes to weights."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from elsa_format._closing import Closing
from elsa_format._container.arrays import as_array
from elsa_format._container.header import TensorInfo
from elsa_format._errors import ChecksumMismatch, TrailingData, Truncated
from elsa_format._layouts import FORMS
from elsa_format._level_network import LevelNetwork
from elsa_format._memory import BLOCK, aligned, give_block, take_block
from elsa_format._network import Network, Step
from elsa_format._storage import SpooledStorage, fill

Block = NDArray[np.uint8]


class LevelReader(Closing):
    """Tensors as blocks of their bytes, in constant memory; their checksums are compared.

    Blocks hold whole elements, and all but the last a multiple of 8 of them, so that a block starts
    on a byte of a bitmask. A stream gives its tensors in the order they are stored.
    """

    block = BLOCK
    """Bytes of a block."""

    def __init__(
        self,
        network: Network,
        level: int | None = None,
        *,
        only: TensorInfo | None = None,
        verify: bool = True,
        tick: Callable[[int], object] | None = None,
    ) -> None:
        """Get ready to read what a level needs, or the `only` tensor that is wanted of it."""
        self.network, self.name = network, network.name
        self._storage, checksums = network.view(level)
        self._checksums = checksums if verify else {}
        self._tick = tick
        header = network.header
        start = header.data_start + (only.start if only else 0)
        stop = header.data_start + (only.stop if only else header.data_size)
        if self._storage.size is None:
            stop = sys.maxsize  # what follows the last tensor must be seen, too
        self._data = self._storage.reader(start, stop)
        self._position = start
        self._buffer: Block | None = None

    def blocks(self, info: TensorInfo, into: Block | None = None) -> Iterator[Block]:
        """A stored tensor's bytes: parts of `into`, or else blocks that overwrite one another."""
        start = self.network.header.data_start + info.start
        if info.nbytes and self._position != start:
            self._data.seek(start)
            self._position = start
        checksum = xxhash.xxh3_64() if info.name in self._checksums else None
        if into is None and self._buffer is None and info.nbytes:
            self._buffer = take_block()
        for at in range(0, info.nbytes, self.block):
            size = min(info.nbytes - at, self.block)
            block = self._buffer[:size] if into is None else into[at : at + size]  # type: ignore[index]
            missing = fill(self._data, block.data)
            if missing:
                raise Truncated(
                    f"{self.name}: tensor {info.name!r} ends {info.nbytes - at - size + missing} "
                    f"bytes early, expected {info.nbytes}"
                )
            self._position += size
            if checksum:
                checksum.update(block.data)
                if at + size == info.nbytes:
                    self._compare(info, checksum)
            yield block
            if self._tick:
                self._tick(size)
        if checksum and not info.nbytes:
            self._compare(info, checksum)

    def level_blocks(
        self,
        step: Step,
        into: Block | None = None,
        look: Callable[[Block], object] | None = None,
    ) -> Iterator[Block]:
        """The same of a level: what it does not keep is zeroed, and what it keeps is counted.

        Each block can be looked at before.
        """
        mask = FORMS["dense"].encoder(step.nested) if step.nested else None
        for block in self.blocks(step.info, into):
            if look:
                look(block)
            if mask:
                mask.encode(block.view(step.info.dtype.words))
            yield block
        if mask:
            mask.finish()

    def array(self, step: Step, room: Block | None = None) -> NDArray[Any]:
        """A tensor of a level as an array, in memory of its size."""
        flat = self._room(step.info) if room is None else room
        for _ in self.level_blocks(step, flat):
            pass
        return as_array(flat, step.info, self.name)

    def _room(self, info: TensorInfo) -> Block:
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

    def _compare(self, info: TensorInfo, checksum: xxhash.xxh3_64) -> None:
        found, expected = f"xxh3:{checksum.hexdigest()}", self._checksums[info.name]
        if found != expected:
            raise ChecksumMismatch(
                f"{self.name}: tensor {info.name!r}: checksum {found}, expected {expected}"
            )

    def finish(self) -> None:
        """Check that nothing follows the last tensor, and that the input is what it was."""
        if self._storage.size is None and self._data.read(1):
            raise TrailingData(f"{self.name}: bytes follow the last tensor")
        self._storage.check_unchanged()

    def close(self) -> None:
        self._data.close()
        if self._buffer is not None:
            give_block(self._buffer)
            self._buffer = None  # it is another's now


def counted(network: Network) -> Network:
    """The network with what its levels keep: a level file in the dense layout is read for that."""
    if network.counted:
        return network
    assert isinstance(network, LevelNetwork)  # all others tell
    if network.storage.size is None:
        copy = SpooledStorage(network.storage, network.header.data_start)
        network = replace(network, storage=copy)
    kept = dict.fromkeys(network.profile.nested, 0)
    with LevelReader(network) as reader:
        for name in kept:
            info = network.header.tensors[name]
            for block in reader.blocks(info):
                kept[name] += int(np.count_nonzero(block.view(info.dtype.words)))
    return network.with_counts(kept)
