"""Files behind a URL: HTTP with ranges and resumption, any other store through fsspec.

A range that breaks is asked for again from the byte where it broke. What every answer says about
the file (its length, ETag, date) must be what the first one said: half of one file and half of
another is worse than an error.
"""

import contextlib
import http.client
import os
import re
import socket
import ssl
import threading
import time
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlsplit

from elsa_format._errors import ElsaError, InputChanged, RemoteError
from elsa_format._header import LENGTH_BYTES, MAX_HEADER, Readable
from elsa_format._storage import Reader, Storage, StreamStorage

HEAD = 64 << 10
"""Bytes asked for first: the whole header of most files."""
SKIP = 1 << 20
"""A gap that is read over rather than asked around; also the progress that forgives a failure."""
RECEIVED = 256 << 10
"""Most bytes taken from a connection at once."""
MAX_REDIRECTS = 5
RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504})
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""Seconds before the first retry; doubled for each that follows."""

_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19}|\*)")
_PERMANENT = (socket.gaierror, ConnectionRefusedError, ssl.SSLCertVerificationError)


@dataclass(frozen=True)
class RetryPolicy:
    """How long to wait, and how often to try again."""

    timeout: float
    """Seconds without a byte."""
    retries: int
    """Failures in a row, with less than a mebibyte between them."""

    @classmethod
    def from_environment(cls) -> "RetryPolicy":
        """ELSA_TIMEOUT (seconds) and ELSA_RETRIES, or 30 and 5."""
        return cls(_setting("ELSA_TIMEOUT", 30.0), int(_setting("ELSA_RETRIES", 5)))


def _setting(name: str, default: float) -> float:
    text = os.environ.get(name, "")
    try:
        value = float(text or default)
    except ValueError:
        value = -1
    if not 0 <= value < 1e6:
        raise RemoteError(f"environment variable {name}={text!r}: expected a number")
    return value


def open_url(url: str) -> Storage:
    """Storage for a URL of any scheme."""
    if urlsplit(url).scheme.lower() in ("http", "https"):
        return HttpStorage(url, RetryPolicy.from_environment())
    return FsspecStorage(url)


def redact(url: str) -> str:
    """A URL as messages show it: without what may be secret.

    >>> redact("https://me:secret@example.org/net.safetensors?signature=abc")
    'https://example.org/net.safetensors?…'
    """
    parts = urlsplit(url)
    query = "?…" if parts.query else ""
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}{query}"


@dataclass(frozen=True)
class _Version:
    """Which file an answer is about."""

    size: int | None
    etag: str | None
    modified: str | None

    def differs(self, other: "_Version") -> bool:
        pairs = [(self.size, other.size), (self.modified, other.modified)]
        if self.etag and other.etag:
            pairs[1] = (self.etag, other.etag)
        return any(a is not None and b is not None and a != b for a, b in pairs)


class HttpStorage:
    """A file on an HTTP server; its first bytes are fetched at once."""

    high_latency = True

    def __init__(self, url: str, policy: RetryPolicy) -> None:
        self.name, self.policy = redact(url), policy
        self._url, self._authorization = _split_credentials(url, self.name)
        self._opener = _opener(self._authorization)
        self._lock = threading.Lock()
        self._version: _Version | None = None
        self._head = b""
        with contextlib.closing(HttpReader(self, 0, HEAD)) as reader:
            parts = []
            while part := reader.read(HEAD):
                parts.append(part)
        self._head = b"".join(parts)

    @property
    def size(self) -> int | None:
        """Bytes in all, as the server says."""
        return self._version.size if self._version else None

    def front(self) -> Readable:
        """As much as the header takes, so that nothing of the data is fetched with it."""
        length = int.from_bytes(self._head[:LENGTH_BYTES], "little")
        return self.reader(0, LENGTH_BYTES + min(length, MAX_HEADER))

    def reader(self, start: int, stop: int) -> Reader:
        """Read along a range."""
        return HttpReader(self, start, stop)

    def head(self, start: int, stop: int) -> bytes:
        """What is at hand of a range."""
        return self._head[start:stop]

    def check_unchanged(self) -> None:
        """Every answer was compared with the first."""

    def close(self) -> None:
        """Connections belong to readers."""

    def request(self, start: int, stop: int) -> "_Response":
        """Ask for bytes from `start` on, up to `stop`."""
        request = urllib.request.Request(self._url)
        request.add_header("Accept-Encoding", "identity")
        request.add_header("User-Agent", "elsa-format")
        if self.size is not None:
            stop = min(stop, self.size)
        request.add_header("Range", f"bytes={start}-{stop - 1 if stop < 1 << 62 else ''}")
        if self._authorization:
            request.add_unredirected_header("Authorization", self._authorization)
        response = self._opener.open(request, timeout=self.policy.timeout)
        try:
            answer = _Response(response, start, self.name)
            self._compare(answer.version)
        except BaseException:
            response.close()
            raise
        return answer

    def _compare(self, version: _Version) -> None:
        with self._lock:
            if self._version is None:
                self._version = version
            elif self._version.differs(version):
                raise InputChanged(f"{self.name}: changed while it was read; run again")


class _Response:
    """A response that holds bytes from a known position on."""

    def __init__(self, response: Any, start: int, where: str) -> None:
        self.response, headers = response, response.headers
        encoding = headers.get("Content-Encoding", "identity")
        if encoding != "identity":
            raise RemoteError(f"{where}: the server sends it encoded as {encoding!r}")
        length = _length(headers.get("Content-Length"), where)
        size, self.end = length, length
        self.position = 0
        if response.status == 206:
            found = _RANGE.fullmatch((headers.get("Content-Range") or "").strip())
            if found is None:
                stated = headers.get("Content-Range") or headers.get("Content-Type")
                raise RemoteError(f"{where}: the server answered with range {stated!r}")
            first, last = int(found[1]), int(found[2])
            size = None if found[3] == "*" else int(found[3])
            self.position, self.end = first, last + 1
            if first != start or last < first or (size is not None and last >= size):
                raise RemoteError(
                    f"{where}: the server answered with range {found[0]!r}, "
                    f"expected one that starts at {start}"
                )
            if length is not None and length != last + 1 - first:
                raise RemoteError(f"{where}: the server sends {length} bytes as {found[0]!r}")
        elif response.status != 200:
            raise RemoteError(f"{where}: the server answered {response.status} {response.reason}")
        self.version = _Version(size, headers.get("ETag"), headers.get("Last-Modified"))


def _length(text: str | None, where: str) -> int | None:
    if text is None:
        return None
    if not re.fullmatch(r"\d{1,19}", text):
        raise RemoteError(f"{where}: the server answered with length {text!r}")
    return int(text)


class HttpReader:
    """A range read along, over as many connections as it takes."""

    def __init__(self, storage: HttpStorage, start: int, stop: int) -> None:
        self.storage, self.position, self.stop = storage, start, stop
        self._response: _Response | None = None
        self._failures, self._last_failure = 0, start

    def readinto(self, buffer: Any, /) -> int:
        """At least one byte, unless the range or the file is at its end."""
        view = memoryview(buffer)[: max(self.stop - self.position, 0)]
        if not view:
            return 0
        if at_hand := self.storage.head(self.position, self.position + len(view)):
            view[: len(at_hand)] = at_hand
            self.position += len(at_hand)
            return len(at_hand)
        while True:
            try:
                return self._receive(view)
            except (OSError, http.client.HTTPException) as error:
                self.close()
                self.retry_or_raise(error)

    def read(self, size: int, /) -> bytes:
        """Up to `size` bytes."""
        buffer = bytearray(min(size, SKIP))
        return bytes(buffer[: self.readinto(buffer)])

    def seek(self, position: int, /) -> None:
        """Go on elsewhere; a short way ahead the connection is kept."""
        answer = self._response
        if answer is not None and (
            not 0 <= position - self.position <= SKIP
            or (answer.end is not None and position >= answer.end)
        ):
            self.close()
        self.position = position

    def close(self) -> None:
        """Drop the connection."""
        if self._response is not None:
            self._response.response.close()
            self._response = None

    def _receive(self, view: memoryview) -> int:
        """Bytes from the connection, or none if the file ends here."""
        size = self.storage.size
        if size is not None and self.position >= size:
            return 0
        answer = self._response
        if answer is None or answer.position == answer.end:
            self.close()
            answer = self._response = self._ask()
            if answer is None:
                return 0
        self._skip(answer)
        # One system call: what arrived before a time-out is not lost.
        data = answer.response.read1(min(len(view), RECEIVED))
        count = len(data)
        view[:count] = data
        if not count and answer.end is not None and answer.position < answer.end:
            raise http.client.IncompleteRead(b"")
        answer.position += count
        self.position += count
        return count

    def _ask(self) -> _Response | None:
        try:
            return self.storage.request(self.position, self.stop)
        except urllib.error.HTTPError as error:
            with error:
                # An empty file has no first byte; where no size is told, this tells the end.
                if error.code == 416 and (self.position == 0 or self.storage.size is None):
                    return None
                raise

    def _skip(self, answer: _Response) -> None:
        """Read over what a server sends that knows no ranges, or a short gap."""
        while answer.position < self.position:
            data = answer.response.read(min(self.position - answer.position, SKIP))
            if not data:
                raise http.client.IncompleteRead(b"")
            answer.position += len(data)

    def retry_or_raise(self, error: Exception) -> None:
        """Wait before the next attempt, or give up."""
        reason: Any = error.reason if isinstance(error, urllib.error.URLError) else error
        if self.position - self._last_failure >= SKIP:
            self._failures = 0
        self._last_failure = self.position
        pause = min(FIRST_PAUSE * 2**self._failures, LONGEST_PAUSE)
        if isinstance(error, urllib.error.HTTPError):
            message = (
                f"the server answered {error.code} {http.client.responses.get(error.code, '')}"
            )
            if error.code // 100 == 3:
                message += f", and is not followed further (at most {MAX_REDIRECTS} redirects)"
            if error.code not in RETRIED:
                raise RemoteError(f"{self.storage.name}: {message}") from None
            pause = max(pause, _retry_after(error))
        else:
            message = _cause(reason)
            never_there = self.storage._version is None and isinstance(reason, _PERMANENT)
            if never_there or isinstance(reason, ssl.SSLCertVerificationError):
                raise RemoteError(f"{self.storage.name}: {message}") from None
        self._failures += 1
        if self._failures > self.storage.policy.retries:
            raise RemoteError(
                f"{self.storage.name}: {message} at byte {self.position}; gave up after "
                f"{self._failures} attempts"
            ) from None
        time.sleep(pause)


def _cause(reason: Any) -> str:
    """Why a connection failed, without what a library might quote of the URL."""
    if isinstance(reason, TimeoutError):
        return "no answer in time"
    if isinstance(reason, ConnectionRefusedError):
        return "connection refused"
    if isinstance(reason, ConnectionError | http.client.HTTPException):
        return "the connection broke"
    if isinstance(reason, OSError):
        return reason.strerror or type(reason).__name__
    return "the connection failed"


def _retry_after(error: urllib.error.HTTPError) -> float:
    text = error.headers.get("Retry-After", "") if error.headers else ""
    return min(float(text), LONGEST_PAUSE) if re.fullmatch(r"\d{1,6}", text) else 0.0


def _split_credentials(url: str, where: str) -> tuple[str, str | None]:
    """The URL without user and password, and the header that carries them."""
    parts = urlsplit(url)
    if not parts.hostname:
        raise RemoteError(f"{where}: the URL names no host")
    user, at, host = parts.netloc.rpartition("@")
    if not at:
        return url, None
    token = b64encode(unquote(user).encode()).decode()
    return parts._replace(netloc=host).geturl(), f"Basic {token}"


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Few redirects, to HTTP only, and never from an encrypted connection to a plain one."""

    max_redirections = MAX_REDIRECTS

    def __init__(self, authorization: str | None) -> None:
        self.authorization = authorization

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        target = urlsplit(newurl)
        if target.scheme not in ("http", "https") or (
            req.type == "https" and target.scheme == "http"
        ):
            raise RemoteError(
                f"{redact(req.full_url)}: refused to follow a redirect to {redact(newurl)}"
            )
        new = super().redirect_request(req, fp, code, msg, headers, newurl)
        if new is not None and self.authorization and (new.type, new.host) == (req.type, req.host):
            new.add_unredirected_header("Authorization", self.authorization)
        return new


