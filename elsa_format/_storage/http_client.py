"""HTTP/1.1, as much of it as reading a file takes: URLs, the way to a server, what it answers.

By hand, because a hostile server must get no further than one line of complaint. The standard
library takes a negative chunk size for all there is and any two bytes for the end of a chunk, and
follows headers, interim answers and the body of a redirect for ever.
"""

import contextlib
import http
import ipaddress
import re
import select
import socket
import ssl
import time
import urllib.request
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from urllib.parse import quote, unquote_to_bytes, urljoin

from elsa_format._container.index import AUTHORITY, redact
from elsa_format._errors import RemoteError
from elsa_format._threads import Renewed

MAX_URL = 64 << 10
MAX_HEAD = 64 << 10
"""Bytes of an answer before its body, interim answers included; also of the line of a chunk."""
RECEIVED = 4 << 10
"""Most bytes taken from a connection at once while there are lines to read."""
MAX_REDIRECTS = 5
IDLE = 4
"""Connections that are kept for later requests."""
SLOWEST = 1 << 10
"""Bytes of a body that must arrive within the time-out: a byte now and then is silence, too."""

_PORTS = {"http": 80, "https": 443}
_URL = re.compile(r"(https?)://(?:([^/?#]*)@)?([^/?#]*)([^?#]*)(\?[^#]*)?(?:#.*)?", re.I)
_ASCII_HOST = re.compile(r"[A-Za-z0-9._-]+")
_SAFE = "%/:@!$&'()*+,;=~[]"
"""Characters that stand for themselves in a path, beside letters, digits and ._-"""

_STATUS = re.compile(rb"HTTP/1\.([0-9]) ([0-9]{3})(?:[ \t].*)?")
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;.*)?")
_FILE = frozenset({200, 206})
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_KEPT = frozenset(
    (
        *("content-encoding", "content-length", "content-range", "content-type", "etag"),
        *("last-modified", "location", "retry-after", "transfer-encoding"),
    )
)


class StatusError(Exception):
    """An answer that is not the file."""

    def __init__(self, status: int, headers: Mapping[str, str], who: str = "the server") -> None:
        phrase = ""
        with contextlib.suppress(ValueError):
            phrase = f" {http.HTTPStatus(status).phrase}"
        super().__init__(f"{who} answered {status}{phrase}")
        self.status, self.headers = status, headers


@dataclass(frozen=True)
class Url:
    """A URL that can be asked for."""

    scheme: str
    host: str
    """A name or an address in ASCII, without brackets."""
    port: int
    target: str
    """Path and query as they are sent."""
    authorization: str | None = field(default=None, repr=False)
    """The header that carries user and password."""

    @property
    def origin(self) -> tuple[str, str, int]:
        """Whom a password is meant for."""
        return self.scheme, self.host, self.port

    @property
    def authority(self) -> str:
        """Host and port as a header and a URL have them."""
        host = f"[{self.host.partition('%')[0]}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}{self.target}"


def parse_url(text: str, where: str) -> Url:
    """Check a URL and encode what may not stand in one.

    >>> str(parse_url("HTTP://me:pw@Bücher.example:80/große Netze/ü.safetensors?a=é#top", ""))
    'http://xn--bcher-kva.example/gro%C3%9Fe%20Netze/%C3%BC.safetensors?a=%C3%A9'
    """
    if len(text) > MAX_URL:
        raise RemoteError(f"{where}: a URL of {len(text)} characters, expected at most {MAX_URL}")
    if control := re.search(r"[\x00-\x1f\x7f]", text):
        raise RemoteError(f"{where}: the URL has the control character {control[0]!r}")
    found = _URL.fullmatch(text)
    if found is None:
        raise RemoteError(f"{where}: the URL is neither http:// nor https://")
    scheme, user, authority, path, query = found.groups("")
    scheme = scheme.lower()
    hint = "; in a user or password write / as %2F, ? as %3F, # as %23" if "@" in text else ""
    places = AUTHORITY.fullmatch(authority)
    if not authority or (places is not None and not places[1]):
        raise RemoteError(f"{where}: the URL names no host")
    host = _host(places[1]) if places else None
    if places is None or host is None:
        raise RemoteError(f"{where}: the URL names no valid host{hint}")
    port = places[2] or str(_PORTS[scheme])
    if not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 1 << 16:
        raise RemoteError(f"{where}: the port in the URL is not a number from 1 to 65535{hint}")
    try:
        target = _encode(path or "/", _SAFE) + _encode(query, _SAFE + "?")
        secret = unquote_to_bytes(user.encode("utf-8", "surrogateescape"))
    except UnicodeEncodeError:
        raise RemoteError(f"{where}: the URL is not Unicode text") from None
    if user and b":" not in secret:
        secret += b":"
    authorization = f"Basic {b64encode(secret).decode()}" if user else None
    return Url(scheme, host, int(port), target, authorization)


