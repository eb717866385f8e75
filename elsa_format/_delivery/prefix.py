"""What there is of a delivery file: its two headers and the parts that are complete."""

import os
import sys
import tempfile
import zlib
from _thread import allocate_lock

import xxhash

from elsa_format import _profile
from elsa_format._container import LENGTH_BYTES, Header, Readable
from elsa_format._container import parse as parse_header
from elsa_format._delivery import document as _document
from elsa_format._delivery.payloads import Payloads, read_at
from elsa_format._delivery.sequences import BlockPlan
from elsa_format._errors import ChecksumMismatch, Incomplete, InvalidDelivery
from elsa_format._options import Limit
from elsa_format._profile import LevelNumber, Profile
from elsa_format._storage import PositionedStorage, Reader, Storage, Window
from elsa_format._storage.local import StreamStorage

COPIED = 1 << 18
"""Bytes taken from a connection or a pipe at a time."""


class Growing(StreamStorage):
    """The first bytes of what is read front to back, a pipe or a URL, kept in a temporary file.

    A level needs bytes of several places for each block; and an upgrade all that came before.
    """

    def __init__(self, upstream: Storage, start: int = 0) -> None:
        """Keep what comes from `start` on; what was before is known."""
        self._upstream, self._offset = upstream, start
        file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - see close
        super().__init__(file, upstream.name)
        self.have = start
        self.size: int | None = upstream.size  # type: ignore[assignment]

    def renew(self) -> None:
        """Be unlocked, and not growing."""
        super().renew()
        self._growth = allocate_lock()

    def keep(self, stop: int) -> int:
        """Have the bytes up to `stop`, or as many as there are; how many there are."""
        with self._growth:
            if self.have >= stop:
                return self.have
            with self._upstream.reader(self.have, stop) as reader:
                while self.have < stop and (data := reader.read(min(stop - self.have, COPIED))):
                    self._write(self.have - self._offset, memoryview(data))
                    self.have += len(data)
            if self.have < stop and self.size is None:
                self.size = self.have
            return self.have

    def _write(self, position: int, view: memoryview) -> None:
        while view:
            if hasattr(os, "pwrite"):  # a forked child shares the position
                done = os.pwrite(self._stream.fileno(), view, position)
            else:
                with self._lock:
                    self._stream.seek(position)
                    done = self._stream.write(view)
            view, position = view[done:], position + done

    def front(self) -> Readable:
        """Read from the front."""
        return _Front(self)

    def reader(self, start: int, stop: int) -> Reader:
        """Read along a range."""
        return Window(self, start, min(stop, self.keep(stop)))

    def check_unchanged(self, *, grows: bool = False) -> None:
        """Ask where the bytes come from."""
        self._upstream.check_unchanged(grows=grows)

    def close(self) -> None:
        """Forget them."""
        self._stream.close()
        self._upstream.close()


class _Front:
    """The first bytes of a growing file, no more of them than are asked for."""

    def __init__(self, storage: Growing) -> None:
        self._storage, self._position = storage, 0

    def read(self, size: int, /) -> bytes:
        start = self._position
        with self._storage.reader(start, start + size) as reader:
            data = reader.read(size)
        self._position += len(data)
        return data


class Prefix:
    """A delivery file, or its first bytes; what has been checked is of lines 1 to 8 of §10."""

    def __init__(self, storage: PositionedStorage, header: Header, limit: Limit) -> None:
        self.storage, self.name = storage, storage.name
        self.document = _document.parse(header, self.name)
        ends = self.document.ends
        self.document.check_end(storage.size, self.name)
        if (found := self._length(ends[1])) < ends[1]:
            raise Incomplete(f"{self.name}: {found} bytes, its head ends at {ends[1]}")
        limit.header(self.document.source, self.name)
        self.head = self._read_head(ends[0], ends[1])
        """The source's first bytes: header length and header."""
        self.header: Header = parse_header(self.head[LENGTH_BYTES:], self.name)
        limit.tensors(self.header.data_size, self.name)
        self.profile: Profile = _profile.parse(self.header, self.name)
        self.levels = len(self.profile.levels)
        if self.levels != self.document.levels:
            raise InvalidDelivery(
                f"{self.name}: parts of {self.document.levels} levels, the source has {self.levels}"
            )
        self.plan = BlockPlan(self.header, self.profile, self.document.block)
        self._seed = xxhash.xxh3_64_intdigest(self.head)
        self._payloads: dict[int, Payloads] = {}

    def _length(self, wanted: int) -> int:
        """How many of the first `wanted` bytes there are, in one request if they come from afar."""
        if isinstance(self.storage, Growing):
            return self.storage.keep(wanted)
        assert self.storage.size is not None
        return min(wanted, self.storage.size)

    def _read_head(self, start: int, stop: int) -> bytes:
        data = bytearray(stop - start)
        read_at(self.storage, start, memoryview(data))
        if (found := f"xxh3:{xxhash.xxh3_64_hexdigest(data)}") != self.document.head:
            raise ChecksumMismatch(
                f"{self.name}: head has checksum {found}, expected {self.document.head}"
            )
        size, stream = self.document.source, zlib.decompressobj()
        try:
            head = stream.decompress(data, size + 1)  # one more than allowed is enough to know
        except zlib.error as error:
            raise InvalidDelivery(f"{self.name}: head: {error}") from None
        if len(head) != size or not stream.eof or stream.unused_data:
            raise InvalidDelivery(f"{self.name}: head is not a zlib stream of {size} bytes")
        if int.from_bytes(head[:LENGTH_BYTES], "little") != size - LENGTH_BYTES:
            raise InvalidDelivery(f"{self.name}: the head has another length than {size}")
        return head

    @property
    def parts(self) -> int:
        """How many of parts 1…T and the dense part are complete: the levels there, at most T.

        Where nobody says how long the file is, all of it has to be read to know.
        """
        size = self.storage.size
        return self.document.parts_in(self._length(sys.maxsize) if size is None else size)

    def part(self, level: LevelNumber) -> int:
        """The last part that a level needs."""
        return self.levels + 1 if level == "dense" else level

    def end(self, part: int) -> int:
        """Where a part ends in the file: how many bytes its level needs."""
        return self.document.ends[part + 1]

    def need(self, part: int) -> None:
        """Raise Incomplete unless a part, and with it all before it, is there."""
        if self._length(self.end(part)) < self.end(part):
            there = self.parts
            levels = "no level" if not there else f"level {there}" if there > 1 else "level 1"
            raise Incomplete(
                f"{self.name}: has {levels}; level "
                f"{part if part <= self.levels else 'dense'} ends at byte {self.end(part)}",
                "{fetch()} brings more of it",
            )

    def check_indexes(self, part: int) -> None:
        """Compare the blocks of a part, and of all before it, with the bytes that they have.

        Whoever makes arrays of a level does so first: a header may declare far more than there is.
        """
        self.need(part)
        for number in range(1, part + 1):
            self.payloads(number)

    def payloads(self, part: int, *, again: bool = False) -> Payloads:
        """The payloads of a part, whose index is read once, or `again` as it is now."""
        if again or part not in self._payloads:
            self.need(part)
            self._payloads[part] = Payloads(
                self.storage,
                self.document.ends[part],
                self.document.ends[part + 1],
                self.plan.of_part(part),
                self._seed,
            )
        return self._payloads[part]

    def close(self) -> None:
        """Close the file."""
        self.storage.close()
