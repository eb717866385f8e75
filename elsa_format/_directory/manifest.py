"""The manifest of a model directory, and fetching by it: side files, which appear whole.

HTTP has no lists of files, so `elsa-ship` writes one (delivery specification §9.1):

{"files": {"config.json": {"sha256": "…", "size": 570}},
 "version": "1.0", "weights": "model.ship.safetensors"}
"""

import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from elsa_format._container.index import is_url, shown
from elsa_format._container.json import check_version, dump, is_text, parse_document
from elsa_format._directory import MANIFEST, is_directory, is_weights, side_files, weights_file
from elsa_format._errors import (
    ChecksumMismatch,
    InvalidIndex,
    InvalidJson,
    InvalidOption,
    OutputExists,
    RemoteError,
    TooLarge,
    UnsafePath,
)
from elsa_format._options import Limit
from elsa_format._output import Transaction
from elsa_format._storage import Storage, open_storage
from elsa_format._storage.shards import read_index_bytes, shard_source
from elsa_format._threads import Meter

MAX_SIZE = 16 << 20
"""Bytes of a manifest that is read."""
COPIED = 1 << 20
"""Bytes copied at a time."""

_SHA256 = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class Entry:
    """What a file's bytes are."""

    size: int
    sha256: str
    """In hexadecimal digits."""


@dataclass(frozen=True)
class Manifest:
    """The file with the weights, or their index, and all others but the shards."""

    weights: str
    files: Mapping[str, Entry]
    """By their paths in the directory, with slashes."""

    def to_bytes(self) -> bytes:
        """The document.

        >>> Manifest("model.ship.safetensors", {}).to_bytes()
        b'{"files":{},"version":"1.0","weights":"model.ship.safetensors"}'
        """
        files = {
            name: {"sha256": entry.sha256, "size": entry.size}
            for name, entry in sorted(self.files.items())
        }
        document = {"files": files, "version": "1.0", "weights": self.weights}
        return dump(document).encode()


def is_inside(name: str) -> bool:
    """Whether a path stays in its directory, on every system, and is neither hidden nor the list.

    >>> [is_inside(name) for name in ("a/b.json", ".gitattributes", "../b", "/b", "c:b", ".git/x")]
    [True, True, False, False, False, False]
    """
    *folders, last = name.split("/")
    return (
        is_text(name)
        and not any(c in "\\:" or ord(c) < 32 for c in name)
        and last not in ("", ".", "..")
        and not any(folder == "" or folder.startswith(".") for folder in folders)
        and name != MANIFEST
    )


