"""Answers that no good server gives, and some that only look so."""

import re
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from bits import same_bits
from faulty_server import (
    Request,
    Server,
    chunked,
    cut_after,
    fine,
    raw,
    stall,
    status,
)
from internals import _http as _remote
from internals import _http_client as _http

import elsa_format as elsa

TIMEOUT = 5


def answer(*headers: bytes, first: bytes = b"HTTP/1.1 200 OK", body: bytes = b"") -> bytes:
    return b"\r\n".join([first, *headers, b"", body])


CHUNKED = b"Transfer-Encoding: chunked"

REFUSED: dict[str, tuple[bytes, str]] = {
    "another protocol": (b"SSH-2.0-OpenSSH_9.6\r\n", "sends 'SSH-2.0-OpenSSH_9.6', which is no"),
    "an alert of TLS": (b"\x15\x03\x03\x00\x02\x02\x46", "which is no HTTP"),
    "an empty line": (b"\r\n", "which is no HTTP"),
    "a version that is none": (answer(first=b"HTTP/2 200"), "'HTTP/2 200', which is no HTTP"),
    "a status of letters": (answer(first=b"HTTP/1.1 OK 200"), "which is no HTTP"),
    "a status with a sign": (answer(first=b"HTTP/1.1 +20 OK"), "which is no HTTP"),
    "a status with an underscore": (answer(first=b"HTTP/1.1 2_0 OK"), "which is no HTTP"),
    "a status of four digits": (answer(first=b"HTTP/1.1 2000 OK"), "which is no HTTP"),
    "a status line of 70 kB": (answer(first=b"HTTP/1.1 200 " + b"x" * 70_000), "65536 bytes"),
    "a header of 70 kB": (answer(b"X: " + b"x" * 70_000), "more than 65536 bytes of headers"),
    "6000 headers": (answer(*[b"X: 01234567"] * 6000), "more than 65536 bytes of headers"),
    "a header without a name": (answer(b"no colon at all"), "'no colon at all', which is no HTTP"),
    "switching protocols": (answer(first=b"HTTP/1.1 101 x"), "answered 101 Switching Protocols"),
    "no content": (answer(first=b"HTTP/1.1 204 x"), "answered 204 No Content"),
    "not modified": (answer(first=b"HTTP/1.1 304 x"), "answered 304 Not Modified"),
    "choices": (answer(b"Location: /", first=b"HTTP/1.1 300 x"), "answered 300 Multiple Choices"),
    "a status nobody knows": (answer(first=b"HTTP/1.1 999 x"), "answered 999$"),
    "a redirect to nowhere": (answer(first=b"HTTP/1.1 302 x"), "answered 302 Found$"),
    "negative length": (answer(b"Content-Length: -5"), "with length '-5'"),
    "length in hexadecimal": (answer(b"Content-Length: 0x10"), "with length '0x10'"),
    "length of thirty digits": (answer(b"Content-Length: " + b"9" * 30), "with length '999"),
    "a list of lengths": (answer(b"Content-Length: 5, 6"), "with length '5, 6'"),
    "two lengths": (
        answer(b"Content-Length: 5", b"content-length: 6"),
        "two content-length headers",
    ),
    "two etags": (answer(b"ETag: a", b"ETag: b"), "two etag headers"),
    "gzip in chunks": (answer(b"Transfer-Encoding: gzip, chunked"), "encoded as 'gzip, chunked'"),
    "chunked twice": (answer(b"Transfer-Encoding: chunked, chunked"), "encoded as 'chunked, chun"),
    "hardly chunked": (answer(b"Transfer-Encoding: xchunked"), "encoded as 'xchunked'"),
    "compressed": (answer(b"Content-Encoding: GZIP"), "encoded as 'GZIP'"),
    "compressed twice": (answer(b"Content-Encoding: gzip, br"), "encoded as 'gzip, br'"),
    "many ranges": (
        answer(b"Content-Type: multipart/byteranges", first=b"HTTP/1.1 206 x"),
        "answered with range 'multipart/byteranges'",
    ),
    "no range": (answer(first=b"HTTP/1.1 206 x"), "answered with range None"),
    "a range in other digits": (
        answer("Content-Range: bytes 0-٣/٤".encode(), first=b"HTTP/1.1 206 x"),
        "answered with range",
    ),
    **{
        f"a chunk of size {size!r}": (
            answer(CHUNKED, body=size + b"\r\n" + bytes(100) + b"\r\n0\r\n\r\n"),
            "which is no HTTP",
        )
        for size in (b"-5", b"+5", b"0x64", b"6_4", b"", b" 64", b"zz", b"f" * 20, b"64 64")
    },
    "a chunk with a wrong end": (answer(CHUNKED, body=b"2\r\nabXX0\r\n\r\n"), "'XX0', which is no"),
    "a chunk that goes on": (answer(CHUNKED, body=b"2\r\nabc\r\n0\r\n\r\n"), "'c', which is no"),
    "a chunk with a long comment": (
        answer(CHUNKED, body=b"2;" + b"x" * 70_000 + b"\r\nab\r\n0\r\n\r\n"),
        "more than 65536 bytes",
    ),
}


