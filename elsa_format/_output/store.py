"""Files in stores that fsspec knows: sent under no name, which they take when all of it is there.

What a store calls a transaction (S3: a multipart upload) is begun by the first bytes that are sent,
and taken back unless it is committed, by errors and by signals alike.
"""

import _thread
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from elsa_format._errors import InvalidOption, OutputExists, RemoteError
from elsa_format._output import together
from elsa_format._output.streams import Spool
from elsa_format._storage.fsspec import find_store, store_errors
from elsa_format._storage.http_client import redact
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
    together.names.acquire(timeout=seconds / 2)
    task = Task(run, StoreFile.take_back, list(_unfinished), AT_A_TIME)
    _thread.start_new_thread(task, ())  # a store may not answer
    task.abandon(until)


class StoreFile:
    """A file of a store that appears when it is complete.

    What is not written `in_order` is kept on disk until then, as stores take bytes front to back.
    """

    path = None

    def __init__(
        self,
        url: str,
        *,
        force: bool = False,
        in_order: bool = False,
        beside: "StoreFile | None" = None,
    ) -> None:
        if url.partition("://")[0].lower() in ("http", "https"):
            raise InvalidOption(
                f"{redact(url)}: HTTP is read only; expected a path or a store, such as s3://"
            )
        self.url, self.name, self.force = url, redact(url), force
        self._named = self._sent = False
        with _writing(url):
            if beside is None:
                # An instance of its own: a transaction concerns all that is written through it.
                self._store, self._place = find_store(url, skip_instance_cache=True)
                self._store.start_transaction()
            else:
                self._store, self._place = beside._store, find_store(url)[1]
            self._check()
        self._upload = _Upload(url, self._store, self._place)
        self._output = self._upload if in_order else Spool(self._upload)
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

    def write_at(self, position: int, data: Any) -> None:
        """Write all of a buffer at a position of the file."""
        self._output.write_at(position, data)

    def commit(self) -> None:
        """Send what is not yet there, and let it appear."""
        together.commit_together([self])

    @property
    def waiting(self) -> int:
        """Bytes that are kept on disk."""
        return self._output.size if isinstance(self._output, Spool) and not self._sent else 0

    def sync(self, tick: Callable[[int], object] = lambda size: None) -> None:
        """Send what is not yet there."""
        if self._sent:
            return
        if isinstance(self._output, Spool):
            self._output.commit(tick)
        else:
            self._output.commit()
        self._sent = True

    def take_name(self) -> None:
        """Let it appear."""
        if _ending:
            raise Stopped
        with _writing(self.url):
            if not self.force and self._kind() is not None:
                raise self._exists()
            self._upload.complete()
            self._named = True

    def lose_name(self) -> None:
        """Remove the file, or what has its name."""
        with _writing(self.url), contextlib.suppress(FileNotFoundError):
            self._store.rm_file(self._place)
        self._named = False

    def close(self) -> None:
        """Nothing is left to do."""
        _unfinished.pop(self, None)

    def discard(self) -> None:
        """Leave nothing; harmless after `commit`."""
        _unfinished.pop(self, None)
        self._upload.discard()
        self._output.discard()

    def take_back(self) -> None:
        """Leave nothing, though it may have its name by now."""
        if self._named:
            self.lose_name()
        else:
            self._upload.discard()


class _Upload:
    """Bytes that a store is sent front to back."""

    def __init__(self, url: str, store: Any, place: str) -> None:
        self._url, self._store, self._place, self.position = url, store, place, 0
        self._stream: Any = None
        self._over = False
        # Held by requests: what one begins can be taken back when it was answered.
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def _request(self) -> Iterator[None]:
        with self._lock, _writing(self._url):
            if self._over:
                raise Stopped
            yield

    def write_at(self, position: int, data: Any) -> None:
        """Write at the end; no other position exists."""
        if position != self.position:
            raise ValueError(f"an upload cannot write at {position}, it is at {self.position}")
        view = memoryview(data).cast("B")
        with self._request():
            if self._stream is None:
                self._stream = self._store.open(self._place, "wb")
            while view:
                count = self._stream.write(view)
                count = len(view) if count is None else count
                view, self.position = view[count:], self.position + count

    def commit(self) -> None:
        """Send the last bytes; `complete` lets them appear."""
        with self._request():
            self._stream.close()

    def complete(self) -> None:
        """Let the file appear."""
        with self._request():
            self._stream.commit()
            self._over = True

    def discard(self) -> None:
        """Take back what was sent; harmless after `complete`."""
        waited = self._lock.acquire(timeout=PATIENCE)
        try:
            if self._over or self._stream is None:
                return
            self._over = True
            with contextlib.suppress(Exception):  # what went wrong before is what is told
                self._stream.discard()
            with contextlib.suppress(AttributeError):  # nothing is sent when it is forgotten
                self._stream.closed = True
        finally:
            if waited:
                self._lock.release()


def _writing(url: str) -> contextlib.AbstractContextManager[None]:
    return store_errors(url, missing="no such bucket or folder")
