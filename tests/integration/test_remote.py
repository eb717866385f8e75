"""Files behind a URL, against a real server that cuts, stalls and lies."""

import io
import os
import socket
import subprocess
import sys
from base64 import b64encode
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bits import same_bits
from faulty_server import (
    Server,
    add_header,
    claim,
    cut_after,
    fine,
    replace_by,
    serving,
    stall,
    status,
)
from internals import FsspecStorage
from internals import _http as _remote

import elsa_format as elsa

TIMEOUT = 2

BIN = Path(sys.executable).parent


@pytest.fixture(scope="module")
def content() -> bytes:
    """An ELSA file of some 400 KB: more than the first request fetches."""
    rng = np.random.default_rng(5)
    tensors = {f"layer{i}": rng.standard_normal((100, 250)).astype(np.float32) for i in range(4)}
    tensors["bias"] = rng.standard_normal(10).astype(np.float32)
    written = io.BytesIO()
    elsa.pack(tensors, written, sparsities=[90, 50])
    return written.getvalue()


def extracted(url: str, **options: Any) -> bytes:
    sink = io.BytesIO()
    elsa.extract(url, sink, level=1, **options)
    return sink.getvalue()


def test_the_header_is_all_that_is_read(server: Server, content: bytes) -> None:
    with elsa.open(server.serve(content)) as file:
        assert file.file_size == len(content)
        assert [entry.name for entry in file.levels] == ["90%", "50%"]
    assert server.ranges == ["bytes=0-65535"]


def test_a_long_header_takes_one_request_more(server: Server) -> None:
    tensors = {f"{i:0100}": np.ones((2, 2), np.float32) for i in range(1000)}
    written = io.BytesIO()
    elsa.pack(tensors, written, sparsities=[50])
    with elsa.open(server.serve(written.getvalue())) as file:
        end = file.file_size - file.data_size
        assert len(file.tensors) == 1000
    assert server.ranges == ["bytes=0-65535", f"bytes=65536-{end - 1}"]


def test_a_server_without_ranges_works(
    server: Server, content: bytes, level: dict[str, np.ndarray]
) -> None:
    large = content + bytes(30_000_000)
    url = server.serve(large, ranges=False)
    with pytest.raises(elsa.TrailingData):
        elsa.open(url)
    assert server.sent < 20_000_000, "the connection was closed after the header"
    url = server.serve(content, ranges=False)
    with elsa.open(url) as file:
        assert same_bits({"": file.tensor("layer3", 1)}, {"": level["layer3"]})
        assert same_bits(file.load(1), level)
    server.files["/net.safetensors"].faults = [fine, cut_after(300_000)]
    assert same_bits(elsa.load_level(io.BytesIO(extracted(url))), level)


def test_tensors_come_by_range(
    server: Server, content: bytes, level: dict[str, np.ndarray]
) -> None:
    with elsa.open(server.serve(content)) as file:
        info = file.tensors["layer2"]
        start = file.file_size - file.data_size + info.start
        assert same_bits({"": file.tensor("layer2", 1)}, {"": level["layer2"]})
        assert server.ranges[1:] == [f"bytes={start}-{start + info.nbytes - 1}"]
        assert same_bits(file.load(1), level)
        assert len(server.requests) == 3, "one request for all tensors"
        sparse = file.load(1, layout="bitmask")
        assert same_bits({"": sparse["layer0"].to_dense()}, {"": level["layer0"]})


@pytest.mark.parametrize("layout", ["dense", "bitmask", "csr"])
def test_extraction_resumes_where_it_broke(
    server: Server, content: bytes, level: dict[str, np.ndarray], layout: str
) -> None:
    url = server.serve(
        content, faults=[cut_after(10), cut_after(50_000), cut_after(0), cut_after(1)]
    )
    sink = io.BytesIO()
    elsa.extract(url, sink, level=1, layout=layout)
    assert same_bits(elsa.load_level(io.BytesIO(sink.getvalue())), level)
    assert server.ranges == [
        "bytes=0-65535",
        "bytes=10-65535",
        "bytes=50010-65535",
        "bytes=50010-65535",
        "bytes=50011-65535",
        f"bytes=65536-{len(content) - 1}",
    ]


