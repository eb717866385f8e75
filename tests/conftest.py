"""Networks to test with."""

import io
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import internals
import numpy as np
import pytest
from faulty_server import Server, serving
from hypothesis import HealthCheck, settings

import elsa_format as elsa

# A busy machine is slow, not wrong.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


# Where Ctrl-C or a hangup is ignored (`nohup make test &`), programs that tests start would ignore
# them too, and tests that send them would wait. What is caught, if to no effect, is not inherited.
for _number in {signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)}:
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, lambda *_: None)


@pytest.fixture
def network() -> dict[str, np.ndarray]:
    """A dense network: two layers, a bias, a step count, batch-norm statistics."""
    rng = np.random.default_rng(7)
    return {
        "conv/kernel": rng.standard_normal((3, 3, 4, 8)).astype(np.float32),
        "dense/kernel": rng.standard_normal((32, 10)).astype(np.float32),
        "dense/bias": rng.standard_normal(10).astype(np.float32),
        "bn/mean": rng.standard_normal(8).astype(np.float32),
        "step": np.array(1234, np.int64),
    }


@pytest.fixture
def packed(network: dict[str, np.ndarray], tmp_path: Path) -> Path:
    """The network with three one-shot levels."""
    path = tmp_path / "net.safetensors"
    elsa.pack(network, path, sparsities=[95, 90, 80])
    return path


@pytest.fixture
def rich(network: dict[str, np.ndarray], tmp_path: Path) -> Path:
    """The network with three levels and statistics per level."""
    path = tmp_path / "rich.safetensors"
    rng = np.random.default_rng(8)
    tensors = dict(network)
    nested = ["conv/kernel", "dense/kernel"]
    for name in nested:
        counters = rng.integers(0, 4, tensors[name].shape)
        tensors[name] = elsa.embed_counters(tensors[name], counters, bits=2)
    elsa.write(
        path,
        tensors,
        levels=[
            elsa.LevelSpec("95%", target=0.95, metrics={"accuracy": 0.9}),
            elsa.LevelSpec("90%", target=0.9, metrics={"accuracy": 0.93}),
            elsa.LevelSpec("80%", target=0.8, metrics={"accuracy": 0.95}),
        ],
        nested=nested,
        per_level={"bn/mean": [np.full(8, t, np.float32) for t in range(3)]},
        dense_metrics={"accuracy": 0.96},
        metadata={"format": "pt"},
    )
    return path


@pytest.fixture
def to_file(tmp_path: Path) -> Callable[[bytes], Path]:
    """Store bytes as a file."""

    def store(content: bytes) -> Path:
        path = tmp_path / "stored.safetensors"
        path.write_bytes(content)
        return path

    return store


@pytest.fixture
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server on loopback; clients do not wait long before they ask again.

    Nor for an answer, where a module says how many seconds in TIMEOUT.
    """
    monkeypatch.setenv("no_proxy", "127.0.0.1,localhost")
    if hasattr(request.module, "TIMEOUT"):
        monkeypatch.setenv("ELSA_TIMEOUT", str(request.module.TIMEOUT))
    monkeypatch.setattr(internals._http, "FIRST_PAUSE", 0.01)
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
