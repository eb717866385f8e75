"""What an HTTP server may answer: bytes for each connection, and after them a good server.

An input is a byte of options and records: if the options say so a URL, else answers, one for each
connection. Whatever they are, the client ends with an error of its own or with the right bits; it
sends nothing but requests, and a password to nobody but the server that it is for.
"""

import contextlib
import io
import random
import re
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, cast
from unittest import mock

import numpy as np
from internals import _http as _remote
from internals import _http_client as _http
from internals import _storage

import elsa_format as elsa

END = b"\x1e"
"""Between records."""
HOST = "example.org"
SECRET = "pa55w0rd"
URL = f"http://me:{SECRET}@{HOST}/net.safetensors?key={SECRET}"
PROXY = f"http://me:{SECRET}@proxy.example:3128"
IS_URL, SILENT, BY_PROXY, NO_RANGES, NO_LENGTH = 1, 2, 4, 8, 16
"""Options: the first record is a URL; what ends stays open; and how the good server is."""
USERS = ("", f"me:{SECRET}@", f"me:pa/{SECRET}@", f"me:pa?{SECRET}@")
"""Before the URL of a record, as the highest bits of the options say; some are mistakes."""

_REQUEST = re.compile(rb"(?:GET|CONNECT) [!-~]+ HTTP/1\.1\r\n(?:[A-Za-z-]+: [ -~]+\r\n)+\r\n")


@cache
def content() -> bytes:
    """The file that is there: of three requests, as little as is fetched at once here."""
    rng = np.random.default_rng(3)
    out = io.BytesIO()
    elsa.pack({"w": rng.standard_normal((8, 16)).astype(np.float32)}, out, sparsities=[75, 50])
    return out.getvalue()


@cache
def _bits() -> bytes:
    return elsa.open(io.BytesIO(content())).load(1)["w"].tobytes()


class _Network:
    """All there is to connect to."""

    def __init__(self, options: int, answers: Sequence[bytes]) -> None:
        self.options, self.answers = options, list(answers)
        self.requests = 0
        self.origin: tuple[str, bool] | None = None
        """Whom the password is for: the server that is asked first."""

    def connect(self, address: tuple[str, int], timeout: float) -> "_Connection":
        return _Connection(self, address)

    def answer(self, request: bytes) -> bytes:
        """The next of the input's answers, then right ones."""
        self.requests += 1
        # Three ranges, each tried three times, over five redirects, each perhaps by a proxy.
        if self.requests > 4 * 3 * 3 * 6:
            raise AssertionError("asks without end")
        if self.answers:
            return self.answers.pop(0)
        return good_answer(request, self.options)


class _Connection:
    """As much of a socket as the client uses."""

    def __init__(self, network: _Network, address: tuple[str, int]) -> None:
        self.network, self.address, self.encrypted = network, address, False
        self.answer = io.BytesIO()

    def sendall(self, data: bytes) -> None:
        if not _REQUEST.fullmatch(data):
            raise AssertionError(f"sent {data[:300]!r}")
        head = data.decode().lower()
        to_proxy = self.address[0] == "proxy.example"
        if "\r\nproxy-authorization:" in head and not to_proxy:
            raise AssertionError("sent the proxy's password to a server")
        if head.startswith("get "):
            origin = (head.partition("\r\nhost: ")[2].partition("\r\n")[0], self.encrypted)
            self.network.origin = self.network.origin or origin
            if "\r\nauthorization:" in head and origin != self.network.origin:
                raise AssertionError(f"sent the password to {self.address}")
        self.answer = io.BytesIO(self.network.answer(data))

    def recv(self, size: int) -> bytes:
        data = self.answer.read(size)
        if not data and self.network.options & SILENT:
            raise TimeoutError
        return data

    def recv_into(self, view: memoryview) -> int:
        data = self.recv(len(view))
        view[: len(data)] = data
        return len(data)

    def has_more(self) -> bool:
        """Whether bytes wait that nobody has read."""
        return self.answer.tell() < len(self.answer.getbuffer())

    def close(self) -> None:
        """There is nothing to close."""


