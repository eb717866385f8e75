"""Bring the first bytes of a delivery file, and later the bytes that follow them.

What is kept is at every moment the beginning of the server's file: a fetch that was cut, and an
upgrade, ask for what follows. Parts are compared with their checksums when they are complete.
"""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from elsa_format._choose import choose_level
from elsa_format._container.header import LENGTH_BYTES, MAX_HEADER, read_exactly
from elsa_format._container.header import parse as parse_header
from elsa_format._container.index import is_index, is_url
from elsa_format._container.index import parse as parse_index
from elsa_format._delivery import document as _document
from elsa_format._delivery.folder import Folder, SideFile, is_folder, missing
from elsa_format._delivery.payloads import CHECKSUM, Payloads
from elsa_format._delivery.prefix import COPIED, Prefix
from elsa_format._errors import (
    FormatError,
    Incomplete,
    InvalidOption,
    NoSuchLevel,
    OutputExists,
    Truncated,
)
from elsa_format._network import Network
from elsa_format._options import whole
from elsa_format._output import is_special, localized
from elsa_format._output.atomic import new_folders
from elsa_format._output.directory import names_directory, refuse_others
from elsa_format._profile import LevelLike, LevelNumber
from elsa_format._storage import Reader, Storage, open_storage, open_url
from elsa_format._storage.local import FileStorage
from elsa_format._storage.shards import shard_source
from elsa_format._threads import Meter, Progress, no_progress
from elsa_format.levels import Sparsity

if TYPE_CHECKING:
    from elsa_format._output.mirror import Mirror

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


@dataclass(frozen=True)
class FetchReport:
    """What is there now, and what it took.

    >>> fetch("net.ship.safetensors", "device.ship.safetensors", level=1).level
    1
    """

    level: LevelNumber
    """The level that was asked for; denser ones may be there."""
    size: int
    """Bytes that are kept."""
    fetched: int
    """Bytes that were brought for it."""


def fetch(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    level: LevelLike | None = None,
    sparsity: Sparsity | None = None,
    max_size: int | None = None,
    upgrade: LevelLike | None = None,
    force: bool = False,
    progress: Progress = no_progress,
) -> FetchReport:
    """Bring the bytes of a level of a delivery file that are not there yet.

    `out` becomes the beginning of the file, or goes on where it ends. `max_size` is for the bytes
    to bring; `upgrade` is `level` for what must be there already. Of an index (.index.json) the
    files of all shards are brought, beside `out`. A model directory, here or at a URL that ends in
    a slash, is brought into a directory, its side files first: at a URL it has the list of them
    that `ship` writes, `elsa-files.json`. In a store, such as `s3://bucket/net.ship.safetensors`,
    `out` is replaced when all of it is there.

    >>> first = fetch("net.ship.safetensors", "phone.ship.safetensors", sparsity=95)
    >>> more = fetch("net.ship.safetensors", "phone.ship.safetensors", upgrade=2)
    >>> first.level, more.level, more.size > first.size
    (1, 2, True)
    """
    wishes = (level, sparsity, max_size, upgrade)
    if sum(wish is not None for wish in wishes) != 1:
        raise TypeError("give exactly one of level, sparsity, max_size, upgrade")
    folder, side, target = None, list[SideFile](), localized(os.fspath(out))
    if is_folder(source):
        folder = Folder(source)
        source = folder.weights
    into = folder is not None and names_directory(target)
    if not into and is_index(source) != is_index(target):
        raise InvalidOption("an index is fetched to an index, and a file to a file")
    if not is_url(source) and is_special(source):
        raise InvalidOption(f"{os.fspath(source)}: a pipe cannot be gone on with")
    if is_special(target):
        raise InvalidOption(f"{target}: bytes are kept in a file, which grows")
    with contextlib.ExitStack() as stack:
        mirror = _mirror(target, into, stack) if is_url(target) else None
        path = mirror.path if mirror else Path(target)
        if folder is not None and into:
            side = folder.side_files(path)
            path = path / folder.weights_name
            refuse_others(target if mirror else path.parent, path.name)
        places: list[tuple[str | os.PathLike[str], Path]] = [(source, path)]
        files = [file.path for file in side]
        if is_index(source):
            index, places = _shards(source, path)
            side.append(index)
        files += [place for _, place in places]
        if is_index(source):
            files.append(path)
        if mirror:
            mirror.bring(files)
        if upgrade is not None and not path.exists():
            raise InvalidOption(f"{path}: is not there, and cannot be upgraded")
        wanted = missing(side, (path for _, path in places), force=force)
        extra = sum(file.entry.size for file in wanted)
        if folder is not None:
            stack.enter_context(new_folders(path.parent))
        copies = [stack.enter_context(_Copy(where, path, force)) for where, path in places]
        prefixes = [copy.begin() for copy in copies]
        try:
            level = level if upgrade is None else upgrade
            part = _choose(prefixes, copies, extra, level, sparsity, max_size)
        except (InvalidOption, Incomplete):
            for copy in copies:
                copy.forget()
            raise
        for copy in copies:
            copy.check(part)
        meter = Meter(progress, extra + sum(copy.missing(part) for copy in copies))
        for file in wanted:  # first: where a level is, all that goes with it is, too
            file.bring(meter, force=force)
        for copy in copies:
            copy.complete(part, meter)
        if mirror:
            mirror.send(files, progress)
        number: LevelNumber = part if part <= prefixes[0].levels else "dense"
        size = sum(file.entry.size for file in side) + sum(copy.have for copy in copies)
        return FetchReport(number, size, extra + sum(copy.fetched for copy in copies))


