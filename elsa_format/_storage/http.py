"""Files on an HTTP server, read by ranges that are resumed where they break.

A range that breaks is asked for again from the byte where it broke. What every answer says about
the file (its length, ETag, date) must be what the first one said: half of one file and half of
another is worse than an error.
"""

import contextlib
import os
import re
import ssl
import time
from _thread import allocate_lock
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from elsa_format._container import LENGTH_BYTES, MAX_HEADER, Readable
from elsa_format._container.index import redact
from elsa_format._errors import InputChanged, RemoteError
from elsa_format._storage import Reader, Storage
from elsa_format._storage.http_client import (
    SLOWEST,
    Connections,
    Exchange,
    StatusError,
    get,
    parse_url,
)
from elsa_format._threads import Renewed

HEAD = 64 << 10
"""Bytes asked for first: the whole header of most files."""
SKIP = 1 << 20
"""A gap that is read over rather than asked around; also the progress that forgives a failure."""
RECEIVED = 256 << 10
"""Most bytes taken from a connection at once."""
RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504})
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""Seconds before the first retry; doubled for each that follows."""

_RANGE = re.compile(r"bytes ([0-9]{1,19})-([0-9]{1,19})/([0-9]{1,19}|\*)")
_UNSATISFIED = re.compile(r"bytes \*/([0-9]{1,19})")


@dataclass(frozen=True)
class RetryPolicy:
    """How long to wait, and how often to try again."""

    timeout: float
    """Seconds without progress."""
    retries: int
    """Failures in a row, with less than a mebibyte between them."""

    @classmethod
    def from_environment(cls) -> "RetryPolicy":
        """ELSA_TIMEOUT (seconds) and ELSA_RETRIES, or 30 and 5."""
        timeout = _setting("ELSA_TIMEOUT", 30, "seconds, more than 0", lambda s: 0 < s < 1e6)
        retries = _setting(
            "ELSA_RETRIES", 5, "a whole number", lambda n: n.is_integer() and 0 <= n < 1e6
        )
        return cls(timeout, int(retries))


def _setting(name: str, default: float, expected: str, fits: Callable[[float], bool]) -> float:
    text = os.environ.get(name, "")
    with contextlib.suppress(ValueError):
        value = float(text or default)
        if fits(value):
            return value
    raise RemoteError(f"environment variable {name}={text!r}: expected {expected}")


@dataclass(frozen=True)
class _Version:
    """Which file an answer is about."""

    size: int | None
    etag: str | None
    modified: str | None

    def differs(self, other: "_Version") -> bool:
        pairs: list[tuple[object, object]] = [(self.size, other.size)]
        if self.etag and other.etag:
            # Servers that compress or cache turn "x" into W/"x"; the date then has to agree, too.
            pairs.append((self.etag.removeprefix("W/"), other.etag.removeprefix("W/")))
        if not self.etag or not other.etag or "W/" in (self.etag[:2], other.etag[:2]):
            pairs.append((self.modified, other.modified))
        return any(a is not None and b is not None and a != b for a, b in pairs)


class HttpStorage(Storage, Renewed):
    """A file on an HTTP server; its first bytes are fetched at once."""

    high_latency = True

    def __init__(self, url: str, policy: RetryPolicy, first: int = HEAD) -> None:
        self.name, self.policy = redact(url), policy
        self._url, self._connections = parse_url(url, self.name), Connections()
        super().__init__()
        self._version: _Version | None = None
        self._head = b""
        self._rest: _Response | None = None
        self.received = 0
        """Bytes of files that came, those that were read over included."""
        with HttpReader(self, 0, first) as reader:
            parts = []
            while part := reader.read(first):
                parts.append(part)
        self._head = b"".join(parts)

    @property
    def sends_all(self) -> bool:
        """Whether the server knows no ranges: what is read over comes, too."""
        return self._rest is not None

    @property
    def answered(self) -> bool:
        """Whether there is such a file at all."""
        return self._version is not None

    def front(self) -> Readable:
        """As much as the header takes, so that nothing of the data is fetched with it."""
        length = int.from_bytes(self._head[:LENGTH_BYTES], "little")
        return self.reader(0, LENGTH_BYTES + min(length, MAX_HEADER))

    def reader(self, start: int, stop: int) -> Reader:
        return HttpReader(self, start, stop)

    def head(self, start: int, stop: int) -> bytes:
        """What is at hand of a range."""
        return self._head[start:stop]

    def renew(self) -> None:
        """Be unlocked."""
        self._lock = allocate_lock()

    def close(self) -> None:
        """Drop what a server would have gone on to send; other connections are the readers'."""
        self._connections.close()
        self.leave(None)

    def leave(self, response: "_Response | None") -> None:
        """Keep an answer for the next reader, in place of an earlier one."""
        if response is not None:
            response.was_left = True
        with self._lock:
            response, self._rest = self._rest, response
        if response is not None:
            response.exchange.close()

    def _take(self, start: int) -> "_Response | None":
        """The answer that was left, if it still has what comes from `start` on."""
        with self._lock:
            if self._rest is None or self._rest.position > start:
                return None
            response, self._rest = self._rest, None
            return response

    def count(self, received: int) -> int:
        """Add up what came."""
        with self._lock:
            self.received += received
        return received

    def request(self, start: int, stop: int) -> "_Response | None":
        """Ask for bytes from `start` on, up to `stop`; None if the file ends there."""
        if (rest := self._take(start)) is not None:
            return rest
        if self.size is not None:
            stop = min(stop, self.size)
        asked = {"Range": f"bytes={start}-{stop - 1 if stop < 1 << 62 else ''}"}
        if self._version and self._version.etag and not self._version.etag.startswith("W/"):
            asked["If-Range"] = self._version.etag  # of another file, all of it comes, and is seen
        try:
            exchange = get(self._url, asked, self.policy.timeout, self.name, self._connections)
        except StatusError as error:
            if error.status != 416:
                raise
            # An empty file has no first byte; where no size is told, this tells the end.
            if self.size is None:
                return None
            found = _UNSATISFIED.fullmatch(error.headers.get("content-range", ""))
            if found is not None:
                self._compare(_Version(int(found[1]), None, None))
            raise
        try:
            response = _Response(exchange, start, self.size, self.name)
            self._compare(response.version)
        except BaseException:
            exchange.close()
            raise
        return response

    def _compare(self, version: _Version) -> None:
        with self._lock:
            if self._version is None:
                self._version, self.size = version, version.size
            elif self._version.differs(version):
                raise InputChanged(f"{self.name}: changed while it was read; run again")


