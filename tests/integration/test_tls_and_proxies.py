"""The way to a server: encryption, proxies, and the settings that the environment gives."""

import shutil
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from bits import same_bits
from faulty_server import Server, cut_after, fine, serving, status
from internals import _http as _remote
from internals import _http_client as _http

import elsa_format as elsa


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No proxy but those of a test, and no long waiting."""
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ELSA_TIMEOUT", "5")
    monkeypatch.setattr(_remote, "FIRST_PAUSE", 0.01)
    _http._tls.cache_clear()
    yield
    _http._tls.cache_clear()


# --- Encryption ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for the name localhost, signed by itself, with its key."""
    if shutil.which("openssl") is None:
        pytest.skip("certificates are made by openssl")
    path = tmp_path_factory.mktemp("tls") / "localhost.pem"
    words = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost"
    extension = "subjectAltName=DNS:localhost"
    command = [*words.split(), "-addext", extension, "-keyout", str(path), "-out", f"{path}.crt"]
    subprocess.run(command, check=True, capture_output=True)
    path.write_bytes(path.read_bytes() + Path(f"{path}.crt").read_bytes())
    return path


@pytest.fixture
def encrypted(certificate: Path) -> Iterator[Server]:
    """A server that is reached by its name, which the certificate has."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with serving(tls=context) as server:
        server.url = server.url.replace("127.0.0.1", "localhost")
        yield server


@pytest.fixture
def trusted(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", f"{certificate}.crt")


@pytest.mark.usefixtures("trusted")
def test_a_connection_that_is_encrypted(
    encrypted: Server, content: bytes, level: dict[str, np.ndarray]
) -> None:
    url = encrypted.serve(content, faults=[fine, cut_after(5000), cut_after(0)])
    assert same_bits(dict(elsa.stream(url, level=1)), level)
    assert len(encrypted.requests) == 4


@pytest.mark.usefixtures("trusted")
def test_an_encrypted_connection_is_kept(
    encrypted: Server, content: bytes, level: dict[str, np.ndarray]
) -> None:
    encrypted.keep = True
    with elsa.open(encrypted.serve(content)) as file:
        assert same_bits(file.load(1), level)
        assert same_bits({"w": file.tensor("w", level=1)}, level)
    assert encrypted.connections == 1 < len(encrypted.requests)


def test_a_certificate_that_nobody_trusts(encrypted: Server, content: bytes) -> None:
    url = encrypted.serve(content)
    with pytest.raises(
        elsa.RemoteError, match=r"certificate of localhost is not valid: self-signed certificate$"
    ):
        elsa.open(url)
    assert not encrypted.requests


@pytest.mark.usefixtures("trusted")
def test_a_certificate_of_another(encrypted: Server, content: bytes) -> None:
    url = encrypted.serve(content).replace("localhost", "127.0.0.1")
    with pytest.raises(
        elsa.RemoteError, match=r"certificate of 127\.0\.0\.1 is not valid: IP addr"
    ):
        elsa.open(url)
    assert not encrypted.requests


@pytest.mark.usefixtures("trusted")
def test_a_certificate_is_looked_at_after_a_redirect(encrypted: Server, content: bytes) -> None:
    other = encrypted.serve(content).replace("localhost", "127.0.0.1")
    encrypted.serve(b"", "/a", faults=[status(302, Location=other)])
    with pytest.raises(elsa.RemoteError, match=r"certificate of 127\.0\.0\.1 is not valid"):
        elsa.open(f"{encrypted.url}/a")


@pytest.mark.usefixtures("trusted")
def test_an_encrypted_connection_stays_encrypted(encrypted: Server, content: bytes) -> None:
    with serving() as plain:
        target = f"{plain.serve(content)}?key=secret"
        encrypted.serve(b"", "/a?key=secret", faults=[status(302, Location=target)])
        with pytest.raises(
            elsa.RemoteError, match=r"refused to follow .*: it is not enc"
        ) as caught:
            elsa.open(f"{encrypted.url}/a?key=secret")
        assert "secret" not in str(caught.value)
        assert not plain.requests
        plain.serve(b"", "/b", faults=[status(302, Location=encrypted.serve(content))])
        assert elsa.open(f"{plain.url}/b").file_size == len(content)


@pytest.mark.usefixtures("trusted")
def test_the_wrong_protocol(encrypted: Server, content: bytes) -> None:
    with serving() as plain:
        url = plain.serve(content).replace("http:", "https:")
        with pytest.raises(elsa.RemoteError, match="no encrypted connection to 127"):
            elsa.open(url)
    url = encrypted.serve(content).replace("https:", "http:")
    with pytest.raises(elsa.RemoteError, match=r"which is no HTTP|the connection broke"):
        elsa.open(url)


# --- Proxies -------------------------------------------------------------------------------------


def test_a_proxy_is_asked_for_the_whole_url(
    content: bytes, level: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving() as proxy:
        for value in (
            proxy.url.replace("//", "//me:pass%2Fword@"),
            proxy.url.removeprefix("http://"),
        ):
            proxy.requests.clear()
            proxy.headers.clear()
            monkeypatch.setenv("http_proxy", value)
            proxy.serve(content, "http://example.invalid/a%20b?c", faults=[fine, cut_after(10)])
            url = "http://you:secret@example.invalid:80/a b?c"
            assert same_bits(dict(elsa.stream(url, level=1)), level)
            assert len(proxy.requests) == 3
            for sent in proxy.headers:
                assert sent["Host"] == "example.invalid"
                assert sent["Authorization"] == "Basic eW91OnNlY3JldA=="
                expected = "Basic bWU6cGFzcy93b3Jk" if "@" in value else None
                assert sent["Proxy-Authorization"] == expected


@pytest.mark.usefixtures("trusted")
def test_a_proxy_lets_an_encrypted_connection_through(
    encrypted: Server,
    content: bytes,
    level: dict[str, np.ndarray],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with serving() as proxy:
        monkeypatch.setenv("https_proxy", proxy.url.replace("//", "//me:password@"))
        url = encrypted.serve(content, faults=[fine, cut_after(10)])
        assert same_bits(dict(elsa.stream(url, level=1)), level)
        place = encrypted.url.removeprefix("https://")
        assert [path for path, _ in proxy.requests] == [place] * 3
        assert {h["Proxy-Authorization"] for h in proxy.headers} == {"Basic bWU6cGFzc3dvcmQ="}
        assert not any(h["Proxy-Authorization"] for h in encrypted.headers)
        monkeypatch.setenv("no_proxy", "localhost")
        elsa.open(url)
        assert len(proxy.requests) == 3


def test_a_proxy_that_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as proxy:
        monkeypatch.setenv("https_proxy", proxy.url)
        proxy.serve(b"", "example.invalid:443", faults=[status(407)])
        with pytest.raises(
            elsa.RemoteError, match=r"the proxy answered 407 Proxy Authentication Required$"
        ):
            elsa.open("https://example.invalid/x")
        assert len(proxy.requests) == 1
        proxy.serve(b"", "example.invalid:443", faults=[status(502)] * 9)
        with pytest.raises(
            elsa.RemoteError, match="the proxy answered 502 Bad Gateway at byte 0; g"
        ):
            elsa.open("https://example.invalid/x")
        assert len(proxy.requests) == 7


@pytest.mark.parametrize(
    ("proxy", "message"),
    [
        ("http://me:secret@[::1/", "proxy http://…: the URL names no valid host"),
        ("http://me:secret@proxy:port", "proxy http://…: the port in the URL"),
        ("http://me:sec/ret@proxy:80", "proxy http://…: the port in the URL"),
        ("me:secret@proxy:99999", "proxy http://proxy:99999: the port in the URL"),
        ("http://", "proxy http://: the URL names no host"),
        (":", "proxy http://:: the URL names no host"),
        ("socks5://me:secret@proxy:1080", "proxy socks5://proxy:1080: the URL is neither http"),
        ("http://a..b", "proxy http://a..b: the URL names no valid host"),
        ("http://proxy\n:80", "the URL has the control character"),
        ("\udcff", "the URL names no valid host"),
    ],
)
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_proxies_that_are_none(
    proxy: str, message: str, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"{scheme}_proxy", proxy)
    with pytest.raises(elsa.RemoteError) as caught:
        elsa.open(f"{scheme}://example.invalid/x")
    assert str(caught.value).startswith(f"{scheme}://example.invalid/x: ")
    assert message in str(caught.value)
    assert "sec" not in str(caught.value)


# --- Settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value", ["nan", "inf", "-inf", "1e309", "-1", "0", "-0.0", "x", "1e6", "∞"]
)
def test_time_outs_that_are_none(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELSA_TIMEOUT", value)
    with pytest.raises(elsa.RemoteError, match=r"ELSA_TIMEOUT=.*expected seconds, more than 0"):
        elsa.open("http://127.0.0.1:9/x")


@pytest.mark.parametrize("value", ["nan", "inf", "1e309", "-1", "2.5", "x", "1e6", "9" * 5000])
def test_retries_that_are_none(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELSA_RETRIES", value)
    with pytest.raises(elsa.RemoteError, match=r"ELSA_RETRIES=.*expected a whole number"):
        elsa.open("http://127.0.0.1:9/x")


@pytest.mark.parametrize(("value", "attempts"), [("0", 1), ("2", 3), ("", 6)])
def test_as_many_retries_as_are_set(
    content: bytes, value: str, attempts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ELSA_RETRIES", value)
    with serving() as server:
        url = server.serve(content, faults=[status(503)] * 9)
        with pytest.raises(elsa.RemoteError, match=f"gave up after {attempts} attempts"):
            elsa.open(url)
        assert len(server.requests) == attempts
