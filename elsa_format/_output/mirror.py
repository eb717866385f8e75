"""A folder of a store, of which a copy is worked on here: for what grows in place."""

import contextlib
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

import xxhash

from elsa_format._errors import ElsaError
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

    def __enter__(self) -> "Mirror":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._temporary.cleanup()
        if isinstance(error, ElsaError) and str(self._folder) in error.message:
            message = error.message.replace(str(self._folder), redact(self._url))
            raise type(error)(message, error.hint, **error.options) from error

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
            if files:
                commit_together(files)


def _state(path: Path) -> str:
    """What a file holds: it is cut and written anew without being changed."""
    found = xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as file:
        while block := file.read(COPIED):
            found.update(block)
    return found.hexdigest()
