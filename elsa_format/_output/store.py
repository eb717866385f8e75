"""Files in stores that fsspec knows: made on disk, then sent under no name, which they take last.

What a store calls a transaction (S3: a multipart upload) is begun by `sync`, and taken back unless
it is published, by errors and by signals alike.
"""

import _thread
import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

from elsa_format._container.index import redact
from elsa_format._errors import InvalidOption, OutputExists, RemoteError
from elsa_format._output import atomic
from elsa_format._output.atomic import Tick
from elsa_format._output.streams import Spool
from elsa_format._storage.fsspec import find_store, store_errors
from elsa_format._threads import PATIENCE, Stopped, Task, run

BUCKETS = {"s3", "s3a", "gs", "gcs", "abfs", "az"}
"""Stores that begin with a bucket, without which nothing can be written."""
AT_A_TIME = 8
"""Files that are taken back at a time, when a signal ends the process."""

_unfinished: dict["StoreFile", None] = {}
"""In the order in which they were opened: an index before its shards."""
_ending = False


def leave_nothing(seconds: float) -> None:
    """Take back what is not finished, and let nothing appear any more: the process ends."""
    global _ending
    if not _unfinished:
        return
    _ending, until = True, time.monotonic() + seconds
    atomic.names.acquire(timeout=seconds / 2)
    task = Task(run, StoreFile.take_back, list(_unfinished), AT_A_TIME)
    _thread.start_new_thread(task, ())  # a store may not answer
    task.abandon(until)


class StoreFile(Spool):
    """A file of a store that appears when it is complete; kept on disk until it is sent."""

    def __init__(self, url: str, *, force: bool, beside: "StoreFile | None" = None) -> None:
        if url.partition("://")[0].lower() in ("http", "https"):
            raise InvalidOption(
                f"{redact(url)}: HTTP is read only; expected a path or a store, such as s3://"
            )
        self.url, self.name, self.force = url, redact(url), force
        with self._talking():
            if beside is None:
                # An instance of its own: a transaction concerns all that is written through it.
                self._store, self._place = find_store(url, skip_instance_cache=True)
                self._store.start_transaction()
            else:
                self._store, self._place = beside._store, find_store(url)[1]
            self._check()
        super().__init__()
        self._stream: Any = None
        self._sent = self._published = self._over = False
        # Held by requests: what one begins can be taken back when it was answered.
        self._lock = threading.Lock()
        _unfinished[self] = None

    def _check(self) -> None:
        """Refuse at once, not when all has been made."""
        scheme, (bucket, _, inside) = self.url.partition("://")[0], self._place.partition("/")
        in_bucket = scheme.lower() in BUCKETS
        if self.url.endswith("/") or (in_bucket and not inside):
            raise InvalidOption(f"{self.name}: names no file")
        try:
            kind = self._kind()
        except PermissionError:  # to look, which is not needed to write
            if not self.force:
                raise
            return
        if kind == "directory":
            raise IsADirectoryError
        if kind is not None and not self.force:
            raise self._exists()
        if kind is None and in_bucket and not self._store.exists(bucket):
            raise RemoteError(f"{self.name}: no such bucket")

    def _kind(self) -> str | None:
        """Whether there is a file or directory of this name."""
        self._store.invalidate_cache()
        try:
            return str(self._store.info(self._place)["type"])
        except FileNotFoundError:
            return None

    def _exists(self) -> OutputExists:
        return OutputExists(f"{self.name}: exists already", "{force} replaces it", force=True)

    @property
    def waiting(self) -> int:  # type: ignore[override]
        """Bytes that are kept on disk."""
        return 0 if self._sent else self.size

    def sync(self, tick: Tick = lambda size: None) -> None:
        """Send all bytes."""
        if self._sent:
            return
        with self._request():
            self._stream = self._store.open(self._place, "wb")
        for block in self.blocks():
            view = memoryview(block)
            with self._request():
                while view:
                    count = self._stream.write(view)
                    view = view[len(view) if count is None else count :]
            tick(len(block))
        with self._request():
            self._stream.close()
        self._sent = True
        super().discard()

    def publish(self) -> None:
        """Let it appear."""
        if _ending:
            raise Stopped
        with self._talking():
            if not self.force and self._kind() is not None:
                raise self._exists()
        with self._request():
            self._stream.commit()
            self._over = True
        self._published = True

    def unpublish(self) -> None:
        """Remove the file, or what has its name."""
        with self._talking(), contextlib.suppress(FileNotFoundError):
            self._store.rm_file(self._place)
        self._published = False

    def discard(self) -> None:
        """Leave nothing; what was published stays."""
        _unfinished.pop(self, None)
        super().discard()
        self._abort()

    def take_back(self) -> None:
        """Leave nothing, though it may have been published by now."""
        if self._published:
            self.unpublish()
        else:
            self._abort()

    def _abort(self) -> None:
        waited = self._lock.acquire(timeout=PATIENCE)
        try:
            begun, self._over = self._stream is not None and not self._over, True
            if begun:
                with contextlib.suppress(Exception):  # what went wrong before is what is told
                    self._stream.discard()
                with contextlib.suppress(AttributeError):  # nothing is sent when it is forgotten
                    self._stream.closed = True
        finally:
            if waited:
                self._lock.release()

    @contextlib.contextmanager
    def _request(self) -> Iterator[None]:
        with self._lock, self._talking():
            if self._over:
                raise Stopped
            yield

    def _talking(self) -> contextlib.AbstractContextManager[None]:
        return store_errors(self.url, missing="no such bucket or folder")
