"""Connections to a server are used again, and never for somebody else's answer."""

import io
import os
from typing import Any

import numpy as np
import pytest
from bits import same_bits
from faulty_server import DONE, Request, cut_after, fine, serving

import elsa_format as elsa


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1,localhost")
    monkeypatch.setenv("ELSA_TIMEOUT", "5")


@pytest.fixture(scope="module")
def content() -> bytes:
    """An ELSA file of six tensors, larger than what the first request brings."""
    rng = np.random.default_rng(5)
    tensors = {f"layer{i}": rng.standard_normal((100, 250)).astype(np.float32) for i in range(6)}
    written = io.BytesIO()
    elsa.pack(tensors, written, sparsities=[90, 50])
    return written.getvalue()


def all_tensors(file: elsa.File) -> dict[str, Any]:
    return {name: file.tensor(name, level=1) for name in file.tensors}


def test_six_tensors_come_over_one_connection(content: bytes) -> None:
    level = elsa.open(io.BytesIO(content)).load(1)
    with serving(keep=True) as server, elsa.open(server.serve(content)) as file:
        assert same_bits(all_tensors(file), level)
        assert len(server.requests) == 7
        assert server.connections == 1


def test_a_server_that_closes_without_a_word(content: bytes) -> None:
    def close_quietly(request: Request) -> object:
        request.answer(request.server_state.files[request.path])
        request.close_connection = True
        return DONE

    level = elsa.open(io.BytesIO(content)).load(1)
    with serving(keep=True) as server:
        url = server.serve(content, faults=[close_quietly] * 3)
        with elsa.open(url) as file:
            assert same_bits(all_tensors(file), level)
        assert server.connections == 4


def test_a_cut_connection_is_not_used_again(content: bytes) -> None:
    level = elsa.open(io.BytesIO(content)).load(1)
    with serving(keep=True) as server:
        url = server.serve(content, faults=[fine, cut_after(10_000)])
        with elsa.open(url) as file:
            assert same_bits(all_tensors(file), level)
        assert server.connections == 2


def test_bytes_that_nobody_asked_for_are_no_answer(content: bytes) -> None:
    def with_more(request: Request) -> object:
        answered, request.wfile = request.wfile, io.BytesIO()
        request.answer(request.server_state.files[request.path])
        answer, request.wfile = request.wfile.getvalue(), answered
        more = b"HTTP/1.1 206 Partial Content\r\nContent-Length: 9\r\n\r\nmalicious"
        request.wfile.write(answer[:-1])
        request.wfile.write(answer[-1:] + more)  # as one, so that they come together
        return DONE

    level = elsa.open(io.BytesIO(content)).load(1)
    with serving(keep=True) as server:
        with elsa.open(server.serve(content, faults=[with_more] * 7)) as file:
            assert same_bits(all_tensors(file), level)
        assert server.connections == 7


@pytest.mark.skipif(not hasattr(os, "fork"), reason="only where processes fork")
def test_a_forked_child_has_connections_of_its_own(content: bytes) -> None:
    level = elsa.open(io.BytesIO(content)).load(1)
    with serving(keep=True) as server, elsa.open(server.serve(content)) as file:
        file.tensor("layer0", 1)
        child = os.fork()
        if child == 0:  # pragma: no cover
            os._exit(0 if same_bits(all_tensors(file), level) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert same_bits(all_tensors(file), level)
        assert server.connections == 2