def test_a_cut_at_every_part_of_the_file(
    server: Server, content: bytes, level: dict[str, np.ndarray]
) -> None:
    for at in (0, 1, 7, 8, 9, 255, 256, 100_003, len(content) - 65537, len(content) - 65536):
        head = [cut_after(at)] if at < 65536 else [fine, cut_after(at)]
        url = server.serve(content, faults=list(head))
        assert same_bits(dict(elsa.stream(url, level=1)), level)
        assert elsa.verify(url).digests == 2


def test_short_answers_are_joined(
    server: Server, content: bytes, level: dict[str, np.ndarray]
) -> None:
    """A server may send less of a range than it was asked for."""

    def short(request: Any) -> None:
        asked = request.headers["Range"].removeprefix("bytes=")
        start = int(asked.split("-")[0])
        request.headers.replace_header("Range", f"bytes={start}-{start + 39_999}")

    url = server.serve(content, faults=[short] * 20)
    assert same_bits(dict(elsa.stream(url, level=1)), level)
    assert len(server.requests) > 10


@pytest.mark.parametrize("code", [429, 500, 502, 503, 504])
def test_a_busy_server_is_asked_again(
    server: Server, content: bytes, level: dict[str, np.ndarray], code: int
) -> None:
    url = server.serve(content, faults=[status(code), status(code), fine, status(code)])
    assert same_bits(dict(elsa.stream(url, level=1)), level)


@pytest.mark.parametrize("code", [400, 401, 403, 404, 410])
def test_a_refusal_is_final(server: Server, content: bytes, code: int) -> None:
    url = server.serve(content, faults=[status(code)])
    with pytest.raises(elsa.RemoteError, match=f"answered {code}"):
        elsa.open(url)
    assert len(server.requests) == 1


def test_patience_ends(server: Server, content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELSA_RETRIES", "2")
    url = server.serve(content, faults=[fine, *[cut_after(0)] * 9])
    with pytest.raises(elsa.RemoteError, match="broke at byte 65536; gave up after 3 attempts"):
        extracted(url)
    assert len(server.requests) == 4
    url = server.serve(content, faults=[status(503)] * 9)
    with pytest.raises(elsa.RemoteError, match="503 Service Unavailable at byte 0; gave up"):
        extracted(url)


def test_progress_renews_patience(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELSA_RETRIES", "1")
    monkeypatch.setattr(_remote, "SKIP", 10_000)
    tensors = {"w": np.random.default_rng(0).standard_normal((300, 300)).astype(np.float32)}
    written = io.BytesIO()
    elsa.pack(tensors, written, sparsities=[50])
    url = server.serve(written.getvalue(), faults=[fine, *[cut_after(20_000)] * 20])
    assert list(dict(elsa.stream(url, level=1))) == ["w"]
    assert len(server.requests) > 10


def test_silence_has_a_time_out(
    server: Server,
    content: bytes,
    level: dict[str, np.ndarray],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ELSA_TIMEOUT", "0.2")
    url = server.serve(content, faults=[stall(1), fine, stall(1, after=1000)])
    assert same_bits(dict(elsa.stream(url, level=1)), level)
    assert server.ranges[-1] == f"bytes=66536-{len(content) - 1}"
    monkeypatch.setenv("ELSA_RETRIES", "1")
    url = server.serve(content, faults=[stall(1)] * 3)
    with pytest.raises(elsa.RemoteError, match="no answer in time"):
        elsa.open(url)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda data: (data, '"two"'), id="etag"),
        pytest.param(lambda data: (data + b"x", None), id="length"),
        pytest.param(lambda data: (data[:-1], '"one"'), id="shorter"),
    ],
)
def test_half_of_one_file_and_half_of_another(server: Server, content: bytes, change: Any) -> None:
    url = server.serve(content, faults=[fine, cut_after(1000), replace_by(*change(content))])
    with pytest.raises(elsa.InputChanged, match="changed while it was read"):
        extracted(url)


