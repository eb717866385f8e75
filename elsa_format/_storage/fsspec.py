"""Files in any store that fsspec knows."""

import contextlib
import re
from collections.abc import Iterator

from elsa_format._errors import ElsaError, RemoteError
from elsa_format._storage.http_client import redact
from elsa_format._storage.local import StreamStorage


class FsspecStorage(StreamStorage):
    """A file in any store that fsspec knows."""

    high_latency = True

    def __init__(self, url: str) -> None:
        try:
            import fsspec
        except ImportError:
            raise RemoteError(
                f"{redact(url)}: only http and https are built in; for others, "
                "pip install 'elsa-format[remote]'"
            ) from None
        self._url = url
        with _store_errors(url), contextlib.ExitStack() as stack:
            stream = stack.enter_context(contextlib.closing(fsspec.open(url, "rb").open()))
            super().__init__(stream, redact(url))
            stack.pop_all()

    def read_at(self, position: int, view: memoryview) -> int:
        with _store_errors(self._url):
            return super().read_at(position, view)

    def close(self) -> None:
        with _store_errors(self._url):
            self._stream.close()


_STORE_ERRORS: dict[type[Exception], str] = {
    FileNotFoundError: "no such file",
    PermissionError: "permission denied",
    IsADirectoryError: "is a directory",
    TimeoutError: "no answer in time",
    ConnectionRefusedError: "connection refused",
    ConnectionError: "the connection broke",
}


@contextlib.contextmanager
def _store_errors(url: str) -> Iterator[None]:
    """Stores have errors of their own, which need not be OSError and may quote secrets."""
    try:
        yield
    except ElsaError:
        raise
    except Exception as error:
        raise RemoteError(f"{redact(url)}: {_store_error(error, url)}") from error


def _store_error(error: Exception, url: str) -> str:
    for kind, words in _STORE_ERRORS.items():
        if isinstance(error, kind):
            return words
    said = getattr(error, "strerror", None)
    if isinstance(error, ImportError) or str(error).startswith("Protocol not known"):
        said = str(error)  # fsspec's advice on what to install
    secrets = [secret for pair in re.findall(r"://([^/?#]*)@|\?(.+)", url) for secret in pair]
    if not said or any(secret and secret in said for secret in secrets):
        return type(error).__name__
    return str(said)
