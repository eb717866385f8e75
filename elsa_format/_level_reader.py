"""Read a network block by block, from whatever holds it: the one way from bytes to weights."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from elsa_format._container import TensorInfo, as_array
from elsa_format._counters import NOT_ZERO
from elsa_format._digest import LevelDigests, compare_digest
from elsa_format._errors import ChecksumMismatch, Truncated
from elsa_format._layouts import LAYOUTS
from elsa_format._memory import BLOCK, aligned, give_block, take_block
from elsa_format._network import Network, PlannedTensor
from elsa_format._options import renamed
from elsa_format._profile import LevelNumber
from elsa_format._storage import Closing

if TYPE_CHECKING:  # to read a level needs no output
    from elsa_format._output import Output

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
        level: LevelNumber = "dense",
        *,
        only: TensorInfo | None = None,
        verify: bool = True,
        proof: "Proof | None" = None,
        on_bytes: Callable[[int], object] | None = None,
        problem: Callable[[ChecksumMismatch], object] | None = None,
        block: int | None = None,
        tick: Callable[[int], object] | None = None,
    ) -> None:
        """Get ready to read what a level needs, or the `only` tensor that is wanted of it.

        Who reads all tensors by one reader has them proven when it finishes. Several readers share
        a `proof`, finished when all of them are. A tensor whose checksum is wrong raises, unless
        somebody takes the `problem`. Blocks have so many bytes as `block` says.
        """
        self.network, self.name = network, network.name
        self._bytes = network.open(level, only)
        self._level, self._verify = level, verify
        self._proof = proof
        self._own_proof = proof is None and verify and only is None
        if self._own_proof:
            self._proof = Proof(network)
        if tick is not None:
            renamed("tick=", "on_bytes=")
        self._on_bytes, self._problem = on_bytes or tick, problem
        self._buffer: Block | None = None
        self.block = block or self.block

    def tensors(self) -> Iterator[PlannedTensor]:
        """All that the level needs, each to be read before the next; then as `finish`."""
        yield from self.network.plan(self._level)
        self.finish()

    def blocks(self, info: TensorInfo, into: Block | None = None) -> Iterator[Block]:
        """A stored tensor's bytes: parts of `into`, or else blocks that overwrite one another."""
        expected = self.network.checksum(info.name, self._level) if self._verify else None
        checksum = xxhash.xxh3_64() if expected else None
        if info.nbytes:
            source = self._bytes.seek(info)
            if into is None and self._buffer is None:
                self._buffer = take_block(self.block)
        for at in range(0, info.nbytes, self.block):
            size = min(info.nbytes - at, self.block)
            block = self._buffer[:size] if into is None else into[at : at + size]  # type: ignore[index]
            view = block.data
            while view and (count := source.readinto(view)):
                view = view[count:]
            if view:
                raise Truncated(
                    f"{self.name}: tensor {info.name!r} ends {info.nbytes - at - size + len(view)} "
                    f"bytes early, expected {info.nbytes}"
                )
            if checksum and expected:
                checksum.update(block.data)
                if at + size == info.nbytes:
                    self._compare(info, checksum, expected)
            if self._proof:
                self._proof.digests.take(info, block)
            yield block
            if self._on_bytes:
                self._on_bytes(size)
        if checksum and expected and not info.nbytes:
            self._compare(info, checksum, expected)
        if self._proof:
            self._proof.digests.end(info)

    def level_blocks(
        self,
        planned: PlannedTensor,
        into: Block | None = None,
        on_block: Callable[[Block], object] | None = None,
    ) -> Iterator[Block]:
        """The same of a level: what it does not keep is zeroed, and what it keeps is counted.

        Each block can be looked at before.
        """
        mask = LAYOUTS["dense"].encoder(planned.mask) if planned.mask else None
        for block in self.blocks(planned.info, into):
            if on_block:
                on_block(block)
            if mask:
                mask.encode(block.view(planned.info.dtype.words))
            yield block
        if mask:
            mask.finish()

    def array(self, planned: PlannedTensor, buffer: Block | None = None) -> NDArray[Any]:
        """A tensor of a level as an array, in memory of its size."""
        flat = self._buffer_for(planned.info) if buffer is None else buffer
        for _ in self.level_blocks(planned, flat):
            pass
        return as_array(flat, planned.info, self.name)

    def _buffer_for(self, info: TensorInfo) -> Block:
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

    def _compare(self, info: TensorInfo, checksum: xxhash.xxh3_64, expected: str) -> None:
        try:
            compare_checksum(self.name, info, checksum, expected)
        except ChecksumMismatch as error:
            if self._problem is None:
                raise
            self._problem(error)

    def finish(self) -> None:
        """See that nothing follows the last tensor, and that the input is what it was."""
        self._bytes.finish()
        self.network.check_unchanged()
        if self._own_proof and self._proof:
            self._proof.finish()

    def close(self) -> None:
        self._bytes.close()
        if self._buffer is not None:
            give_block(self._buffer)
            self._buffer = None  # it is another's now


def copy_data(
    file: Network,
    start: bytes,
    output: "Output",
    on_bytes: Callable[[int], object],
    *,
    verify: bool = True,
) -> None:
    """Write all stored tensors of a file, as they are, behind what is to come before them."""
    output.write_at(0, start)
    position = len(start)
    with LevelReader(file, verify=verify, on_bytes=on_bytes) as reader:
        for info in file.header.tensors.values():
            for block in reader.blocks(info):
                output.write_at(position, block)
                position += block.size
        reader.finish()


def compare_checksum(where: str, info: TensorInfo, checksum: xxhash.xxh3_64, expected: str) -> None:
    """Raise ChecksumMismatch unless a tensor's bytes have the checksum that is stated."""
    if (found := f"xxh3:{checksum.hexdigest()}") != expected:
        raise ChecksumMismatch(
            f"{where}: tensor {info.name!r}: checksum {found}, expected {expected}"
        )


class Proof:
    """What a level file states of its tensors, which has no checksums: computed as they are read.

    All others have checksums, and nothing is computed.
    """

    def __init__(self, network: Network, *, verify: bool = True) -> None:
        self._network, self._stated = network, network.digests if verify else ()
        if self._stated:
            self.digests = LevelDigests(NOT_ZERO, (NOT_ZERO,), network.profile.nested)

    def __bool__(self) -> bool:
        return bool(self._stated)

    def finish(self) -> int:
        """Raise DigestMismatch unless all that was read is what was stated; how much that was."""
        for names, digest in self._stated:
            (lines,) = self.digests.lines
            name = self._network.profile.levels[0].name
            compare_digest(self._network.name, name, digest, {n: lines[n] for n in names})
        return len(self._stated)


def prove(network: Network) -> None:
    """Read a level file for its digest alone; of others nothing."""
    if Proof(network):
        with LevelReader(network) as reader:
            for info in network.header.tensors.values():
                reader.skip(info)
            reader.finish()


def counted(network: Network) -> Network:
    """The network with what its levels keep: a level file in the dense layout is read for that."""
    if network.counted:
        return network
    network = network.rereadable()
    kept = dict.fromkeys(network.profile.nested, 0)
    with LevelReader(network, verify=False) as reader:
        for name in kept:
            info = network.header.tensors[name]
            for block in reader.blocks(info):
                kept[name] += int(np.count_nonzero(block.view(info.dtype.words)))
    return network.with_counts(kept)