def test_a_date_tells_versions_apart_where_there_is_no_etag(server: Server, content: bytes) -> None:
    dates = ("Mon, 01 Jan 2024 00:00:00 GMT", "Tue, 02 Jan 2024 00:00:00 GMT")
    url = server.serve(content, etag=None, modified=dates[0])
    file = elsa.open(url)
    server.files["/net.safetensors"].modified = dates[1]
    with pytest.raises(elsa.InputChanged):
        file.load(1)


@pytest.mark.parametrize(
    ("lie", "message"),
    [
        ({"content_range": "bytes 5-65535/400000"}, "expected one that starts at 0"),
        ({"content_range": "bytes 0-65535"}, "answered with range"),
        ({"content_range": "bytes 9-1/400000"}, "answered with range"),
        ({"content_range": "bytes 0-65535/100"}, "answered with range"),
        ({"content_range": "lines 0-5/6"}, "answered with range"),
        ({"claimed": 70_000}, "sends 70000 bytes as"),
        ({"claimed": 100}, "sends 100 bytes as"),
    ],
)
def test_a_wrong_range_is_refused(
    server: Server, content: bytes, lie: dict[str, Any], message: str
) -> None:
    url = server.serve(content, faults=[claim(**lie)])
    with pytest.raises(elsa.RemoteError, match=message):
        elsa.open(url)


def test_wrong_lengths_of_whole_answers(server: Server, content: bytes) -> None:
    url = server.serve(content, ranges=False, faults=[claim(claimed=len(content) - 5)])
    with pytest.raises(elsa.Truncated):
        elsa.open(url)
    url = server.serve(content, ranges=False, faults=[claim(claimed=len(content) + 5)] * 9)
    with pytest.raises(elsa.TrailingData):
        extracted(url)
    url = server.serve(content, faults=[claim(content_range=f"bytes 0-65535/{len(content) + 5}")])
    with pytest.raises(elsa.TrailingData):
        extracted(url)


def test_a_server_that_states_no_length(
    server: Server, content: bytes, level: dict[str, np.ndarray]
) -> None:
    url = server.serve(content, ranges=False, length=False)
    assert same_bits(dict(elsa.stream(url, level=1)), level)
    url = server.serve(content[:-1], ranges=False, length=False)
    with pytest.raises(elsa.Truncated):
        extracted(url)
    url = server.serve(content + b"x", ranges=False, length=False)
    with pytest.raises(elsa.TrailingData):
        extracted(url)


def test_damage_on_the_way_is_found(server: Server, content: bytes) -> None:
    damaged = bytearray(content)
    damaged[-1000] ^= 1
    with pytest.raises(elsa.ChecksumMismatch):
        extracted(server.serve(bytes(damaged)))


@pytest.mark.parametrize("short", [b"", b"1234", b"\xff" * 9])
def test_what_is_no_file(server: Server, short: bytes) -> None:
    with pytest.raises(elsa.FormatError):
        elsa.open(server.serve(short))


def test_an_encoded_answer_is_refused(server: Server, content: bytes) -> None:
    url = server.serve(content, faults=[add_header("Content-Encoding", "gzip")])
    with pytest.raises(elsa.RemoteError, match="encoded as 'gzip'"):
        elsa.open(url)
    assert server.headers[0]["Accept-Encoding"] == "identity"