def _host(text: str) -> str | None:
    """A name or address as the resolver takes it, or None."""
    if text.startswith("["):
        address = text[1:-1].replace("%25", "%")
        try:
            ipaddress.IPv6Address(address)
        except ValueError:
            return None
        return address if _ASCII_HOST.fullmatch(re.sub("[:%]", "", address)) else None
    if len(text) > 253:
        return None
    try:
        name = text.encode("idna").decode().lower()
    except UnicodeError:  # an empty label, one of more than 63 characters, no Unicode
        return None
    return name if _ASCII_HOST.fullmatch(name) else None


def _encode(text: str, safe: str) -> str:
    # A lone % stands for itself; bytes of the command line that are no UTF-8 stay what they are.
    text = re.sub(r"%(?![0-9A-Fa-f]{2})", "%25", text)
    return quote(text, safe, "utf-8", "surrogateescape")


class Connections(Renewed):
    """Connections whose answers were read to their end, kept for the next requests."""

    def __init__(self) -> None:
        self._idle: list[tuple[object, socket.socket]] = []
        self._most = IDLE
        super().__init__()

    def renew(self) -> None:
        """Drop all: a forked child must not read what its parent asked for."""
        while self._idle:
            self._idle.pop()[1].close()

    def take(self, end: object) -> socket.socket | None:
        """One that leads to the same end, if nothing has come over it since."""
        with contextlib.suppress(ValueError):  # another thread took it
            for kept in reversed(self._idle):
                if kept[0] == end:
                    self._idle.remove(kept)
                    if not _has_more(kept[1]):
                        return kept[1]
                    kept[1].close()  # the server closed it, or sends what nobody asked for
        return None

    def give(self, end: object, connection: socket.socket) -> None:
        """Keep one, in place of the oldest if there are many."""
        self._idle.append((end, connection))
        while len(self._idle) > self._most:
            self._idle.pop(0)[1].close()

    def close(self) -> None:
        """Keep none any more."""
        self._most = 0
        self.renew()


def _has_more(connection: socket.socket) -> bool:
    """Whether bytes or the end of a connection wait to be read."""
    if isinstance(connection, ssl.SSLSocket) and connection.pending():
        return True
    return bool(select.select([connection], [], [], 0)[0])


class Exchange:
    """One request and the answer to it, of which the body is still to be read."""

    def __init__(
        self,
        url: Url,
        headers: Mapping[str, str],
        timeout: float,
        where: str,
        connections: Connections | None = None,
    ) -> None:
        self._timeout, self._waited, self._received = timeout, 0.0, 0
        proxy = _proxy(url, where)
        self._end, self._connections = (url.origin, proxy), connections
        request = _request(url, headers, proxy)
        used = connections.take(self._end) if connections else None
        if used is None or not self._ask(used, request, where, used=True):
            self._ask(_connect(url, proxy, timeout, where), request, where)

    def _ask(
        self, connection: socket.socket, request: bytes, where: str, *, used: bool = False
    ) -> bool:
        """Send the request; False if a connection that was used before is closed by now."""
        self._socket: socket.socket | None = connection
        self._wire = _Wire(connection, self._timeout, where)
        try:
            try:
                connection.sendall(request)
                self.status, self.headers = self._wire.head()
            except (ConnectionError, ssl.SSLError):
                if not used or self._wire.answered:
                    raise
                connection.close()
                return False
            self.length: int | None = None
            """Bytes of the body, where that is said."""
            self._chunked = False
            if self.status in _FILE:
                self._frame(where)
            self._left: int | None = self.length
        except BaseException:
            connection.close()
            raise
        return True

    def _frame(self, where: str) -> None:
        """Find out how the end of the body is told; chunks count more than a length."""
        coding = self.headers.get("transfer-encoding", "identity").lower()
        length = self.headers.get("content-length")
        if coding not in ("chunked", "identity"):
            raise RemoteError(f"{where}: the server sends it encoded as {coding!r}")
        self._chunked = coding == "chunked"
        if length is None or self._chunked:
            return
        if not re.fullmatch("[0-9]{1,19}", length):
            raise RemoteError(f"{where}: the server answered with length {length!r}")
        self.length = int(length)

    def readinto(self, view: memoryview) -> int:
        """Bytes of the body as they come, none at its end."""
        if self._waited > self._timeout:
            if self._received < SLOWEST:
                raise TimeoutError
            self._waited, self._received = 0.0, 0
        begin = time.monotonic()
        if self._chunked and not self._left:
            self._next_chunk()
        count = self._wire.readinto(view if self._left is None else view[: self._left])
        if self._left is not None:
            if not count and self._left:
                raise ConnectionError
            self._left -= count
        self._waited += time.monotonic() - begin
        self._received += count
        return count

    def _next_chunk(self) -> None:
        self._left = self._wire.chunk(first=self._left is None)
        if not self._left:
            self._chunked = False  # trailers are not waited for: the connection is not kept

    def close(self) -> None:
        """Keep the connection for others if the whole answer was read; else drop it."""
        connection, self._socket = self._socket, None
        if connection is None:
            return
        whole = self.length is not None and not self._left
        if whole and self._wire.persistent and self._connections is not None:
            self._connections.give(self._end, connection)
        else:
            connection.close()