class _Response:
    """An answer that holds bytes from a known position on."""

    def __init__(self, exchange: Exchange, start: int, known: int | None, where: str) -> None:
        self.exchange, headers = exchange, exchange.headers
        encoding = headers.get("content-encoding") or "identity"
        if encoding.lower() != "identity":
            raise RemoteError(f"{where}: the server sends it encoded as {encoding!r}")
        size, self.end = exchange.length, exchange.length
        self.position = 0
        if exchange.status == 206:
            found = _RANGE.fullmatch(headers.get("content-range", ""))
            if found is None:
                stated = headers.get("content-range") or headers.get("content-type")
                raise RemoteError(f"{where}: the server answered with range {stated!r}")
            first, last = int(found[1]), int(found[2])
            size = None if found[3] == "*" else int(found[3])
            self.position, self.end = first, last + 1
            if first != start or last < first or (size is not None and last >= size):
                raise RemoteError(
                    f"{where}: the server answered with range {found[0]!r}, "
                    f"expected one that starts at {start}"
                )
            if exchange.length not in (None, last + 1 - first):
                raise RemoteError(
                    f"{where}: the server sends {exchange.length} bytes as {found[0]!r}"
                )
        if self.end is None:
            self.end = known
        self.start = self.position
        self.whole = exchange.status == 200
        """Whether the server knows no ranges, and sends the file to its end."""
        self.was_left = False
        self.version = _Version(size, headers.get("etag"), headers.get("last-modified"))

    def readinto(self, view: memoryview) -> int:
        """Bytes as they come; none at the end of the file, where only that tells its size."""
        if self.end is not None:
            view = view[: self.end - self.position]
        count = self.exchange.readinto(view[:RECEIVED])
        if not count and view and self.end is not None:
            raise ConnectionError
        self.position += count
        return count