def test_redirects(server: Server, content: bytes) -> None:
    url = server.serve(content)
    server.serve(b"", "/a", faults=[status(302, Location="/b")] * 9)
    server.serve(b"", "/b", faults=[status(307, Location=url)] * 9)
    with elsa.open(f"{server.url}/a") as file:
        assert len(file.levels) == 2
    assert server.ranges == ["bytes=0-65535"] * 3
    server.serve(b"", "/loop", faults=[status(302, Location="/loop")] * 99)
    with pytest.raises(elsa.RemoteError, match="at most 5 redirects"):
        elsa.open(f"{server.url}/loop")
    for target in ("file:///etc/passwd", "ftp://127.0.0.1/x", "data:,x"):
        server.serve(b"", "/away", faults=[status(302, Location=target)])
        with pytest.raises(elsa.RemoteError):
            elsa.open(f"{server.url}/away")


def test_secrets_stay_out_of_messages(server: Server, content: bytes) -> None:
    host = server.url.removeprefix("http://")
    url = f"http://me:secret@{host}/net.safetensors?signature=secret"
    with pytest.raises(elsa.RemoteError, match="answered 404") as caught:
        elsa.open(url)
    assert "secret" not in str(caught.value)
    assert server.headers[0]["Authorization"] == "Basic bWU6c2VjcmV0"
    server.serve(content, "/net.safetensors?signature=secret")
    with elsa.open(url) as file:
        assert "secret" not in file.path


def test_a_password_is_not_sent_to_another_server(server: Server, content: bytes) -> None:
    host = server.url.removeprefix("http://")
    server.serve(content)
    port = host.split(":")[1]
    other = f"http://localhost:{port}"
    server.serve(b"", "/other", faults=[status(302, Location=f"{other}/net.safetensors")])
    server.serve(b"", "/here", faults=[status(302, Location="/net.safetensors")])
    elsa.open(f"http://me:secret@{host}/other")
    assert [bool(h["Authorization"]) for h in server.headers] == [True, False]
    elsa.open(f"http://me:secret@{host}/here")
    assert [bool(h["Authorization"]) for h in server.headers[2:]] == [True, True]


def test_a_password_stays_behind_however_a_way_leads(server: Server, content: bytes) -> None:
    """To another server, on to the same other server, and back."""
    host = server.url.removeprefix("http://")
    server.serve(content)
    other = f"http://you:other@localhost:{host.split(':')[1]}"
    server.serve(b"", "/1", faults=[status(302, Location=f"{other}/2")])
    server.serve(b"", "/2", faults=[status(302, Location="/3")])
    server.serve(b"", "/3", faults=[status(302, Location=f"{server.url}/net.safetensors")])
    elsa.open(f"http://me:secret@{host}/1")
    sent = [h["Authorization"] for h in server.headers]
    assert sent == ["Basic bWU6c2VjcmV0", None, None, "Basic bWU6c2VjcmV0"]


@pytest.mark.parametrize(
    ("user", "sent"),
    [
        ("me:se:cr@et", b"me:se:cr@et"),
        ("me:%2F%3f%23%40%25%0A", b"me:/?#@%\n"),
        ("me:100%", b"me:100%"),
        ("mé:pässwörd", "mé:pässwörd".encode()),
        ("me:%E9", b"me:\xe9"),
        ("me:[x]", b"me:[x]"),
        ("token", b"token:"),
        ("me:", b"me:"),
        (":", b":"),
        ("", None),
    ],
)
def test_users_and_passwords(
    server: Server, content: bytes, user: str, sent: bytes | None, tmp_path: Path
) -> None:
    index = tmp_path / "net.safetensors.index.json"
    elsa.extract(io.BytesIO(content), index, level=2, keep_levels=True, max_shard_size=200_000)
    for path in tmp_path.iterdir():
        server.serve(path.read_bytes(), f"/{path.name}")
    elsa.open(f"http://{user}@{server.url.removeprefix('http://')}/{index.name}")
    assert len(server.headers) == 4
    expected = None if sent is None else f"Basic {b64encode(sent).decode()}"
    assert {h["Authorization"] for h in server.headers} == {expected}