def good_answer(request: bytes, options: int = 0) -> bytes:
    """What a good server says."""
    if request.startswith(b"CONNECT"):
        return b"HTTP/1.1 200 OK\r\n\r\n"
    whole = content()
    found = re.search(rb"\r\nRange: bytes=(\d+)-(\d*)\r\n", request)
    assert found is not None
    first = int(found[1])
    last = min(int(found[2] or len(whole)), len(whole) - 1)
    length = b"" if options & NO_LENGTH else b"Content-Length: %d\r\n"
    if options & NO_RANGES:
        stated = length % len(whole) if length else b""
        return b"HTTP/1.1 200 OK\r\n" + stated + b'ETag: "1"\r\n\r\n' + whole
    if first > last:
        return b"HTTP/1.1 416 Range Not Satisfiable\r\nContent-Range: bytes */%d\r\n\r\n" % len(
            whole
        )
    part = whole[first : last + 1]
    stated = b"Content-Range: bytes %d-%d/%d\r\n" % (first, last, len(whole))
    stated += length % len(part) if length else b""
    return b"HTTP/1.1 206 Partial Content\r\n" + stated + b'ETag: "1"\r\n\r\n' + part


@contextlib.contextmanager
def _alone(network: _Network) -> Iterator[None]:
    """With this network and no other, and without waiting."""

    def encrypt(connection: _Connection, host: str, where: str) -> _Connection:
        connection.encrypted = True
        return connection

    proxies = {"http": PROXY, "https": PROXY} if network.options & BY_PROXY else {}
    with (
        mock.patch.object(socket, "create_connection", network.connect),
        mock.patch.object(_http, "_encrypt", encrypt),
        mock.patch.object(_http, "_has_more", _Connection.has_more),
        mock.patch.object(urllib.request, "getproxies", return_value=proxies),
        mock.patch.object(urllib.request, "proxy_bypass", return_value=False),
        mock.patch.object(time, "sleep"),
        mock.patch.object(_remote, "HEAD", 256),
    ):
        yield


def http_answers(data: bytes) -> None:
    """An error of ours, in one line and without secrets, or the right bits."""
    options, records = data[0] if data else 0, data[1:].split(END)
    url = URL
    if options & IS_URL:
        user = USERS[options >> 6]
        url = f"http://{user}" + records.pop(0).decode("utf-8", "surrogateescape")
    network = _Network(options, records if records != [b""] else [])
    with _alone(network):
        try:
            policy = _remote.RetryPolicy(5.0, 2)
            storage = _remote.HttpStorage(url, policy)
            reader = storage.reader(0, 1 << 40)
            found = b"".join(iter(lambda: reader.read(100), b""))
            with mock.patch.object(
                _storage, "open_url", lambda url: _remote.HttpStorage(url, policy)
            ):
                network.answers = records[: 2 if options & IS_URL else 3]
                loaded = elsa.open(url).load(1)["w"].tobytes()
        except elsa.ElsaError as error:
            message = str(error)
            secret = SECRET in message and SECRET.encode() not in data
            if not message.isprintable() or len(message) > 1000 or secret:
                raise AssertionError(f"message {message!r}") from error
            return
    if loaded != _bits():
        raise AssertionError("other bits")
    if not options & IS_URL and not records and found != content():
        raise AssertionError("other bytes")


def bodies(data: bytes) -> None:
    """A body is what its length or its chunks say, whole or not at all."""
    for raw in data[1:].split(END):
        with _alone(_Network(0, [raw])):
            try:
                exchange = _http.Exchange(_http.parse_url(URL, ""), {"X": "y"}, 5.0, "x")
            except (elsa.ElsaError, OSError):
                continue
            if exchange.status not in (200, 206):
                continue
            sent = cast(Any, exchange)
            body = raw[sent._socket.answer.tell() - len(sent._wire._ahead) :]
            found = None
            with contextlib.suppress(elsa.ElsaError, OSError):
                found = _read(exchange)
        expected: bytes | None = body
        if "chunked" in exchange.headers.get("transfer-encoding", "").lower():
            expected = _join(body)
        elif exchange.length is not None:
            expected = body[: exchange.length] if len(body) >= exchange.length else None
        if found != expected:
            raise AssertionError(f"a body of {found!r}, expected {expected!r}")