class HttpReader(Reader):
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
                response = self._answer()
                count = 0 if response is None else self.storage.count(response.readinto(view))
                self.position += count
                return count
            except (OSError, StatusError) as error:
                waited = self._response is not None and self._response.was_left
                self._drop()
                if not waited:  # for its next reader, which a server need not endure
                    self.retry_or_raise(error)

    def seek(self, position: int, /) -> None:
        """Go on elsewhere; a short way ahead the connection is kept."""
        response = self._response
        if response is not None and (
            not 0 <= position - self.position <= SKIP
            or (response.end is not None and position >= response.end)
        ):
            self.close()
        self.position = position

    def close(self) -> None:
        """Drop the connection, or leave it to others: what it still brings cannot be asked for."""
        response = self._response
        if response is not None and response.whole and response.position != response.end:
            self._response = None
            self.storage.leave(response)
        self._drop()

    def _drop(self) -> None:
        if self._response is not None:
            self._response.exchange.close()
            self._response = None

    def _answer(self) -> _Response | None:
        """The answer that has what comes next, or None if the file ends here."""
        size = self.storage.size
        if size is not None and self.position >= size:
            return None
        response = self._response
        if response is not None and response.position == response.end:
            # Less than was asked for. A few bytes at a time, a server could go on for ever.
            if response.position - response.start < SLOWEST:
                raise ConnectionError
            self.close()
            response = None
        if response is None:
            response = self._response = self.storage.request(self.position, self.stop)
        # What a server sends that knows no ranges, or a short gap, is read over.
        while response is not None and (gap := self.position - response.position) > 0:
            skipped = memoryview(bytearray(min(gap, RECEIVED)))
            if not self.storage.count(response.readinto(skipped)):
                raise ConnectionError
        return response

    def retry_or_raise(self, error: OSError | StatusError) -> None:
        """Wait before the next attempt, or give up."""
        if self.position - self._last_failure >= SKIP:
            self._failures = 0
        self._last_failure = self.position
        pause = min(FIRST_PAUSE * 2 ** min(self._failures, 10), LONGEST_PAUSE)
        if isinstance(error, StatusError):
            message, final = str(error), error.status not in RETRIED
            pause = max(pause, _retry_after(error))
        else:
            message, final = _cause(error), not self.storage.answered and not _transient(error)
        status = error.status if isinstance(error, StatusError) else None
        if final:
            raise RemoteError(f"{self.storage.name}: {message}", status=status) from None
        self._failures += 1
        if self._failures > self.storage.policy.retries:
            raise RemoteError(
                f"{self.storage.name}: {message} at byte {self.position}; gave up after "
                f"{self._failures} attempts",
                status=status,
            ) from None
        time.sleep(pause)


def _transient(error: OSError) -> bool:
    """Whether it may be better at the next attempt, although no attempt was good before."""
    return isinstance(error, TimeoutError | ConnectionError | ssl.SSLError) and not isinstance(
        error, ConnectionRefusedError
    )


def _cause(error: OSError) -> str:
    """Why a connection failed, without what a library might quote of the URL."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    if isinstance(error, ConnectionError | ssl.SSLError):
        return "the connection broke"
    return error.strerror or type(error).__name__


def _retry_after(error: StatusError) -> float:
    text = error.headers.get("retry-after", "")
    return min(float(text), LONGEST_PAUSE) if re.fullmatch("[0-9]{1,6}", text) else 0.0