NAMES = {
    "/größe 1/é.safetensors": "/gr%C3%B6%C3%9Fe%201/%C3%A9.safetensors",
    "/a%20b%2Fc.safetensors": "/a%20b%2Fc.safetensors",
    "/100%.safetensors": "/100%25.safetensors",
    "/net[1]{2}.safetensors": "/net[1]%7B2%7D.safetensors",
    '/"<>\\^`|.safetensors': "/%22%3C%3E%5C%5E%60%7C.safetensors",
    "/a:b@c+d,e;f=g!$&'()*~.safetensors": "/a:b@c+d,e;f=g!$&'()*~.safetensors",
    "/net.safetensors?näme=a b&c=[d]/?": "/net.safetensors?n%C3%A4me=a%20b&c=[d]/?",
    "/net.safetensors#fragment?": "/net.safetensors",
    "/\udce9.safetensors": "/%E9.safetensors",
    "": "/",
    "?a": "/?a",
    "#a": "/",
}


@pytest.mark.parametrize("name", NAMES)
def test_what_a_url_may_hold(server: Server, content: bytes, name: str) -> None:
    server.serve(content, NAMES[name])
    for url in (server.url, server.url.replace("http", "HTTP")):
        with elsa.open(url + name) as file:
            assert file.file_size == len(content)
    assert server.headers[0]["Host"] == server.url.removeprefix("http://")


WRONG = {
    "http:///net.safetensors": "the URL names no host",
    "http://:80/x": "the URL names no host",
    "http://me:secret@/x": "the URL names no host",
    "http://[::1/x": "the URL names no valid host",
    "http://::1]/x": "the URL names no",
    "http://[127.0.0.1]/x": "the URL names no valid host",
    "http://[::1]x/x": "the URL names no valid host",
    "http://a..b/x": "the URL names no valid host",
    "http://a b/x": "the URL names no valid host",
    f"http://{'a' * 300}/x": "the URL names no valid host",
    f"http://{'é' * 100}.org/x": "the URL names no valid host",
    "http://ex%61mple.org/x": "the URL names no valid host",
    "http://host:port/x": "the port in the URL is not a number from 1 to 65535",
    "http://host:0/x": "the port in the URL is not a number from 1 to 65535",
    "http://host:65536/x": "the port in the URL is not a number from 1 to 65535",
    "http://host:8 0/x": "the port in the URL is not a number from 1 to 65535",
    f"http://host:{'9' * 5000}/x": "the port in the URL is not a number from 1 to 65535",
    "http://me:sec/ret@host/x": "write / as %2F",
    "http://me:sec?ret@host/x": "? as %3F",
    "http://me:sec#ret@host/x": "# as %23",
    "http://host/a\nb": r"the URL has the control character '\n'",
    "http://host/a\tb": r"the URL has the control character '\t'",
    "http://ho\rst/": r"the URL has the control character '\r'",
    "http://host/a\0b": r"the URL has the control character '\x00'",
    "http://host/a\x7fb": r"the URL has the control character '\x7f'",
    "http://host/\ud800": "the URL is not Unicode text",
    f"http://host/{'x' * 70_000}": "characters, expected at most 65536",
}


