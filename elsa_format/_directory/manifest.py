"""The manifest of a model directory: HTTP has no lists of files, so `elsa-ship` writes one.

Delivery specification §9.1:

{"files": {"config.json": {"sha256": "…", "size": 570}},
 "version": "1.0", "weights": "model.ship.safetensors"}
"""

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from elsa_format._container.json import check_version, dump, is_text, parse_document
from elsa_format._directory import MANIFEST, side_files
from elsa_format._errors import InvalidIndex, InvalidJson, InvalidOption, UnsafePath

MAX_SIZE = 16 << 20
"""Bytes of a manifest that is read."""

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


def make_manifest(folder: Path, weights: str, apart: Path | None = None) -> Manifest:
    """The manifest of a directory's side files, for weights of this name."""
    entries = {}
    for path in side_files(folder, apart)[0]:
        name = path.as_posix()
        if not is_inside(name):
            raise InvalidOption(f"{folder / path}: such a name cannot be listed; rename the file")
        with open(folder / path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            entries[name] = Entry(os.fstat(file.fileno()).st_size, digest)
    return Manifest(weights, entries)


def parse(raw: bytes, where: str) -> Manifest:
    """Check a list: restricted JSON, its structure, names that stay in the directory."""
    try:
        document = parse_document(raw.decode("utf-8"), where)
    except UnicodeDecodeError as error:
        raise InvalidJson(f"{where}: is not UTF-8 at byte {error.start}") from None
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