@pytest.mark.parametrize(("bytes_sent", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused_at_once(server: Server, bytes_sent: bytes, message: str) -> None:
    url = server.serve(b"", faults=[raw(bytes_sent)] * 9)
    with pytest.raises(elsa.RemoteError, match=message) as caught:
        elsa.open(url)
    assert str(caught.value).startswith(f"{url}: ")
    assert len(server.requests) == 1, "retried what cannot succeed"


REDIRECTS = {
    "http://[::1/x": "no valid host",
    "http://[fe80::g]/x": "no valid host",
    "http://a..b/": "no valid host",
    "http://.a/": "no valid host",
    f"http://{'a' * 300}/": "no valid host",
    f"http://{'a.' * 300}/": "no valid host",
    "http://a b/": "no valid host",
    "http://ex%61mple/": "no valid host",
    "http://\u2100/": "no valid host",
    "http://a:b/": "port in the URL is not a number",
    "http://127.0.0.1:0/": "port in the URL is not a number",
    "http://127.0.0.1:99999/": "port in the URL is not a number",
    "http://127.0.0.1:-1/": "port in the URL is not a number",
    "https:///x": "names no host",
    "http://@/x": "names no host",
    "http://h/" + "x" * 70_000: "more than 65536 bytes of headers",
    "file:///etc/passwd": "neither http:// nor https://",
    "ftp://127.0.0.1/x": "neither http:// nor https://",
    "data:,x": "neither http:// nor https://",
    "javascript:alert(1)": "neither http:// nor https://",
}


@pytest.mark.parametrize("target", REDIRECTS, ids=lambda target: target[:40])
def test_redirects_to_where_nothing_can_be(server: Server, target: str) -> None:
    sent = answer(f"Location: {target}".encode(), first=b"HTTP/1.1 302 Found")
    url = server.serve(b"", faults=[raw(sent)] * 9)
    with pytest.raises(elsa.RemoteError, match=REDIRECTS[target]) as caught:
        elsa.open(url)
    assert str(caught.value).startswith(url)
    assert len(server.requests) == 1


def test_a_redirect_is_encoded_as_a_url_is(server: Server, content: bytes) -> None:
    server.serve(content, "/gr%C3%BC%C3%9Fe%20an/%E9[1]?a=%C3%A9")
    sent = "Location: /grüße an/".encode() + b"\xe9[1]" + "?a=é#here".encode()
    server.serve(b"", "/a", faults=[raw(answer(sent, first=b"HTTP/1.1 308 x"))] * 2)
    with elsa.open(f"{server.url}/a") as file:
        assert file.file_size == len(content)


ENDLESS: dict[str, tuple[Callable[[Request], object], str]] = {
    "interim answers": (raw(again=b"HTTP/1.1 100 Continue\r\n\r\n" * 99), "65536 bytes of headers"),
    "early hints": (raw(again=b"HTTP/1.1 103 x\r\nLink: x\r\n\r\n"), "65536 bytes of headers"),
    "headers": (raw(answer()[:-2], again=b"X: y\r\n" * 99), "65536 bytes of headers"),
    "one header": (raw(b"HTTP/1.1 200 OK\r\nX: ", again=b"y" * 999), "65536 bytes of headers"),
    "a status line": (raw(b"HTTP/1.1 200 ", again=b"y" * 999), "65536 bytes of headers"),
    "no status line": (raw(again=b"\0" * 999), "which is no HTTP"),
    "the line of a chunk": (raw(answer(CHUNKED), b"5;", again=b"x" * 999), "65536 bytes"),
    "the body of an error": (raw(answer(first=b"HTTP/1.1 404 x"), again=bytes(9999)), "404"),
    "the body of a redirect": (
        raw(answer(b"Location: /", first=b"HTTP/1.1 302 x"), again=bytes(9999)),
        "answered 404",
    ),
}


@pytest.mark.parametrize("case", ENDLESS)
def test_what_never_ends(server: Server, case: str) -> None:
    fault, message = ENDLESS[case]
    url = server.serve(b"", faults=[fault] * 9)
    with pytest.raises(elsa.RemoteError, match=message):
        elsa.open(url)
    assert len(server.requests) == 1 + (case == "the body of a redirect")


def _in_chunks(content: bytes, *, size: int = 30_000) -> bytes:
    return chunked(*(content[at : at + size] for at in range(0, len(content), size)))


def _length(content: bytes) -> bytes:
    return b"Content-Length: %d" % len(content)


ODD: dict[str, Callable[[bytes], bytes]] = {
    "HTTP/1.0": lambda c: answer(_length(c), first=b"HTTP/1.0 200 OK", body=c),
    "no reason": lambda c: answer(_length(c), first=b"HTTP/1.1 200", body=c),
    "line feeds": lambda c: b"HTTP/1.1 200 OK\n" + _length(c) + b"\n\n" + c,
    "interim answers": lambda c: (
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n"
        + answer(_length(c), body=c)
    ),
    "a folded header": lambda c: answer(b"X: 1,", b" 2", b"\t3", _length(c), body=c),
    "a folded length": lambda c: answer(b"Content-Length:", b" %d" % len(c), body=c),
    "spaces": lambda c: answer(b"CONTENT-LENGTH : \t %d \t" % len(c), body=c),
    "the length twice": lambda c: answer(_length(c), _length(c), body=c),
    "a header without a value": lambda c: answer(b"X:", b"ETag:", _length(c), body=c),
    "identity": lambda c: answer(
        _length(c), b"Content-Encoding: Identity", b"Transfer-Encoding: IDENTITY", body=c
    ),
    "no encoding": lambda c: answer(_length(c), b"Content-Encoding:", body=c),
    "in chunks": lambda c: answer(CHUNKED, body=_in_chunks(c)),
    "in chunks of a byte": lambda c: answer(CHUNKED, body=_in_chunks(c, size=1)),
    "in chunks with line feeds": lambda c: answer(
        b"Transfer-Encoding: Chunked ", body=b"%x\n%b\n0\n\n" % (len(c), c)
    ),
    "in chunks with comments": lambda c: answer(
        CHUNKED, body=b'000%X ;a="b"\r\n%b\r\n0;c\r\n\r\n' % (len(c), c)
    ),
    "in chunks, and a length": lambda c: answer(CHUNKED, b"Content-Length: 7", body=_in_chunks(c)),
    "trailers": lambda c: answer(CHUNKED, body=_in_chunks(c)[:-2] + b"X: y\r\n" * 9999),
    "more than was said": lambda c: answer(_length(c), body=c + bytes(99)),
}


@pytest.mark.parametrize("form", ODD.values(), ids=ODD)
def test_what_is_odd_but_right(
    server: Server, content: bytes, level: dict[str, np.ndarray], form: Callable[[bytes], bytes]
) -> None:
    url = server.serve(b"", faults=[raw(form(content))] * 9)
    assert same_bits(dict(elsa.stream(url, level=1)), level)
    assert len(server.requests) == 1  # the server sends all of it, and it is read on


def test_chunks_of_a_range(server: Server, content: bytes, level: dict[str, np.ndarray]) -> None:
    """Also when they are more than the range: the rest is asked for, not believed."""

    def ranged(extra: bytes) -> Callable[[Request], object]:
        def fault(request: Request) -> object:
            first, last = map(int, request.headers["Range"].removeprefix("bytes=").split("-"))
            last = min(last, first + 20_000, len(content) - 1)
            stated = b"Content-Range: bytes %d-%d/%d" % (first, last, len(content))
            body = _in_chunks(content[first : last + 1] + extra)
            return raw(answer(CHUNKED, stated, first=b"HTTP/1.1 206 x", body=body))(request)

        return fault

    for extra in (b"", b"lies" * 5000):
        url = server.serve(b"", faults=[ranged(extra)] * 20)
        assert same_bits(dict(elsa.stream(url, level=1)), level)


def test_chunks_that_break_are_asked_for_again(
    server: Server, content: bytes, level: dict[str, np.ndarray]
) -> None:
    whole = answer(CHUNKED, body=_in_chunks(content))
    for at in (40, 60, 64, 30_000, 30_063, 60_000, len(whole) - 9, len(whole) - 5):
        url = server.serve(content, etag=None, faults=[fine, raw(whole[:at])])
        assert same_bits(dict(elsa.stream(url, level=1)), level), at


def test_chunks_that_end_early_are_asked_for_again(
    server: Server, content: bytes, level: dict[str, np.ndarray]
) -> None:
    """The size is known from the first answer, so that a last chunk too soon is no end."""
    short = answer(CHUNKED, body=_in_chunks(content[:80_000]))
    url = server.serve(content, etag=None, faults=[fine, raw(short)])
    assert same_bits(dict(elsa.stream(url, level=1)), level)


def test_ranges_of_a_few_bytes(server: Server, content: bytes) -> None:
    """Each is right, but at this rate a server could be asked for ever."""

    def few(request: Request) -> None:
        start = int(request.headers["Range"].removeprefix("bytes=").split("-")[0])
        request.headers.replace_header("Range", f"bytes={start}-{start + 99}")

    url = server.serve(content, faults=[few] * 2000)
    with pytest.raises(elsa.RemoteError, match="broke at byte 600; gave up after 6 attempts"):
        elsa.open(url)
    assert len(server.requests) == 6


# --- Slow servers --------------------------------------------------------------------------------


def drip(head: bytes, again: bytes) -> Callable[[Request], object]:
    return raw(head, again=again, pause=0.02)


@pytest.mark.parametrize(
    "fault",
    [
        drip(b"HTTP/1.1 200 OK\r\nX: ", b"y"),
        drip(b"HTTP/1.1 200 OK\r\n", b"X: y\r\n"),
        drip(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        drip(answer(b"Content-Length: 100000"), b"y"),
        drip(answer(CHUNKED), b"1\r\ny\r\n"),
        drip(answer(CHUNKED, body=b"5;"), b"y"),
    ],
    ids=["header", "headers", "interim answers", "body", "chunks", "comment"],
)
def test_a_byte_now_and_then_is_silence(
    server: Server, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ELSA_TIMEOUT", "0.2")
    monkeypatch.setenv("ELSA_RETRIES", "1")
    url = server.serve(b"", faults=[fault] * 9)
    with pytest.raises(elsa.RemoteError, match="no answer in time"):
        elsa.open(url)  # else it would read 20 million bytes at 50 a second
    assert len(server.requests) == 2


def test_slow_is_not_silent(server: Server, content: bytes, level: Any, monkeypatch: Any) -> None:
    """Many time-outs' time in all, but never a whole one with less than a kibibyte."""
    monkeypatch.setenv("ELSA_TIMEOUT", "0.5")
    monkeypatch.setenv("ELSA_RETRIES", "0")
    parts = [content[at : at + 5000] for at in range(0, len(content), 5000)]
    slowly = raw(answer(_length(content)), *parts, pause=0.08)
    url = server.serve(content, etag=None, faults=[fine, slowly])
    assert same_bits(dict(elsa.stream(url, level=1)), level)


# --- Versions ------------------------------------------------------------------------------------

DATES = ("Mon, 01 Jan 2024 00:00:00 GMT", "Tue, 02 Jan 2024 00:00:00 GMT")


@pytest.mark.parametrize(
    ("before", "after", "same"),
    [
        (('"one"', DATES[0]), ('"one"', DATES[1]), True),  # mirrors with clocks of their own
        (('"one"', None), ('W/"one"', None), True),
        (('W/"one"', DATES[0]), ('W/"one"', DATES[0]), True),
        (('"one"', None), (None, DATES[0]), True),
        (('"one"', None), ('"two"', None), False),
        (('W/"one"', None), ('W/"two"', None), False),
        (('W/"one"', None), ('"two"', None), False),
        (('W/"one"', DATES[0]), ('W/"one"', DATES[1]), False),
        (('"one"', DATES[0]), ('W/"one"', DATES[1]), False),
        ((None, DATES[0]), (None, DATES[1]), False),
        ((None, DATES[0]), ('"one"', DATES[1]), False),
    ],
)
def test_what_tells_versions_apart(
    server: Server, content: bytes, before: Any, after: Any, same: bool
) -> None:
    url = server.serve(content, etag=before[0], modified=before[1])
    file = elsa.open(url)
    served = server.files["/net.safetensors"]
    served.etag, served.modified = after
    if same:
        assert file.load(1)
        return
    with pytest.raises(elsa.InputChanged, match="changed while it was read"):
        file.load(1)


def test_a_file_that_has_shrunk(server: Server, content: bytes) -> None:
    """No part of what is asked for is there any more."""
    url = server.serve(content)
    file = elsa.open(url)
    gone = answer(b"Content-Range: bytes */100", first=b"HTTP/1.1 416 x")
    server.files["/net.safetensors"].faults = [raw(gone)]
    with pytest.raises(elsa.InputChanged, match="changed while it was read"):
        file.load(1)
    server.files["/net.safetensors"].faults = [raw(answer(first=b"HTTP/1.1 416 x"))]
    with pytest.raises(elsa.RemoteError, match="answered 416"):
        file.load(1)


def test_an_empty_file_behind_a_server_with_ranges(server: Server) -> None:
    with pytest.raises(elsa.Truncated):
        elsa.open(server.serve(b""))


# --- Waiting -------------------------------------------------------------------------------------


def test_pauses_grow_to_a_limit(server: Server, content: bytes, monkeypatch: Any) -> None:
    """Also after more failures than a float has powers of two."""
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    storage = _remote.HttpStorage(server.serve(content), _remote.RetryPolicy(5, 5000))
    reader = _remote.HttpReader(storage, 0, 10)
    for _ in range(5000):
        reader.retry_or_raise(TimeoutError())
    assert pauses[:3] == [0.01, 0.02, 0.04]
    assert max(pauses) <= _remote.LONGEST_PAUSE


@pytest.mark.parametrize("stated", ["7", "999999"])
def test_a_server_says_when_to_come_again(
    server: Server, content: bytes, monkeypatch: Any, stated: str
) -> None:
    pauses: list[float] = []
    busy = [status(503, Retry_After=stated), status(429, Retry_After="soon")]
    url = server.serve(content, faults=busy)
    monkeypatch.setattr(_remote.time, "sleep", pauses.append)
    elsa.open(url)
    assert pauses == [min(float(stated), 30.0), 0.02]


def test_the_first_contact_is_not_tried_again(server: Server, monkeypatch: Any) -> None:
    """Whatever says that there is no such server."""
    pauses: list[float] = []
    monkeypatch.setattr(_remote.time, "sleep", pauses.append)

    def no_way(address: Any, timeout: float) -> None:
        raise OSError(113, "No route to host")

    monkeypatch.setattr(_http.socket, "create_connection", no_way)
    with pytest.raises(elsa.RemoteError, match=r"x: No route to host$"):
        elsa.open("http://127.0.0.1/x")
    assert not pauses


def test_a_server_that_goes_away_is_waited_for(
    server: Server, content: bytes, level: dict[str, np.ndarray], monkeypatch: Any
) -> None:
    """What is final at first may pass later: a router that restarts."""
    url = server.serve(content, faults=[fine, cut_after(10)])
    connect, refused = _http.socket.create_connection, []

    def now_and_then(*arguments: Any) -> Any:
        if len(server.requests) == 2 and len(refused) < 3:
            refused.append(OSError(113, "No route to host"))
            raise refused[-1]
        return connect(*arguments)

    monkeypatch.setattr(_http.socket, "create_connection", now_and_then)
    assert same_bits(dict(elsa.stream(url, level=1)), level)
    assert len(refused) == 3


def test_no_message_is_long_or_of_several_lines(server: Server) -> None:
    sent = answer(b"Content-Range: \x1b[2J\xff\x85" + b"x" * 9000, first=b"HTTP/1.1 206 x")
    url = server.serve(b"", faults=[raw(sent)])
    with pytest.raises(elsa.RemoteError, match=re.escape(r"\x1b[2J")) as caught:
        elsa.open(url)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1100


def test_a_stalled_connection_is_dropped(server: Server, content: bytes, monkeypatch: Any) -> None:
    monkeypatch.setenv("ELSA_TIMEOUT", "0.2")
    monkeypatch.setenv("ELSA_RETRIES", "0")
    url = server.serve(content, faults=[stall(1)])
    with pytest.raises(elsa.RemoteError, match="no answer in time at byte 0; gave up after 1"):
        elsa.open(url)
