"""A real S3 server on loopback (moto's) that misbehaves as told."""

import logging
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

PART = 5 << 20
"""The smallest part of an upload that S3 takes."""


@dataclass(frozen=True)
class Asked:
    """A request."""

    method: str
    path: str
    query: dict[str, list[str]]
    range: str | None

    @property
    def what(self) -> str:
        """What of an upload it is."""
        if self.method == "POST" and "uploads" in self.query:
            return "begin"
        if self.method == "PUT" and "partNumber" in self.query:
            return "part"
        if self.method == "POST" and "uploadId" in self.query:
            return "complete"
        if self.method == "DELETE" and "uploadId" in self.query:
            return "abort"
        return self.method


Fault = Callable[[Asked, dict[str, Any]], int | None]
"""Gets a request before it is answered; what it returns is the status of an error."""


@dataclass
class Server:
    """A bucket, and what was asked for."""

    url: str
    bucket: str = "bucket"
    asked: list[Asked] = field(default_factory=list)
    sent: int = 0
    """Bytes of answers to GET."""
    fault: Fault | None = None

    @property
    def environment(self) -> dict[str, str]:
        """How clients find it; parts are small, and nothing is tried twice."""
        return {
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": self.url,
            "AWS_MAX_ATTEMPTS": "1",
            "FSSPEC_S3": f'{{"default_block_size": {PART}}}',
            "no_proxy": "127.0.0.1",
        }

    def whats(self) -> list[str]:
        """What was asked for, in order."""
        return [asked.what for asked in self.asked]


class _Application:
    """moto's, with faults."""

    def __init__(self, server: Server) -> None:
        self.server, self.inner = server, DomainDispatcherApplication(create_backend_app)

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        query = parse_qs(environ["QUERY_STRING"], keep_blank_values=True)
        asked = Asked(
            environ["REQUEST_METHOD"], environ["PATH_INFO"], query, environ.get("HTTP_RANGE")
        )
        self.server.asked.append(asked)
        status = self.server.fault(asked, environ) if self.server.fault else None
        if status is not None:
            _read(environ)
            start_response(f"{status} Error", [("Content-Type", "application/xml")])
            return [b"<Error><Code>InternalError</Code><Message>Try again</Message></Error>"]
        body = list(self.inner(environ, start_response))
        if asked.method == "GET":
            self.server.sent += sum(map(len, body))
        return body


def cut(environ: dict[str, Any]) -> int:
    """Cut the connection of a request, instead of an answer."""
    _read(environ)
    environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
    raise ConnectionAbortedError


def _read(environ: dict[str, Any]) -> None:
    environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))


@contextmanager
def s3_server() -> Iterator[Server]:
    """A server with a bucket, which is empty."""
    import boto3

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = Server("")
    running = make_server("127.0.0.1", 0, _Application(server), threaded=True)
    running.daemon_threads = True
    server.url = f"http://127.0.0.1:{running.server_port}"
    thread = threading.Thread(target=running.serve_forever, daemon=True)
    thread.start()
    client = boto3.client(
        "s3",
        endpoint_url=server.url,
        aws_access_key_id="key",
        aws_secret_access_key="secret",
        region_name="us-east-1",
    )
    client.create_bucket(Bucket=server.bucket)
    try:
        yield server
    finally:
        server.fault = None
        running.shutdown()
        running.server_close()
        thread.join()