def _mirror(url: str, folder: bool, stack: contextlib.ExitStack) -> "Mirror":
    from elsa_format._output.mirror import Mirror  # only where there are stores

    return stack.enter_context(Mirror(url, folder=folder))


def _choose(
    prefixes: list[Prefix],
    copies: list["_Copy"],
    extra: int,
    level: LevelLike | None,
    sparsity: Sparsity | None,
    max_size: int | None,
) -> int:
    """The last part to bring; `extra` bytes come with it."""
    first = prefixes[0]
    if max_size is None:
        network = Network(first.storage, first.header, first.profile)
        number = choose_level(network, level=level, sparsity=sparsity)
        return first.levels + 1 if number is None else number
    max_size, brought = whole("max_size", max_size, low=0), sum(copy.fetched for copy in copies)

    def takes(part: int) -> int:
        """Bytes that are brought for a part, with those that have been: headers and heads."""
        lacking = extra + sum(copy.missing(part) for copy in copies)
        return brought + lacking if lacking else 0

    for part in range(first.levels + 1, 0, -1):
        if takes(part) <= max_size:
            return part
    raise NoSuchLevel(
        f"{copies[0].where}: no level takes {max_size} bytes or less; level 1 takes {takes(1)}"
    )


def _shards(
    source: str | os.PathLike[str], out: Path
) -> tuple[SideFile, list[tuple[str | os.PathLike[str], Path]]]:
    """The index, and its files and where they go."""
    with (
        contextlib.closing(open_storage(source)) as storage,
        # Not the front, which ends where the header of a file would.
        contextlib.closing(storage.reader(0, storage.size or MAX_HEADER)) as reader,
    ):
        raw = read_exactly(reader, MAX_HEADER)
    index = parse_index(raw, storage.name)
    places = [(_shard(source, name), out.parent / name) for name in index.files]
    return SideFile.of(out, raw, storage.name), places


def _shard(index: str | os.PathLike[str], name: str) -> str | os.PathLike[str]:
    """A file beside an index, which must not lead elsewhere."""
    found = shard_source(index, name)
    assert isinstance(found, str | os.PathLike)
    return found