def _opener(authorization: str | None) -> urllib.request.OpenerDirector:
    """HTTP and HTTPS, with the environment's proxies, and nothing else."""
    opener = urllib.request.OpenerDirector()
    handlers: list[Callable[[], Any]] = [
        urllib.request.ProxyHandler,
        urllib.request.UnknownHandler,
        urllib.request.HTTPHandler,
        urllib.request.HTTPSHandler,
        urllib.request.HTTPDefaultErrorHandler,
        urllib.request.HTTPErrorProcessor,
    ]
    for handler in handlers:
        opener.add_handler(handler())
    opener.add_handler(_Redirects(authorization))
    return opener


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
        with _store_errors(redact(url)):
            super().__init__(fsspec.open(url, "rb").open(), redact(url))

    def read_into(self, position: int, view: memoryview) -> None:
        """Fill the buffer from a position."""
        with _store_errors(self.name):
            super().read_into(position, view)

    def close(self) -> None:
        """Close what was opened here."""
        self._stream.close()


@contextlib.contextmanager
def _store_errors(where: str) -> Iterator[None]:
    """Stores have errors of their own, which need not be OSError and may quote secrets."""
    try:
        yield
    except ElsaError:
        raise
    except Exception as error:
        reason = getattr(error, "strerror", None) or type(error).__name__
        raise RemoteError(f"{where}: {reason}") from error
