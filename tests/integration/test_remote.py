"""Files behind a URL, against a real server that cuts, stalls and lies."""

import io
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
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

import elsa_format as elsa
from elsa_format import _remote

BIN = Path(sys.executable).parent


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server, and clients that do not wait long."""
    monkeypatch.setenv("no_proxy", "127.0.0.1,localhost")
    monkeypatch.setenv("ELSA_TIMEOUT", "2")
    monkeypatch.setattr(_remote, "FIRST_PAUSE", 0.01)
    with serving() as state:
        yield state


@pytest.fixture(scope="module")
def content() -> bytes:
    """An ELSA file of some 400 KB: more than the first request fetches."""
    rng = np.random.default_rng(5)
    tensors = {f"layer{i}": rng.standard_normal((100, 250)).astype(np.float32) for i in range(4)}
    tensors["bias"] = rng.standard_normal(10).astype(np.float32)
    written = io.BytesIO()
    elsa.pack(tensors, written, sparsities=[90, 50])
    return written.getvalue()


@pytest.fixture(scope="module")
def level(content: bytes) -> dict[str, np.ndarray]:
    return elsa.open(io.BytesIO(content)).load(1)


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


def test_an_encrypted_connection_stays_encrypted() -> None:
    handler = _remote._Redirects(None)
    request = urllib.request.Request("https://example.org/a?key=secret")
    with pytest.raises(elsa.RemoteError, match="refused to follow") as caught:
        handler.redirect_request(request, None, 302, "", {}, "http://example.org/b?key=secret")
    assert "secret" not in str(caught.value)
    assert handler.redirect_request(request, None, 302, "", {}, "https://example.com/b")


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
    other = status(302, Location=f"http://localhost:{port}/net.safetensors")
    here = status(302, Location="/net.safetensors")
    server.serve(b"", "/other", faults=[other])
    server.serve(b"", "/here", faults=[here])
    elsa.open(f"http://me:secret@{host}/other")
    assert [bool(h["Authorization"]) for h in server.headers] == [True, False]
    elsa.open(f"http://me:secret@{host}/here")
    assert [bool(h["Authorization"]) for h in server.headers[2:]] == [True, True]


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
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(elsa.RemoteError, match=r"elsa-format\[remote\]"):
        elsa.open("s3://bucket/net.safetensors")


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