class _Wire:
    """What comes over a connection, of which the lines are few bytes, and all of them in time."""

    def __init__(self, connection: socket.socket, timeout: float, where: str) -> None:
        self._socket, self._timeout, self._where = connection, timeout, where
        self._ahead = bytearray()
        self.answered = False
        """Whether any byte came."""
        self._version, self._closes = b"0", False

    @property
    def persistent(self) -> bool:
        """Whether another request can be sent when the body was read."""
        return self._version > b"0" and not self._closes and not self._ahead

    def head(self) -> tuple[int, dict[str, str]]:
        """Status and headers, after what a server says in between."""
        self._begin()
        while True:
            line = self._line(b"HTTP/1.")
            found = _STATUS.fullmatch(line)
            if found is None:
                raise self._malformed(line)
            self._version = found[1]
            status, headers = int(found[2]), self._headers()
            if status // 100 != 1 or status == 101:
                return status, headers

    def _headers(self) -> dict[str, str]:
        headers: dict[str, str] = {}
        name = ""
        while line := self._line():
            if line[:1] in b" \t":  # the line before goes on
                if name in headers:
                    headers[name] = f"{headers[name]} {_text(line)}".strip()
                continue
            before, colon, after = line.partition(b":")
            if not colon:
                raise self._malformed(line)
            name, value = _text(before).lower(), _text(after)
            if name == "connection" and "close" in value.lower():
                self._closes = True
            if headers.get(name, value) != value:
                raise RemoteError(f"{self._where}: the server answered with two {name} headers")
            if name in _KEPT:
                headers[name] = value
        return headers

    def chunk(self, *, first: bool) -> int:
        """How many bytes come next; 0 means that it was the last chunk."""
        self._begin()
        if not first and (rest := self._line()):
            raise self._malformed(rest)
        line = self._line()
        found = _CHUNK.fullmatch(line)
        if found is None:
            raise self._malformed(line)
        return int(found[1], 16)

    def readinto(self, view: memoryview) -> int:
        """What came with the lines, else what comes: nothing is lost if nothing more does."""
        if not self._ahead:
            return self._socket.recv_into(view) if view else 0
        count = min(len(view), len(self._ahead))
        view[:count] = self._ahead[:count]
        del self._ahead[:count]
        return count

    def _begin(self) -> None:
        self._room, self._due = MAX_HEAD, time.monotonic() + self._timeout

    def _line(self, start: bytes = b"") -> bytes:
        """A line without its end; what begins otherwise than with `start` is not waited for."""
        while not (end := self._ahead.find(b"\n") + 1):
            if not self._ahead.startswith(start[: len(self._ahead)]):
                raise self._malformed(bytes(self._ahead))
            if len(self._ahead) > self._room:
                break
            if time.monotonic() > self._due:
                raise TimeoutError
            data = self._socket.recv(RECEIVED)
            if not data:
                raise ConnectionError
            self.answered = True
            self._ahead += data
        if not 0 < end <= self._room:
            raise RemoteError(f"{self._where}: more than {MAX_HEAD} bytes of headers")
        line = bytes(self._ahead[:end])
        del self._ahead[:end]
        self._room -= end
        return line.rstrip(b"\r\n")

    def _malformed(self, line: bytes) -> RemoteError:
        return RemoteError(
            f"{self._where}: the server sends {_text(line[:40])!r}, which is no HTTP"
        )