def _read(exchange: _http.Exchange) -> bytes:
    found, buffer = b"", memoryview(bytearray(97))
    while count := exchange.readinto(buffer):
        found += buffer[:count]
    return found


_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[^\n]{,60000})?\r*\n")
_CHUNK_END = re.compile(rb"\r*\n")


def _join(body: bytes) -> bytes | None:
    """What chunks hold; None if one is wrong, or the last is missing."""
    joined, at = b"", 0
    while found := _CHUNK.match(body, at):
        start, size = found.end(), int(found[1], 16)
        if not size:
            return joined
        joined += body[start : start + size]
        end = _CHUNK_END.match(body, start + size) if start + size <= len(body) else None
        if end is None:
            break
        at = end.end()
    return None


def answers(data: bytes) -> None:
    """Both properties."""
    http_answers(data)
    if data and not data[0] & IS_URL:
        bodies(data)


# --- Where to start from, and how to go on -------------------------------------------------------


def _chunked(body: bytes, size: int) -> bytes:
    parts = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (*parts, b""))


def seeds() -> list[bytes]:
    """Good answers to the requests in their order, odd ones, redirects, URLs."""
    whole = content()
    ranges = [(0, 256), (256, len(whole)), (len(whole) - 300, len(whole))]
    requests = [b"\r\nRange: bytes=%d-%d\r\n" % (first, stop - 1) for first, stop in ranges]
    ok = b"HTTP/1.1 200 OK\r\n"
    found = [b"\x00" + END.join(good_answer(r, o) for r in requests) for o in (0, NO_LENGTH)]
    found += [
        bytes([options]) + END.join([ok + head + b"\r\n" + body] * 2)
        for options in (0, SILENT, BY_PROXY, NO_RANGES, NO_LENGTH)
        for head, body in (
            (b"Content-Length: %d\r\n" % len(whole), whole),
            (b"Transfer-Encoding: chunked\r\n", _chunked(whole, 300)),
            (b'ETag: W/"1"\r\nLast-Modified: Mon, 01 Jan 2024 00:00:00 GMT\r\n', whole),
        )
    ]
    found += [
        b"\x00HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 302 Found\r\nLocation: " + place + b"\r\n\r\n"
        for place in PLACES
    ]
    found += [b"\x00HTTP/1.1 503 x\r\nRetry-After: 7\r\n\r\n", b"\x00", b"\x02", b"\x04"]
    urls = [place.partition(b"//")[2] for place in PLACES]
    return found * 2 + [bytes([1 + 64 * (at % 4)]) + url for at, url in enumerate(urls)]


PLACES = (
    *(b"http://example.org/x", b"https://example.org:443/x", b"//other.example/x", b"/x?y#z", b"x"),
    *(b"http://u:p@other.example:8080/x", b"http://[::1]/x", b"http://[::1/x", b"http://a..b/"),
    *(b"http://\xc3\xa9.example/\xc3\xa9 \xe9", b"http://h:99999/", b"ftp://h/x", b"http://h:x/"),
    *(b"http://" + b"a" * 300 + b"/", b"http://a%20b/%zz", b"http://[fe80::1%25e]/", b"http:x"),
    *(
        b"HTTP://EXAMPLE.ORG/../x",
        b"https:///x",
        b"http://\xe2\x84\x80/",
        b"?",
        b"\x00",
        b"data:,x",
    ),
)
HEADERS = (
    *(b"Content-Length: 5", b"Content-Length: -1", b"Content-Length: 99999999999999999999"),
    *(b"Content-Length: 0x5", b"Content-Length:", b"Content-Range: bytes 0-255/2000"),
    *(b"Content-Range: bytes */5", b"Content-Range: bytes 0-0/*", b"Content-Range: bytes 9-1/5"),
    *(b"Transfer-Encoding: chunked", b"Transfer-Encoding: gzip, chunked", b"Transfer-Encoding:"),
    *(b"Content-Encoding: gzip", b"Content-Encoding: identity", b'ETag: "2"', b'ETag: W/"1"'),
    *(b"Last-Modified: x", b"Retry-After: 1e9", b"Retry-After: 9999999", b" folded", b"\tfolded"),
    *(
        b"no colon",
        b":",
        b"X: " + b"y" * 70_000,
        b"Content-Type: multipart/byteranges",
        b"\xff: \x00",
    ),
    *(
        b"Content-Length : 5",
        b"Connection: keep-alive",
        *(b"Location: " + place for place in PLACES),
    ),
)
STATUSES = (
    *(
        b"HTTP/1.1 200 OK",
        b"HTTP/1.0 206",
        b"HTTP/1.1 100 Continue",
        b"HTTP/1.1 103 x",
        b"HTTP/1.1 101",
    ),
    *(
        b"HTTP/1.1 204 x",
        b"HTTP/1.1 304 x",
        b"HTTP/1.1 302 x",
        b"HTTP/1.1 416 x",
        b"HTTP/1.1 503 x",
    ),
    *(
        b"HTTP/2 200 OK",
        b"HTTP/1.1 2000 x",
        b"HTTP/1.1 -1 x",
        b"ICY 200 OK",
        b"",
        b"HTTP/1.1 404 x",
    ),
)
SIZES = (
    b"0",
    b"5",
    b"-5",
    b"+5",
    b"0x5",
    b"1_0",
    b"",
    b" 5",
    b"5 ;x",
    b"f" * 15,
    b"f" * 16,
    b"5\r",
)


