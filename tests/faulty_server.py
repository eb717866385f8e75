"""A real HTTP server on loopback that misbehaves as told."""

import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Served:
    """A file, and what goes wrong with it; faults of a request are used up in order."""

    content: bytes
    etag: str | None = '"one"'
    modified: str | None = None
    ranges: bool = True
    length: bool = True
    """Whether answers state their length."""
    faults: list[Callable[["Request"], object]] = field(default_factory=list)


@dataclass
class Server:
    """What is served, and what was asked for."""

    url: str
    files: dict[str, Served] = field(default_factory=dict)
    requests: list[tuple[str, str | None]] = field(default_factory=list)
    """Path and Range header."""
    headers: list[Message] = field(default_factory=list)
    sent: int = 0
    """Bytes of bodies."""
    connections: int = 0
    keep: bool = False
    """Whether connections are kept after an answer."""

    def serve(self, content: bytes, path: str = "/net.safetensors", **options: Any) -> str:
        """Serve a file; returns its URL."""
        self.files[path] = Served(content, **options)
        return self.url + path

    @property
    def ranges(self) -> list[str | None]:
        """The Range headers, in order."""
        return [header for _, header in self.requests]


class Request(BaseHTTPRequestHandler):
    """Answers one request, with a fault if there is one left."""

    server_state: Server
    cut: int | None = None
    """Body bytes after which the connection is cut."""
    claimed: int | None = None
    """A wrong Content-Length."""
    content_range: str | None = None
    """A wrong Content-Range."""
    extra: dict[str, str]

    def setup(self) -> None:
        self.server_state.connections += 1
        self.protocol_version = "HTTP/1.1" if self.server_state.keep else "HTTP/1.0"
        super().setup()

    def do_GET(self) -> None:
        state = self.server_state
        state.requests.append((self.path, self.headers.get("Range")))
        state.headers.append(self.headers)
        self.extra = {}
        served = state.files.get(self.path)
        if served is None:
            self.send_error(404)
            return
        if served.faults and served.faults.pop(0)(self) is DONE:
            return
        self.answer(served)

    def do_CONNECT(self) -> None:
        """Be a proxy: pass bytes on, or do what a file of the place's name is told to do."""
        self.server_state.requests.append((self.path, None))
        self.server_state.headers.append(self.headers)
        self.close_connection = True
        served = self.server_state.files.get(self.path)
        if served is not None and served.faults and served.faults.pop(0)(self) is DONE:
            return
        host, _, port = self.path.rpartition(":")
        with socket.create_connection((host, int(port))) as other:
            self.send_response(200)
            self.end_headers()
            back = threading.Thread(target=_pass_on, args=(other, self.connection))
            back.start()
            _pass_on(self.connection, other)
            back.join()

    def answer(self, served: Served) -> None:
        size = len(served.content)
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        start, stop = 0, size
        if asked and served.ranges:
            start, stop = int(asked[1]), min(int(asked[2] or size - 1) + 1, size)
            if start >= size:
                self.send_response(416)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            self.send_response(206)
            stated = self.content_range or f"bytes {start}-{stop - 1}/{size}"
            self.send_header("Content-Range", stated)
        else:
            self.send_response(200)
        body = served.content[start:stop]
        if served.length:
            self.send_header("Content-Length", str(self.claimed or len(body)))
        if served.etag:
            self.send_header("ETag", served.etag)
        if served.modified:
            self.send_header("Last-Modified", served.modified)
        for name, value in self.extra.items():
            self.send_header(name, value)
        self.end_headers()
        body = body if self.cut is None else body[: self.cut]
        # The client may close a connection whenever it has what it wants.
        with suppress(BrokenPipeError, ConnectionResetError):
            for at in range(0, len(body), 4096):
                self.wfile.write(body[at : at + 4096])
                self.server_state.sent += len(body[at : at + 4096])
        self.close_connection = not self.server_state.keep or self.cut is not None

    def log_message(self, format: str, *args: Any) -> None:
        """Be quiet."""


def _pass_on(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)


class _HttpServer(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that breaks off is no news."""


DONE = object()
"""A fault that answered by itself."""


def fine(request: Request) -> None:
    """No fault: this request is answered well."""


def cut_after(count: int) -> Callable[[Request], None]:
    """Cut the connection after so many bytes of the body."""

    def fault(request: Request) -> None:
        request.cut = count

    return fault


def status(code: int, **headers: str) -> Callable[[Request], object]:
    """Answer with an error, or a redirect."""

    def fault(request: Request) -> object:
        request.send_response(code)
        for name, value in headers.items():
            request.send_header(name.replace("_", "-"), value)
        request.send_header("Content-Length", "0")
        request.end_headers()
        return DONE

    return fault


def raw(*parts: bytes, again: bytes = b"", pause: float = 0) -> Callable[[Request], object]:
    """Send bytes, whatever they are, then others over and over until 20 MB are sent."""

    def fault(request: Request) -> object:
        request.close_connection = True
        with suppress(OSError):  # the client need not listen to the end
            for part in parts:
                request.wfile.write(part)
                time.sleep(pause)
            sent = 0
            while again and sent < 20_000_000:
                sent += request.wfile.write(again)
                time.sleep(pause)
        return DONE

    return fault


def chunked(*chunks: bytes) -> bytes:
    """A body in chunks."""
    return b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in (*chunks, b""))


def stall(seconds: float, after: int = 0) -> Callable[[Request], object]:
    """Send part of the body, then nothing for a while."""

    def fault(request: Request) -> object:
        if after:
            request.cut = after
            request.answer(request.server_state.files[request.path])
            request.wfile.flush()
        time.sleep(seconds)
        return DONE

    return fault


def claim(**lies: Any) -> Callable[[Request], None]:
    """State a wrong length or range."""

    def fault(request: Request) -> None:
        for name, value in lies.items():
            setattr(request, name, value)

    return fault


def add_header(name: str, value: str) -> Callable[[Request], None]:
    """Send one more header."""

    def fault(request: Request) -> None:
        request.extra[name] = value

    return fault


def replace_by(content: bytes, etag: str | None) -> Callable[[Request], None]:
    """The file changes just before this answer."""

    def fault(request: Request) -> None:
        served = request.server_state.files[request.path]
        served.content, served.etag = content, etag

    return fault


@contextmanager
def serving(
    host: str = "127.0.0.1", tls: ssl.SSLContext | None = None, *, keep: bool = False
) -> Iterator[Server]:
    """A server for the time of a test."""
    state = Server("", keep=keep)
    handler = type("Handler", (Request,), {"server_state": state})
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    kind = type("HttpServer", (_HttpServer,), {"address_family": family})
    with kind((host, 0), handler) as server:
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        name = f"[{host}]" if ":" in host else host
        state.url = f"{'http' if tls is None else 'https'}://{name}:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield state
        finally:
            server.shutdown()
            thread.join()
