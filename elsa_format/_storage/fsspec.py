"""Files in any store that fsspec knows."""

import contextlib
import re
from collections.abc import Iterator
from typing import Any

from elsa_format._container.index import redact
from elsa_format._errors import ElsaError, RemoteError
from elsa_format._installed import install_command
from elsa_format._storage import Reader, Window
from elsa_format._storage.local import StreamStorage
from elsa_format._threads import Stopped

FIRST, MOST = 1 << 16, 1 << 23
"""Bytes of the first request at a place, and of the largest: each is twice the one before."""


def find_store(url: str, **options: Any) -> tuple[Any, str]:
    """The store of a URL, and what the file is called there."""
    try:
        import fsspec.core
    except ImportError:
        raise RemoteError(
            f"{redact(url)}: only http and https are built in; for others, "
            f"run: {install_command('remote')}"
        ) from None
    try:
        store, path = fsspec.core.url_to_fs(url, **options)
    except (ImportError, ValueError):
        _refuse_unknown(url)
        raise
    return store, str(path)


def _refuse_unknown(url: str) -> None:
    """Pass on what fsspec says of a store that it does not know, or whose package it lacks."""
    import fsspec

    try:
        for protocol in re.findall(r"(?:^|::)([A-Za-z0-9+.-]+)(?=::|://)", url):
            fsspec.get_filesystem_class(protocol)
    except (ImportError, ValueError) as error:
        raise RemoteError(f"{redact(url)}: {error}") from None


def list_store(url: str) -> list[str]:
    """The names of the files in a folder of a store."""
    with store_errors(url):
        store, path = find_store(url)
        store.invalidate_cache()
        try:
            found = store.ls(path, detail=True)
        except FileNotFoundError:
            return []
        return [each["name"].rpartition("/")[2] for each in found if each["type"] == "file"]


class FsspecStorage(StreamStorage):
    """A file in any store that fsspec knows."""

    high_latency = True

    def __init__(self, url: str, first: int | None = None) -> None:
        self._url, self.first = url, FIRST if first is None else min(first, FIRST)
        self.head = memoryview(b"")
        """What the first request gave, which is kept."""
        self.received = 0
        """Bytes that came."""
        with store_errors(url), contextlib.ExitStack() as stack:
            store, path = find_store(url)
            # Ranges are asked for below; a cache would read on, by up to 50 MiB on S3.
            stream = stack.enter_context(contextlib.closing(store.open(path, cache_type="none")))
            super().__init__(stream, redact(url))
            stack.pop_all()

    def read_at(self, position: int, view: memoryview) -> int:
        with store_errors(self._url):
            count = super().read_at(position, view)
        self.received += count
        return count

    def reader(self, start: int, stop: int) -> Reader:
        return _Ahead(self, start, min(stop, self.size))

    def close(self) -> None:
        with store_errors(self._url):
            self._stream.close()


class _Ahead(Window):
    """A range, asked for in few requests; where it is left early, little was read in vain."""

    storage: FsspecStorage

    def __init__(self, storage: FsspecStorage, start: int, stop: int) -> None:
        super().__init__(storage, start, stop)
        self._data, self._next = memoryview(b""), FIRST

    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer)[: max(self.stop - self.position, 0)]
        if not self._data:
            self._data = self.storage.head[self.position : self.stop]
        if not self._data and view:
            size = self._next if self.position else self.storage.first
            data = memoryview(bytearray(min(size, self.stop - self.position)))
            self._data = data[: self.storage.read_at(self.position, data)]
            self._next = min(2 * self._next, MOST)
            if not self.position:
                self.storage.head = self._data
        count = min(len(view), len(self._data))
        view[:count] = self._data[:count]
        self._data = self._data[count:]
        self.position += count
        return count

    def seek(self, position: int, /) -> None:
        ahead = position - self.position
        if 0 <= ahead < len(self._data):
            self._data = self._data[ahead:]
        else:
            self._data, self._next = memoryview(b""), FIRST
        self.position = position


_STORE_ERRORS: dict[type[Exception], str] = {
    PermissionError: "permission denied",
    IsADirectoryError: "is a directory",
    TimeoutError: "no answer in time",
    ConnectionRefusedError: "connection refused",
    ConnectionError: "the connection broke",
}
_BY_NAME = {
    "NoCredentialsError": "no credentials were found",
    "ConnectTimeoutError": "no answer in time",
    "ReadTimeoutError": "no answer in time",
    "EndpointConnectionError": "no connection",
    "ConnectionClosedError": "the connection broke",
}
"""Errors of botocore, which says in several lines what no class of Python's tells."""


@contextlib.contextmanager
def store_errors(url: str, missing: str = "no such file") -> Iterator[None]:
    """Stores have errors of their own, which need not be OSError and may quote secrets."""
    try:
        yield
    except (ElsaError, Stopped):
        raise
    except FileNotFoundError as error:
        raise RemoteError(f"{redact(url)}: {missing}", status=404) from error
    except Exception as error:
        raise RemoteError(f"{redact(url)}: {_store_error(error, url)}") from error


def _store_error(error: Exception, url: str) -> str:
    for kind, words in _STORE_ERRORS.items():
        if isinstance(error, kind):
            return words
    if type(error).__name__ in _BY_NAME:
        return _BY_NAME[type(error).__name__]
    said = getattr(error, "strerror", None)
    if isinstance(error, ImportError):
        said = str(error)  # fsspec's advice on what to install
    secrets = [secret for pair in re.findall(r"://([^/?#]*)@|\?(.+)", url) for secret in pair]
    if not said or any(secret and secret in said for secret in secrets):
        return type(error).__name__
    return str(said)