@pytest.mark.parametrize("url", WRONG, ids=lambda url: ascii(url[:40]))
def test_what_is_wrong_with_a_url_is_told_at_once(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without asking anybody, even as an index or in another case."""
    monkeypatch.delattr(socket, "create_connection")
    monkeypatch.delattr(socket, "getaddrinfo")
    for form in (url, url.replace("http", "HTTPS"), url + ".index.json"):
        with pytest.raises(elsa.RemoteError) as caught:
            elsa.open(form)
        message = str(caught.value)
        assert WRONG[url] in message
        assert message.isprintable()
        assert "sec" not in message
        assert "ret@" not in message


def test_the_commands_say_what_is_wrong_with_a_url() -> None:
    for url in (
        "http://[::1/x",
        "http://a..b/x",
        "http://host:port/x",
        b"http://\xe9/x",
        "nosuch://x",
    ):
        done = subprocess.run([BIN / "elsa-inspect", url], capture_output=True, check=False)
        assert (done.returncode, done.stderr.count(b"\n")) == (1, 1), done.stderr
        assert done.stderr.startswith(b"error: ")


def test_an_address_of_sixteen_bytes(content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("there is no IPv6 here")
    monkeypatch.setenv("no_proxy", "*")
    with serving("::1") as server:
        with elsa.open(server.serve(content)) as file:
            assert file.file_size == len(content)
        assert server.headers[0]["Host"] == server.url.removeprefix("http://")


def test_no_server_is_told_at_once(server: Server) -> None:
    with pytest.raises(elsa.RemoteError, match="refused"):
        elsa.open("http://127.0.0.1:9/net.safetensors")
    with pytest.raises(elsa.RemoteError, match="names no host"):
        elsa.open("http:///net.safetensors")


def test_shards_behind_a_url(
    server: Server, content: bytes, level: dict[str, np.ndarray], tmp_path: Path
) -> None:
    index = tmp_path / "net.safetensors.index.json"
    elsa.extract(io.BytesIO(content), index, level=2, keep_levels=True, max_shard_size=200_000)
    for path in tmp_path.iterdir():
        server.serve(path.read_bytes(), f"/models/{path.name}?token=1")
    url = f"{server.url}/models/{index.name}?token=1"
    with elsa.open(url) as file:
        assert same_bits(file.load(1), level)
        assert same_bits({"": file.tensor("layer3", 1)}, {"": level["layer3"]})
    for served in server.files.values():
        served.faults = [fine, cut_after(1000)]
    assert same_bits(elsa.load_level(io.BytesIO(extracted(url))), level)
    assert elsa.verify(url, jobs=2).digests == 2
    server.serve(index.read_bytes().replace(b"net-00001", b"../x-0001"), "/models/bad.index.json")
    with pytest.raises(elsa.UnsafePath):
        elsa.open(f"{server.url}/models/bad.index.json")


def test_other_stores_through_fsspec(
    content: bytes, level: dict[str, np.ndarray], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsspec = pytest.importorskip("fsspec")
    with fsspec.open("memory://models/net.safetensors", "wb") as file:
        file.write(content)
    url = "memory://models/net.safetensors"
    assert same_bits(dict(elsa.stream(url, level=1)), level)
    with elsa.open(url) as opened:
        assert same_bits(opened.load(1), level)
    with pytest.raises(elsa.RemoteError, match="missing"):
        elsa.open("memory://models/missing.safetensors")
    index = tmp_path / "s.safetensors.index.json"
    elsa.extract(url, index, level=2, keep_levels=True, max_shard_size=200_000)
    fsspec.filesystem("memory").put(str(tmp_path), "/sharded", recursive=True)
    assert elsa.verify(f"memory://sharded/{index.name}").digests == 2
    bad = index.read_text().replace("s-00001-of", "memory::s-00001-of")
    fsspec.filesystem("memory").pipe("/sharded/bad.index.json", bad.encode())
    with pytest.raises(elsa.UnsafePath, match="memory::s-00001"):
        elsa.open("memory://sharded/bad.index.json")
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(elsa.RemoteError, match=r"; for others, run: pip install .*\[remote\]'$"):
        elsa.open("s3://bucket/net.safetensors")


def test_a_file_by_its_url(content: bytes, tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    (tmp_path / "net.safetensors").write_bytes(content)
    with elsa.open((tmp_path / "net.safetensors").as_uri()) as file:
        assert file.file_size == len(content)
    with pytest.raises(elsa.RemoteError, match=r"none\.safetensors: no such file$"):
        elsa.open((tmp_path / "none.safetensors").as_uri())
    with pytest.raises(elsa.RemoteError, match=r"is a directory$"):
        elsa.open(tmp_path.as_uri())


@pytest.mark.parametrize(
    ("url", "advice"),
    [
        ("s3://key:secret@bucket/net.safetensors?secret", "bucket/net.safetensors?…: Install s3fs"),
        (
            "simplecache::s3://key:secret@bucket/net.safetensors",
            "bucket/net.safetensors: Install s3fs",
        ),
        ("abfs://key:secret@store/net.safetensors", "abfs://store/net.safetensors: Install adlfs"),
        ("nosuch://key:secret@store/x", "nosuch://store/x: Protocol not known: nosuch"),
    ],
)
def test_the_advice_of_fsspec_is_passed_on(
    url: str, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = pytest.importorskip("fsspec.registry")
    for name in ("s3fs", "adlfs"):
        monkeypatch.setitem(sys.modules, name, None)
    for protocol in ("s3", "s3a", "abfs", "az"):  # which another test may have used
        monkeypatch.delitem(registry._registry, protocol, raising=False)
    with pytest.raises(elsa.RemoteError) as caught:
        elsa.open(url)
    assert advice in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (FileNotFoundError("bucket/key?secret"), "no such file"),
        (PermissionError("secret"), "permission denied"),
        (PermissionError(13, "AccessDenied for secret"), "permission denied"),
        (IsADirectoryError("secret"), "is a directory"),
        (TimeoutError("secret"), "no answer in time"),
        (ConnectionRefusedError(111, "Connection refused"), "connection refused"),
        (ConnectionResetError("secret"), "the connection broke"),
        (OSError(5, "SlowDown"), "SlowDown"),
        (OSError(5, "me:secret was not let in"), "OSError"),
        (OSError(5, "GET https://x/?signature=secret"), "OSError"),
        (ImportError("install x, as in x://me:secret@y"), "ImportError"),
        (ValueError("secret"), "ValueError"),
        (KeyError("secret"), "KeyError"),
    ],
)
def test_what_stores_complain_of(
    error: Exception, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a file is opened, when its size is asked for, when it is read and when it is closed."""
    core = pytest.importorskip("fsspec.core")

    class Stream(io.BytesIO):
        fails = ""

        def seek(self, position: int, whence: int = 0, /) -> int:
            self.fail("seek")
            return super().seek(position, whence)

        def read(self, size: int | None = -1, /) -> bytes:
            self.fail("read")
            return super().read(size)

        def close(self) -> None:
            super().close()
            self.fail("close")

        def fail(self, how: str) -> None:
            if how == self.fails:
                raise error

    class Store:
        def open(self, path: str, **options: object) -> Stream:
            stream.fail("open")
            return stream

    monkeypatch.setattr(core, "url_to_fs", lambda url: (Store(), "net.safetensors"))
    for when in ("open", "seek", "read", "close"):
        stream = Stream(b"12345678")
        stream.fails = when
        with pytest.raises(elsa.RemoteError) as caught:  # noqa: PT012 - whichever of them it is
            storage = FsspecStorage("x://me:secret@store/net.safetensors?signature=secret")
            storage.read_at(0, memoryview(bytearray(4)))
            storage.close()
        assert str(caught.value) == f"x://store/net.safetensors?…: {words}"
        assert stream.closed == (when in ("seek", "close"))


def test_the_commands_take_urls(server: Server, content: bytes, tmp_path: Path) -> None:
    url = server.serve(content, faults=[fine, fine, fine, cut_after(100_000)])
    out = tmp_path / "level.safetensors"
    environment = os.environ | {"no_proxy": "127.0.0.1"}

    def run(*words: object) -> subprocess.CompletedProcess[str]:
        command = [str(BIN / str(words[0])), *map(str, words[1:])]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    shown = run("elsa-inspect", url)
    assert shown.returncode == 0, shown.stderr
    assert "90%" in shown.stdout
    assert len(server.requests) == 1
    done = run("elsa-extract", url, "--level", 1, "-o", out)
    assert done.returncode == 0, done.stderr
    assert elsa.load_level(out)
    gone = run("elsa-extract", server.url + "/no.safetensors", "--level", 1, "-o", tmp_path / "x")
    assert gone.returncode == 1
    assert gone.stderr == f"error: {server.url}/no.safetensors: the server answered 404 Not Found\n"
    assert not (tmp_path / "x").exists()