def make_manifest(
    folder: Path | None,
    weights: str,
    apart: Path | None = None,
    made: Mapping[str, bytes] | None = None,
) -> Manifest:
    """The manifest of a directory's side files, and of those `made`, for weights of this name."""
    entries = {}
    for path in side_files(folder, apart)[0] if folder else []:
        name = path.as_posix()
        if not is_inside(name):
            raise InvalidOption(f"{path}: such a name cannot be listed; rename the file")
        assert folder is not None
        with open(folder / path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            entries[name] = Entry(os.fstat(file.fileno()).st_size, digest)
    for name, content in (made or {}).items():
        entries[name] = Entry(len(content), hashlib.sha256(content).hexdigest())
    return Manifest(weights, entries)


def parse(raw: bytes, where: str) -> Manifest:
    """Check a list: restricted JSON, its structure, names that stay in the directory."""
    document = parse_document(raw, where)
    check_version(document, f"{where}:", InvalidIndex)
    weights, files = document.get("weights"), document.get("files")
    if not isinstance(weights, str) or not isinstance(files, dict):
        raise InvalidIndex(f"{where}: expected a file name as weights, an object as files")
    if "/" in weights or not is_inside(weights):
        raise UnsafePath(f"{where}: weights {weights!r} are outside the directory of the list")
    entries = {}
    for name, entry in files.items():
        known = entry if isinstance(entry, dict) else {}
        size, sha256 = known.get("size"), known.get("sha256")
        if type(size) is not int or size < 0 or not isinstance(sha256, str):
            raise InvalidIndex(f"{where}: {name!r} has no size and sha256")
        if not _SHA256.fullmatch(sha256):
            raise InvalidIndex(f"{where}: {name!r} has sha256 {sha256!r}, expected 64 digits")
        if not is_inside(name):
            raise UnsafePath(f"{where}: file {name!r} is outside the directory of the list")
        if name == weights:
            raise InvalidIndex(f"{where}: {name!r} is a file and the weights, too")
        entries[name] = Entry(size, sha256)
    return Manifest(weights, entries)


# --- Fetching ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SideFile:
    """A file that is to be there: where it goes, what it holds, and where that comes from."""

    path: Path
    entry: Entry
    source: str | os.PathLike[str] | bytes
    where: str
    """The source, for messages."""

    @classmethod
    def of(cls, path: Path, content: bytes, where: str) -> "SideFile":
        """For what is at hand."""
        entry = Entry(len(content), hashlib.sha256(content).hexdigest())
        return cls(path, entry, content, where)

    def is_there(self) -> bool:
        """Whether the file holds what it should."""
        if not self.path.is_file() or self.path.stat().st_size != self.entry.size:
            return False
        with self.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == self.entry.sha256

    def bring(self, meter: Meter, *, force: bool) -> int:
        """Let the file appear, if its bytes are those that are expected; how many came."""
        with Transaction(force=force) as transaction:
            transaction.make_folder(self.path)
            out = transaction.open_file(self.path)
            found, size = hashlib.sha256(), 0
            storage = None if isinstance(self.source, bytes) else open_storage(self.source)
            for data in self._blocks(storage, transaction):
                out.write_at(size, data)
                found.update(data)
                size += len(data)
                meter.tick(len(data))
            if (size, found.hexdigest()) != (self.entry.size, self.entry.sha256):
                raise ChecksumMismatch(
                    f"{self.where}: {size} bytes with SHA-256 {found.hexdigest()}, expected "
                    f"{self.entry.size} with {self.entry.sha256}, as {MANIFEST} says"
                )
            transaction.commit()
            return 0 if storage is None else getattr(storage, "received", size)

    def _blocks(self, storage: Storage | None, stack: Transaction) -> Iterable[bytes]:
        if storage is None:
            assert isinstance(self.source, bytes)
            yield self.source
            return
        stack.enter_context(storage)
        stop = self.entry.size + 1  # what is longer is seen, and not read to its end
        reader = stack.enter_context(storage.reader(0, stop))
        while data := reader.read(COPIED):
            yield data


class Folder:
    """A model directory, here or at a URL that ends in a slash, by its manifest.

    One that is here needs none: then it is made.
    """

    def __init__(self, source: str | os.PathLike[str], limit: Limit) -> None:
        self.source = source
        self._made = False
        if is_url(source):
            self._raw, self.where = _read(self._place(MANIFEST), limit)
            self._manifest = parse(self._raw, self.where)
            return
        path = Path(source, MANIFEST)
        self.where = os.fspath(path)
        if path.is_file():
            self._raw, _ = _read(path, limit)
            self._manifest = parse(self._raw, self.where)
        else:
            self._manifest = make_manifest(Path(source), weights_file(source).name)
            self._raw, self._made = self._manifest.to_bytes(), True

    @property
    def weights_name(self) -> str:
        """The name of the delivery file, or of the index of several."""
        return self._manifest.weights

    @property
    def weights(self) -> str | os.PathLike[str]:
        """Its path or URL."""
        return self._place(self.weights_name)

    @property
    def transferred(self) -> int:
        """Bytes of the manifest that was read."""
        return 0 if self._made else len(self._raw)

    def side_files(self, out: Path) -> list[SideFile]:
        """All other files but shards, as they are to be in a directory; the manifest is the last.

        Neither they nor the weights are reached through a link that leaves it (ELSA-D-046).
        """
        inside = os.path.join(os.path.realpath(out), "")
        for name in (*self._manifest.files, self.weights_name, MANIFEST):
            if not os.path.realpath(out / name).startswith(inside):
                raise UnsafePath(f"{out / name}: a link leaves the directory {out}")
        found = []
        for name, entry in self._manifest.files.items():
            place = self._place(name)
            found.append(SideFile(out / name, entry, place, shown(place)))
        return [*found, SideFile.of(out / MANIFEST, self._raw, self.where)]

    def places(self) -> list[str | os.PathLike[str]]:
        """Where the manifest, the weights and the other files are."""
        return [self._place(n) for n in (MANIFEST, self.weights_name, *self._manifest.files)]

    def _place(self, name: str) -> str | os.PathLike[str]:
        if not is_url(self.source):
            return Path(self.source, name)
        place = shard_source(self.source, name)
        assert isinstance(place, str)
        return place


def find_folder(source: str | os.PathLike[str], limit: Limit) -> Folder | None:
    """The model directory that a source is, if it is one; a limit is that of its manifest alone.

    A URL is one if it ends in a slash; or if it does not end as weights do, and would have a
    manifest with a slash.
    """
    if not is_url(source):
        return Folder(source, limit) if is_directory(source) else None
    place, mark, query = os.fspath(source).partition("#")[0].partition("?")
    if place.endswith("/"):
        return Folder(source, limit)
    if is_weights(place):
        return None
    try:
        return Folder(f"{place}/{mark}{query}", limit)
    except (RemoteError, InvalidJson, TooLarge):  # no manifest: the URL may be that of a file
        return None


def missing(files: list[SideFile], others: Iterable[Path], *, force: bool) -> list[SideFile]:
    """The files that are to be brought; those that are there must not hold anything else.

    None has the name of one of the `others`, which hold weights.
    """
    taken = {os.path.realpath(path) for path in others}
    for file in files:
        if os.path.realpath(file.path) in taken:
            raise InvalidIndex(f"{file.where}: has the name of a file with weights")
    wanted = [file for file in files if not file.is_there()]
    for file in wanted:
        if os.path.lexists(file.path) and not force:
            raise OutputExists(
                f"{file.path}: is another file than {file.where}", "{force} replaces it", force=True
            )
    return wanted


def _read(place: str | os.PathLike[str], limit: Limit) -> tuple[bytes, str]:
    """A list, and where it is."""
    try:
        return read_index_bytes(place, limit, most=MAX_SIZE)
    except RemoteError as error:
        if error.status is None or error.status // 100 != 4:
            raise
        raise RemoteError(
            error.message,
            "{ship()} of a model directory writes this manifest; where there is none, "
            "give the URL of the delivery file or index",
            status=error.status,
        ) from None
