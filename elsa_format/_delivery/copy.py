"""One delivery file while it is fetched: an output that is a prefix of its source, and grows.

What the output holds is read under its lock. It is written when nothing can be refused any more.
"""

import contextlib
import os
from pathlib import Path

import xxhash

from elsa_format._container import LENGTH_BYTES, MAX_HEADER, read_header
from elsa_format._container.index import is_url
from elsa_format._delivery import Prefix, parse
from elsa_format._errors import (
    FormatError,
    Incomplete,
    InvalidIndex,
    OutputExists,
)
from elsa_format._options import Limit
from elsa_format._output.atomic import unfinished
from elsa_format._storage import PositionedStorage, Reader, Storage, open_storage, open_url
from elsa_format._storage.local import COPIED
from elsa_format._threads import Meter

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

FIRST = 8 << 10
"""Bytes of a first request: header and head of most files, and less than a level."""
_BINARY = getattr(os, "O_BINARY", 0)


class Copy(PositionedStorage):
    """A source, and the output that becomes a prefix of it.

    As a storage it has the header and head of the source, and the segments that are downloaded.
    """

    prefix: Prefix
    size: int

    def __init__(
        self, source: str | os.PathLike[str], path: Path, limit: Limit, *, force: bool
    ) -> None:
        self._limit = limit
        self.source, self.path = source, Path(os.path.realpath(path))
        self.output, self.name, self._force = os.fspath(path), "", force
        self.size = self.have = 0
        """Bytes that can be read here; bytes of the output that are a prefix of the source."""
        self.read = 0
        """Bytes of the source that were needed."""
        self._file, self._is_new, self._is_other = -1, False, False
        self._remote: Storage | None = None
        self._start = b""
        self._damaged: set[int] = set()

    def close(self) -> None:
        """Close both; an output that came into being here and holds nothing goes again."""
        if self._remote is not None:
            self._remote.close()
        if self._file >= 0:
            if self._is_new and not self.have and self._has_name():
                self.path.unlink(missing_ok=True)
            unfinished.discard(self.path)
            os.close(self._file)
            self._file = -1

    # --- Before anything is written ---------------------------------------------------------------

    def begin(self, *, shard: bool = False) -> None:
        """Lock the output, and compare what it holds with the header and head of the source."""
        local = self._lock()
        self._remote = self._open(len(local))
        self.name = self._remote.name
        header = read_header(self._remote.front(), self.name, self._limit)
        self.read += header.data_start
        if shard and header.kind != "delivery":
            raise InvalidIndex(
                f"{self.name}: is not a delivery file, as all shards of its index must be"
            )
        self._document = parse(header, self.name)
        self._document.check_end(self._remote.size, self.name)
        raw = len(header.raw).to_bytes(LENGTH_BYTES, "little") + header.raw
        if self.have > self._document.ends[-1] or raw[: len(local)] != local[: len(raw)]:
            if not self._force:
                raise OutputExists(
                    f"{self.output}: is not a prefix of {self.name}",
                    "{force} replaces it",
                    force=True,
                )
            self._is_other, self.have = True, 0
        self._start = raw + self._head()
        self._has(self.have)
        self.prefix = Prefix(self, header, self._limit)

    def _lock(self) -> bytes:
        """Lock the output if it exists; its length and its header are then read."""
        while self._file < 0:
            try:
                self._file = os.open(self.path, os.O_RDWR | _BINARY)
            except FileNotFoundError:
                return b""
            self._take()
            if not self._has_name():  # it was replaced or removed before it was locked
                os.close(self._file)
                self._file = -1
        self.have = os.fstat(self._file).st_size
        start = self._stored(0, LENGTH_BYTES)
        length = min(int.from_bytes(start, "little"), MAX_HEADER)
        return start + self._stored(LENGTH_BYTES, LENGTH_BYTES + length)

    def _take(self) -> None:
        if fcntl is None:
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self._in_use() from None

    def _in_use(self) -> OutputExists:
        return OutputExists(f"{self.output}: another process is fetching it; run again")

    def _has_name(self) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(self._file), os.stat(self.path))
        return False

    def _open(self, at_hand: int) -> Storage:
        if isinstance(self.source, str) and is_url(self.source):
            # Of what is downloaded already, the header comes once more, to compare.
            return open_url(self.source, max(at_hand, LENGTH_BYTES) if at_hand else FIRST)
        return open_storage(self.source)

    def _head(self) -> bytes:
        """The head: as far as the output has it, from there, unless that is damaged."""
        begin, stop = self._document.ends[:2]
        have = min(max(self.have, begin), stop)
        for start in dict.fromkeys((have, begin)):
            head = self._stored(begin, start) + self._download(start, stop)
            if f"xxh3:{xxhash.xxh3_64_hexdigest(head)}" == self._document.head:
                break
        return head

    def _stored(self, start: int, stop: int) -> bytes:
        """Bytes of the output."""
        if start >= stop:
            return b""
        os.lseek(self._file, start, os.SEEK_SET)
        return os.read(self._file, stop - start)

    def _download(self, start: int, stop: int) -> bytes:
        data = bytearray()
        with self._reader(start, stop) as reader:
            while start + len(data) < stop:
                data += self._receive(reader, start + len(data), stop)
        return bytes(data)

    def _reader(self, start: int, stop: int) -> Reader:
        assert self._remote is not None
        size = self._remote.size
        return self._remote.reader(start, stop if size is None else min(stop, size))

    def _receive(self, reader: Reader, start: int, stop: int) -> bytes:
        data = reader.read(min(stop - start, COPIED))
        if not data:
            raise Incomplete(f"{self.name}: ends at byte {start}, expected {stop}")
        self.read += len(data)
        return data

    # --- What there is ----------------------------------------------------------------------------

    def read_at(self, position: int, view: memoryview) -> int:
        """Fill as much of the buffer as one read gives from a position."""
        stop = position + len(view)
        start = self._start[position:stop]
        data = start or self._stored(position, min(stop, self.have))
        view[: len(data)] = data
        return len(data)

    def _has(self, have: int) -> None:
        self.have, self.size = have, max(have, len(self._start))

    @property
    def parts(self) -> int:
        """How many levels are downloaded; one more with the dense network."""
        return self._document.parts_in(self.have)

    @property
    def transferred(self) -> int:
        """Bytes that came from the source, those that nobody asked for included."""
        received: int = getattr(self._remote, "received", self.read)
        return received

    def missing(self, part: int) -> int:
        """Bytes that are to be downloaded up to the end of a part."""
        sizes = self._document.parts
        return max(self.prefix.end(part) - self.size, 0) + sum(sizes[n] for n in self._damaged)

    def takes(self, part: int) -> int:
        """The same, and what a server without ranges sends before that."""
        missing = self.missing(part)
        if missing and getattr(self._remote, "sends_all", False):
            missing += max(self.size - self.transferred, 0)
        return missing

    def check(self, part: int) -> None:
        """Find out what is to be downloaded again, and whether the source has what is missing."""
        for number in range(1, min(self.parts, part) + 1):
            if self._problem(number) is not None:
                self._damaged.add(number)
        assert self._remote is not None
        size, stop = self._remote.size, self.prefix.end(part)
        if size is not None and size < stop and (self._damaged or self.have < stop):
            raise Incomplete(f"{self.name}: ends at byte {size}, expected {stop}")

    def _problem(self, part: int) -> FormatError | None:
        """What is wrong with a part that is downloaded."""
        try:
            self.prefix.payloads(part, again=True).check()
        except FormatError as error:
            return error
        return None

    # --- Writing ----------------------------------------------------------------------------------

    def claim(self) -> None:
        """Have the output under its lock, if it did not exist: nothing is refused any more."""
        if self._file >= 0:
            return
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | _BINARY
            self._file = os.open(self.path, flags, 0o666)
        except FileExistsError:  # since `begin` looked
            raise self._in_use() from None
        self._take()
        self._is_new = True
        unfinished.add(self.path)

    def complete(self, part: int, meter: Meter) -> None:
        """Download what is missing or damaged, part by part."""
        self._write_start()
        before, ends = self.have, self._document.ends
        with self._reader(before, ends[part + 1]) as reader:
            for number in range(1, part + 1):
                start, stop = ends[number], ends[number + 1]
                if number in self._damaged:
                    self._complete_part(number, [start], stop, reader, meter)
                elif self.have < stop:
                    # What an earlier fetch left of it may be at fault, and is replaced then.
                    begins = sorted({self.have, start}, reverse=True)
                    self._complete_part(number, begins, stop, reader, meter)
        if before < self.have == ends[-1]:
            self._refuse_more()

    def _complete_part(
        self, number: int, begins: list[int], stop: int, reader: Reader, meter: Meter
    ) -> None:
        problem: FormatError | None = None
        for begin in begins:
            reader.seek(begin)
            at = begin
            while at < stop:
                data = self._receive(reader, at, stop)
                self._write(at, data)
                at += len(data)
                meter.tick(len(data))
            os.fsync(self._file)
            problem = self._problem(number)
            if problem is None:
                return
        if number not in self._damaged:  # then it was as long before
            self._cut(0 if self._is_new and number == 1 else begins[-1])
        assert problem is not None
        raise problem

    def _refuse_more(self) -> None:
        """Refuse bytes behind the last part, where only the end of the source tells its size."""
        assert self._remote is not None
        if self._remote.size is not None:
            return
        end = self._document.ends[-1]
        with self._remote.reader(end, end + 1) as reader:
            if reader.read(1):
                self._document.check_end(end + 1, self.name)

    def _write_start(self) -> None:
        """Have the header and the head in the output."""
        if self._is_other:
            os.truncate(self._file, 0)
        if self._stored(0, len(self._start)) != self._start:
            self._write(0, self._start)

    def _write(self, position: int, data: bytes) -> None:
        unfinished.discard(self.path)
        try:
            os.lseek(self._file, position, os.SEEK_SET)
            view = memoryview(data)
            while view:
                view = view[os.write(self._file, view) :]
        except OSError as error:
            raise OSError(error.errno, error.strerror, self.output) from None
        self._has(max(self.have, position + len(data)))

    def _cut(self, size: int) -> None:
        os.truncate(self._file, size)
        self._has(size)
