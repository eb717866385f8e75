"""Pages to look at, and a browser to look with."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import elsa_format as elsa
from elsa_report import write_report

sys.path.insert(0, str(Path(__file__).parent))

from browser import Browser, find_programs

HOSTILE = (
    "</script><script>window.hacked = 1</script>",
    "<img src=x onerror='window.hacked = 2'>",
    '"><svg onload="window.hacked = 3">',
    "<!--<script>",
    "%%SCRIPT%%",
    "&lt;b&gt; \u2028 \u202e",
    "__proto__",
)


@pytest.fixture(scope="session")
def make_network(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Write an ELSA file of random weights: so many layers, so many levels."""

    def make(
        layers: int = 6,
        levels: int = 3,
        *,
        shape: tuple[int, ...] = (3, 3, 24, 24),
        names: tuple[str, ...] = (),
        metrics: bool = True,
        hostile: bool = False,
    ) -> Path:
        rng = np.random.default_rng(5)
        bits = levels.bit_length()
        nested = list(names) or [f"block_{i}/conv/kernel" for i in range(layers)]
        tensors: dict[str, np.ndarray] = {}
        for i, name in enumerate(nested):
            form = (*shape[:-1], shape[-1] + i % 5)
            weights = rng.standard_normal(form).astype(np.float32)
            counters = rng.integers(0, levels + 1, form) * (rng.random(form) < 0.2 + 0.6 * (i % 3))
            tensors[name] = elsa.embed_counters(weights, counters, bits=bits)
        tensors["bn/mean"] = np.zeros(4, np.float32)
        tensors["step"] = np.array(1, np.int64)
        prefix = HOSTILE[0] if hostile else ""
        measured = [
            {"accuracy": 0.8 + t / (10 * levels), f"loss{prefix}": 1 / (t + 1)} if metrics else {}
            for t in range(levels)
        ]
        path = tmp_path_factory.mktemp("network") / "net.safetensors"
        elsa.write(
            path,
            tensors,
            levels=[
                elsa.LevelSpec(f"{prefix}level {t + 1}", metrics=m) for t, m in enumerate(measured)
            ],
            nested=nested,
            per_level={"bn/mean": [np.zeros(4, np.float32)] * levels},
            dense_metrics={"accuracy": 0.95} if metrics else {},
            digests=levels < 20,
            metadata={HOSTILE[1]: HOSTILE[0]} if hostile else {},
        )
        return path

    return make


@pytest.fixture(scope="session")
def make_page(
    make_network: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """The report of such a file."""

    def make(*args: int, full: bool = False, **options: object) -> Path:
        page = tmp_path_factory.mktemp("page") / "report.html"
        write_report(make_network(*args, **options), page, full=full)
        return page

    return make


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    """One Chromium for all tests; where none is installed they are skipped, but not in CI."""
    if find_programs() is None:
        message = "needs chromium and chromedriver (Debian: chromium, chromium-driver)"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    with Browser() as browser:
        yield browser


@pytest.fixture
def browser(chromium: Browser) -> Iterator[Browser]:
    """The browser in its first state; the page must have left nothing on the console."""
    chromium.prefer("light")
    chromium.resize(1280)
    yield chromium
    assert chromium.console() == []
    chromium.run("try { localStorage.clear() } catch {}")
