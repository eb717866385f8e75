"""A folder of a store, of which a copy is worked on here: for what grows in place."""

import contextlib
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import xxhash

from elsa_format._errors import OutputExists
from elsa_format._output import COPIED, UnnamedOutput, copy_file
from elsa_format._output.store import StoreFile
from elsa_format._output.together import commit_together
from elsa_format._storage.fsspec import find_store, store_errors
from elsa_format._storage.http_client import redact
from elsa_format._threads import Meter, Progress, no_progress


class Mirror:
    """Files as they are in a store, in a temporary folder, from which they go back together."""

    def __init__(self, url: str, *, folder: bool) -> None:
        """For a folder of a store, or for the one that a file is in."""
        place = f"{url.rstrip('/')}/" if folder else url
        self._url, _, name = place.rpartition("/")
        # Refuse at once where nothing can be written.
        StoreFile(f"{place}any" if folder else url, force=True, in_order=True).discard()
        self._temporary = tempfile.TemporaryDirectory(prefix="elsa-")
        self._folder = Path(os.path.realpath(self._temporary.name))
        self.path = self._folder / name
        """What stands for the URL."""
        self._before: dict[Path, str] = {}
        self._versions: dict[Path, object] = {}

    def __enter__(self) -> "Mirror":
        return self

    def __exit__(self, *error: object) -> None:
        self._temporary.cleanup()

    def shown(self, path: Path) -> str:
        """What a file of the temporary folder stands for, in messages."""
        return redact(self._place(path))

    def _place(self, path: Path) -> str:
        return f"{self._url}/{path.relative_to(self._folder).as_posix()}"

    def bring(self, paths: Iterable[Path]) -> None:
        """Have what the store has of these files."""
        for path in paths:
            url = self._place(path)
            with store_errors(url):
                store, place = find_store(url)
                store.invalidate_cache()
                if store.isfile(place):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    self._versions[path] = _version(store, place)
                    store.get_file(place, os.fspath(path))
                    self._before[path] = _state(path)

    def send(self, paths: Iterable[Path], progress: Progress = no_progress) -> None:
        """Let those that are new or have changed appear in the store, the last of them last."""
        files: list[UnnamedOutput] = []
        changed = [path for path in paths if self._before.get(path) != _state(path)]
        meter = Meter(progress, sum(path.stat().st_size for path in changed))
        with contextlib.ExitStack() as stack:
            for path in changed:
                beside = files[0] if files else None
                assert beside is None or isinstance(beside, StoreFile)
                file = StoreFile(
                    self._place(path), force=path in self._before, in_order=True, beside=beside
                )
                stack.callback(file.discard)
                copy_file(path, file, meter.tick)
                file.sync()
                files.append(file)
            self._refuse_others(changed)
            if files:
                commit_together(files)

    def _refuse_others(self, paths: Iterable[Path]) -> None:
        """Refuse to replace what somebody else has written meanwhile: nothing locks a store."""
        for path in paths:
            if path not in self._versions:
                continue  # then it must not exist, which is looked at when it appears
            url = self._place(path)
            with store_errors(url):
                store, place = find_store(url)
                store.invalidate_cache()
                if self._versions[path] != _version(store, place):
                    raise OutputExists(f"{redact(url)}: was replaced meanwhile; run again")


def _version(store: Any, place: str) -> object:
    """What tells a file of a store from the one that it is replaced by."""
    known = store.info(place)
    return [known.get(key) for key in ("size", "ETag", "LastModified", "created", "mtime")]


def _state(path: Path) -> str:
    """What a file holds: it is cut and written anew without being changed."""
    found = xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as file:
        while block := file.read(COPIED):
            found.update(block)
    return found.hexdigest()