def _text(raw: bytes) -> str:
    return raw.strip(b" \t").decode("utf-8", "surrogateescape")


def get(
    url: Url,
    headers: Mapping[str, str],
    timeout: float,
    where: str,
    connections: Connections | None = None,
) -> Exchange:
    """Ask for a URL, and for what it redirects to; raises StatusError where there is no file."""
    asked = url
    for _ in range(MAX_REDIRECTS + 1):
        exchange = Exchange(asked, headers, timeout, where, connections)
        if exchange.status in _FILE:
            return exchange
        exchange.close()
        location = exchange.headers.get("location")
        if exchange.status not in _REDIRECTS or location is None:
            raise StatusError(exchange.status, exchange.headers)
        asked = _follow(asked, url, location, where)
    raise RemoteError(
        f"{where}: redirected further and further (at most {MAX_REDIRECTS} redirects)"
    )


def _follow(url: Url, first: Url, location: str, where: str) -> Url:
    with contextlib.suppress(ValueError):  # brackets; what is wrong with them is said below
        location = urljoin(str(url), location)
    refused = f"{where}: refused to follow a redirect to {redact(location)}"
    target = parse_url(location, refused)
    if (url.scheme, target.scheme) == ("https", "http"):
        raise RemoteError(f"{refused}: it is not encrypted")
    # A password goes to the server that it was given for, and to no other that a way leads over.
    secret = first.authorization if target.origin == first.origin else None
    return Url(*target.origin, target.target, secret)


def _request(url: Url, headers: Mapping[str, str], proxy: Url | None) -> bytes:
    lines = [f"GET {url.target} HTTP/1.1", f"Host: {url.authority}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    lines += ["Accept-Encoding: identity", "User-Agent: elsa-format"]
    if url.authorization:
        lines.append(f"Authorization: {url.authorization}")
    if proxy is not None and url.scheme == "http":
        lines[0] = f"GET {url} HTTP/1.1"
        if proxy.authorization:
            lines.append(f"Proxy-Authorization: {proxy.authorization}")
    return "\r\n".join([*lines, "", ""]).encode("ascii")


def _proxy(url: Url, where: str) -> Url | None:
    """The environment's proxy for a URL."""
    text = urllib.request.getproxies().get(url.scheme)
    if not text or urllib.request.proxy_bypass(url.authority):
        return None
    if "://" not in text:
        text = f"http://{text}"
    return parse_url(text, f"{where}: proxy {redact(text)}")


def _connect(url: Url, proxy: Url | None, timeout: float, where: str) -> socket.socket:
    """A connection on which to ask for a URL."""
    nearest = proxy or url
    connection = socket.create_connection((nearest.host, nearest.port), timeout)
    try:
        if proxy is not None and url.scheme == "https":
            _tunnel(connection, url, proxy, timeout, where)
            nearest = url
        if nearest.scheme == "https":
            return _encrypt(connection, nearest.host, where)
    except BaseException:
        connection.close()
        raise
    return connection


def _tunnel(connection: socket.socket, url: Url, proxy: Url, timeout: float, where: str) -> None:
    end = f"[{url.host}]:{url.port}" if ":" in url.host else f"{url.host}:{url.port}"
    lines = [f"CONNECT {end} HTTP/1.1", f"Host: {end}"]
    if proxy.authorization:
        lines.append(f"Proxy-Authorization: {proxy.authorization}")
    connection.sendall("\r\n".join([*lines, "", ""]).encode("ascii"))
    status, headers = _Wire(connection, timeout, where).head()
    if status // 100 != 2:
        raise StatusError(status, headers, "the proxy")


def _encrypt(connection: socket.socket, host: str, where: str) -> socket.socket:
    try:
        return _tls().wrap_socket(connection, server_hostname=host.partition("%")[0])
    except ssl.SSLCertVerificationError as error:
        raise RemoteError(
            f"{where}: the certificate of {host} is not valid: {error.verify_message}"
        ) from None
    except (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError):
        raise ConnectionError from None
    except ssl.SSLError as error:
        reason = (error.reason or type(error).__name__).replace("_", " ").lower()
        raise RemoteError(f"{where}: no encrypted connection to {host}: {reason}") from None


@cache
def _tls() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context