class _Copy:
    """The first bytes of one file, which grow in place."""

    def __init__(self, source: str | os.PathLike[str], path: Path, force: bool) -> None:
        self.source, self.path = source, Path(os.path.realpath(path))
        self.name, self.force = os.fspath(path), force
        self.have = self.fetched = 0
        self._earlier = 0
        self._file = -1
        self._created = False
        self._storage: Storage | None = None
        self._prefix: Prefix | None = None
        self._document: _document.Document

    def __enter__(self) -> "_Copy":
        return self

    def __exit__(self, *error: object) -> None:
        if self._prefix is not None:
            self._prefix.close()
        if self._storage is not None:
            self._storage.close()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def begin(self) -> Prefix:
        """Have the header and the head of the file, and see that it is the one that is there."""
        local = self._local_header()
        self._storage = self._open(len(local))
        self.where = self._storage.name
        header = self._remote_header(self._storage)
        parsed = parse_header(header[LENGTH_BYTES:], self._storage.name)
        self._document = _document.parse(parsed, self._storage.name)
        if local:
            self.fetched += len(header)
        if self.have > self._document.ends[-1] or header[: len(local)] != local[: len(header)]:
            if not self.force:
                raise OutputExists(
                    f"{self.name}: is not the beginning of {self._storage.name}",
                    "{force} replaces it",
                    force=True,
                )
            self.have = 0
        self._earlier = self.have
        self._open_file()
        try:
            return self._head()
        except FormatError:
            self.forget()
            raise

    def _local_header(self) -> bytes:
        try:
            with self.path.open("rb") as file:
                self.have = os.fstat(file.fileno()).st_size
                start = file.read(LENGTH_BYTES)
                return start + file.read(min(int.from_bytes(start, "little"), MAX_HEADER))
        except FileNotFoundError:
            return b""

    def _open(self, at_hand: int) -> Storage:
        if at_hand and isinstance(self.source, str) and is_url(self.source):
            # The header alone is brought once more, to compare.
            return open_url(self.source, max(at_hand, LENGTH_BYTES))
        return open_storage(self.source)

    @staticmethod
    def _remote_header(storage: Storage) -> bytes:
        front = storage.front()
        start = read_exactly(front, LENGTH_BYTES)
        length = int.from_bytes(start, "little")
        if len(start) < LENGTH_BYTES or length > MAX_HEADER:
            raise Truncated(f"{storage.name}: is not a delivery file")
        raw = read_exactly(front, length)
        if len(raw) < length:
            raise Truncated(f"{storage.name}: header of {length} bytes ends after {len(raw)}")
        return start + raw

    def _open_file(self) -> None:
        self._created = not self.path.exists()
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0)
        self._file = os.open(self.path, flags, 0o666)
        if fcntl is not None:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._created = False
                raise OutputExists(f"{self.name}: another process is fetching it") from None
        self._cut(self.have)

    def _head(self) -> Prefix:
        """The header and the head, brought again if what is there is not right."""
        for attempt in range(2):
            with contextlib.closing(self._along(self._document.ends[1])) as reader:
                self._extend(self._document.ends[1], reader)
            try:
                return self._reopen()
            except FormatError:
                if attempt or not self._earlier:
                    raise
                self._cut(0)
        raise AssertionError

    def _reopen(self) -> Prefix:
        if self._prefix is not None:
            self._prefix.close()
        self._prefix = Prefix(FileStorage(self.path))
        return self._prefix

    def forget(self) -> None:
        """Leave nothing, if nothing was there before."""
        if self._created:
            self.path.unlink(missing_ok=True)

    def missing(self, part: int) -> int:
        """Bytes that are to be brought up to the end of a part."""
        return max(self._document.ends[part + 1] - self.have, 0)

    def check(self, part: int) -> None:
        """Keep, of what is there, the parts that have their checksums."""
        prefix = self._reopen()
        for number in range(1, min(prefix.parts, part) + 1):
            try:
                _compare(prefix.payloads(number))
            except FormatError:
                self._cut(self._document.ends[number])
                break

    def complete(self, part: int, meter: Meter) -> None:
        """Bring what is missing, part by part."""
        ends = self._document.ends
        if self._earlier >= ends[part + 1]:
            return
        with contextlib.closing(self._along(ends[part + 1])) as reader:
            for number in range(1, part + 1):
                if self._earlier >= ends[number + 1]:
                    continue  # compared by `check`
                for attempt in range(2):
                    before = self._earlier
                    self._extend(ends[number + 1], reader, meter)
                    os.fsync(self._file)
                    try:
                        _compare(self._reopen().payloads(number))
                        break
                    except FormatError:
                        self._cut(ends[number])
                        # What an earlier fetch left of it may be at fault, and is brought again.
                        if attempt or before <= ends[number]:
                            raise
                        reader.seek(self.have)

    def _along(self, stop: int) -> Reader:
        """What follows, up to `stop`, as far as there is so much."""
        assert self._storage is not None
        size = self._storage.size
        return self._storage.reader(self.have, stop if size is None else min(stop, size))

    def _extend(self, stop: int, reader: Reader, meter: Meter | None = None) -> None:
        while self.have < stop:
            data = reader.read(min(stop - self.have, COPIED))
            if not data:
                raise Incomplete(f"{self.where}: ends at byte {self.have}, expected {stop}")
            self._write(data)
            if meter is not None:
                meter.tick(len(data))

    def _write(self, data: bytes) -> None:
        try:
            os.lseek(self._file, self.have, os.SEEK_SET)
            view = memoryview(data)
            while view:
                view = view[os.write(self._file, view) :]
        except OSError as error:
            raise OSError(error.errno, error.strerror, self.name) from None
        self.have += len(data)
        self.fetched += len(data)

    def _cut(self, size: int) -> None:
        os.truncate(self._file, size)
        self.have = size
        self._earlier = min(self._earlier, size)


def _compare(payloads: Payloads) -> None:
    """Compare the checksums of all payloads of a part."""
    for number in range(payloads.count):
        payloads.read(number, np.empty(CHECKSUM + payloads.size(number), np.uint8))
