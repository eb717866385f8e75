"""A server for the time of a test, and a level of what it serves."""

import io
from collections.abc import Iterator

import numpy as np
import pytest
from faulty_server import Server, serving
from internals import _http

import elsa_format as elsa


@pytest.fixture
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server on loopback; clients do not wait long before they ask again.

    Nor for an answer, where a module says how many seconds in TIMEOUT.
    """
    monkeypatch.setenv("no_proxy", "127.0.0.1,localhost")
    if hasattr(request.module, "TIMEOUT"):
        monkeypatch.setenv("ELSA_TIMEOUT", str(request.module.TIMEOUT))
    monkeypatch.setattr(_http, "FIRST_PAUSE", 0.01)
    with serving() as state:
        yield state


@pytest.fixture(scope="module")
def content() -> bytes:
    """An ELSA file of some 100 KB: more than the first request fetches."""
    weights = np.random.default_rng(5).standard_normal((100, 250)).astype(np.float32)
    written = io.BytesIO()
    elsa.pack({"w": weights}, written, sparsities=[90, 50])
    return written.getvalue()


@pytest.fixture(scope="module")
def level(content: bytes) -> dict[str, np.ndarray]:
    """The sparsest level of the file."""
    return elsa.open(io.BytesIO(content)).load(1)