def mutate(data: bytes, rng: random.Random, others: Sequence[bytes] = ()) -> bytes:
    """A changed copy: lines, records and options, or any bytes."""
    options, records = data[:1] or b"\0", data[1:].split(END)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(records))
        kind = rng.randrange(8)
        if kind == 0:
            options = bytes([rng.randrange(256) & ~IS_URL | options[0] & IS_URL])
        elif kind == 1:
            other = rng.choice(others)[1:].split(END) if others else records
            records.insert(at, rng.choice(other))
        elif kind == 2 and len(records) > 1:
            del records[at]
        elif kind == 3:
            records[at] = records[at][: rng.randrange(len(records[at]) + 1)]
        elif kind < 7:
            records[at] = _lines(records[at], rng)
        else:
            records[at] = _bytes(records[at], rng)
    return options + END.join(records)


def _lines(record: bytes, rng: random.Random) -> bytes:
    lines = record.split(b"\r\n")
    body = lines.index(b"") if b"" in lines else len(lines)
    at = rng.randrange(body + 1)
    choices: tuple[Callable[[], None], ...] = (
        lambda: lines.insert(at, rng.choice(HEADERS)),
        lambda: lines.insert(at, lines[rng.randrange(len(lines))]),
        lambda: lines.__setitem__(0, rng.choice(STATUSES)),
        lambda: lines.__delitem__(slice(at, at + 1)),
        lambda: lines.insert(rng.randrange(len(lines) + 1), rng.choice(SIZES)),
        lambda: lines.insert(0, rng.choice(STATUSES) + b"\r\n"),
        lambda: lines.__setitem__(rng.randrange(len(lines)), rng.choice(SIZES)),
    )
    rng.choice(choices)()
    return rng.choice((b"\r\n",) * 9 + (b"\n",)).join(lines)


def _bytes(record: bytes, rng: random.Random) -> bytes:
    raw = bytearray(record)
    at = rng.randrange(len(raw) + 1)
    kind = rng.randrange(4)
    if kind == 0:
        raw[at : at + 1] = bytes([rng.randrange(256)])
    elif kind == 1:
        raw[at:at] = rng.choice(
            (b"\0", b"\r", b"\n", b"\x80", b"\xc3\xa9", b"%", b"@", b":", b"/", b"[")
        )
    elif kind == 2:
        del raw[at : at + rng.choice((1, 2, 50))]
    else:
        digits = [m.span() for m in re.finditer(rb"\d+", raw[:400])]
        if digits:
            start, stop = rng.choice(digits)
            raw[start:stop] = rng.choice((b"0", b"1", b"256", b"2000", b"-1", b"9" * 19, b"9" * 30))
    return bytes(raw)
