"""The package and its page in Chromium."""

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ROOT, missing
from report.browser import Browser, find_programs

import elsa_format

sys.path.insert(0, str(ROOT / "examples" / "web"))

import serve

STROKE = [(0.5, 0.15), (0.5, 0.4), (0.5, 0.65), (0.5, 0.85)]


class Visitor(Browser):
    """Chromium on pages from a server."""

    def visit(self, url: str) -> None:
        """Load a page."""
        self.console()
        self._call("POST", "/url", {"url": url})
        self.settle()

    def wait(self, script: str, seconds: float = 30) -> Any:
        """What a script returns, once that is true."""
        end = time.monotonic() + seconds
        while not (found := self.run(script)):
            assert time.monotonic() < end, f"{script} did not come true"
            time.sleep(0.05)
        return found

    def draw(self, selector: str, points: list[tuple[float, float]]) -> None:
        """Draw on an element with the mouse, in parts of its size."""
        box = self.run(
            "const element = document.querySelector(arguments[0]); element.scrollIntoView();"
            "const b = element.getBoundingClientRect(); return [b.left, b.top, b.width, b.height]",
            selector,
        )
        moves = [
            {"type": "pointerMove", "duration": 10, "x": round(box[0] + x * box[2])}
            | {"y": round(box[1] + y * box[3])}
            for x, y in points
        ]
        down, up = ({"type": kind, "button": 0} for kind in ("pointerDown", "pointerUp"))
        source = {"type": "pointer", "id": "mouse", "actions": [moves[0], down, *moves[1:], up]}
        self._call("POST", "/actions", {"actions": [source]})


@pytest.fixture(scope="module")
def browser() -> Iterator[Visitor]:
    if find_programs() is None:
        missing("needs chromium and chromedriver (Debian: chromium, chromium-driver)")
    with Visitor() as opened:
        yield opened


def served(folder: Path) -> Iterator[str]:
    server = serve.make_server(folder)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()
    thread.join()


def test_all_vectors(browser: Visitor, tmp_path: Path) -> None:
    page = tmp_path / "page"
    for part in ("js/src", "spec/vectors", "tests/js"):
        (page / part).parent.mkdir(parents=True, exist_ok=True)
        (page / part).symlink_to(ROOT / part)
    (page / "index.html").symlink_to(ROOT / "tests" / "js" / "vectors.html")
    for url in served(page):
        browser.visit(url)
        result = browser.wait("return window.result", 120)
        assert result["failures"] == []
        manifest = json.loads((ROOT / "spec" / "vectors" / "manifest.json").read_text("utf-8"))
        assert result["count"] == len(manifest["vectors"])
        assert browser.console() == []


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The page with an untrained network of the right shapes: its accuracy is no matter here."""
    demo = tmp_path_factory.mktemp("demo")
    rng = np.random.default_rng(3)
    tensors: dict[str, np.ndarray] = {"head/bias": rng.standard_normal(10).astype(np.float32)}
    shapes: dict[str, tuple[int, ...]] = {"conv1/kernel": (3, 3, 1, 32), "head/kernel": (64, 10)}
    shapes |= {"conv2/kernel": (3, 3, 32, 64), "conv3/kernel": (3, 3, 64, 64)}
    for name, shape in shapes.items():
        weights = (rng.standard_normal(shape) * 0.1).astype(np.float32)
        counters = rng.choice(4, shape, p=[0.8, 0.05, 0.05, 0.1])
        tensors[name] = elsa_format.embed_counters(weights, counters, bits=2)
    for i, width in ((1, 32), (2, 64), (3, 64)):
        for part, value in (("scale", 1), ("bias", 0.1), ("mean", 0), ("var", 1)):
            tensors[f"norm{i}/{part}"] = np.full(width, value, np.float32)
    elsa_format.write(
        demo / "net.safetensors",
        tensors,
        levels=[elsa_format.LevelSpec(name, metrics={"accuracy": 0.5}) for name in ("a", "b", "c")],
        nested=list(shapes),
        per_level={"norm1/mean": [np.full(32, t / 10, np.float32) for t in range(3)]},
        dense_metrics={"accuracy": 0.75},
    )
    (demo / "net.onnx").write_bytes(b"")
    yield from served(serve.build(demo, demo / "web"))


# What becomes true once a level, or all of them, answer.
FIRST = """
  const states = [...document.querySelectorAll('.card')].map(card => card.dataset.state)
  const digits = [...document.querySelectorAll('.digit')].map(digit => digit.textContent)
  return states[0] === 'here' && states[3] === 'waiting' && /[0-9]/.test(digits[0]) && digits"""
ALL = """
  const cards = [...document.querySelectorAll('.card')]
  return cards.length === 4 && cards.every(card => card.dataset.state === 'here')
    && cards.every(card => card.querySelector('.measured').textContent.endsWith('%'))"""


@pytest.fixture
def open_page(browser: Visitor, page: str) -> Iterator[Visitor]:
    browser.prefer("light")
    browser.resize(1280)
    browser.visit(page)
    yield browser
    assert browser.console() == []


def test_levels_answer_one_after_the_other(open_page: Visitor) -> None:
    open_page.draw("#pad", STROKE)
    assert open_page.wait(FIRST)[3] == "–"
    open_page.wait("return document.querySelector('#answer').textContent !== '?'")
    open_page.run("document.querySelector('#speed').value = 0")
    open_page.click("#again")
    open_page.wait(ALL)
    assert open_page.run("return document.querySelectorAll('#legend span').length") == 4


def test_a_page_that_is_left_and_loaded_again(open_page: Visitor, page: str) -> None:
    open_page.wait(FIRST.replace("/[0-9]/.test(digits[0])", "true"))
    open_page.visit(page)
    open_page.run("document.querySelector('#speed').value = 0")
    open_page.click("#again")
    open_page.wait(ALL)


def test_a_connection_that_breaks_leaves_the_levels_that_arrived(
    browser: Visitor, page: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = serve.Handler.send
    answers = iter([send])

    def break_off(handler: serve.Handler, data: bytes, _rate: int) -> None:
        """All of the first answer; of the others, nothing of what was promised."""
        next(answers, lambda *_: None)(handler, data, 0)
        handler.close_connection = True

    monkeypatch.setattr(serve.Handler, "send", break_off)
    browser.prefer("light")
    browser.resize(1280)
    browser.visit(page)
    browser.wait(
        "return document.querySelector('#status').textContent.startsWith('Stopped: broke')"
    )
    browser.draw("#pad", STROKE)
    browser.wait("return /[0-9]/.test(document.querySelector('#answer').textContent)")
    states = browser.run("return [...document.querySelectorAll('.card')].map(c => c.dataset.state)")
    assert states[0] == "here"
    assert states[-1] == "waiting"
    assert all("net::ERR_" in line for line in browser.console())
    monkeypatch.undo()
    browser.run("document.querySelector('#speed').value = 0")
    browser.click("#again")
    browser.wait(ALL)


def test_page_works_with_the_keyboard(open_page: Visitor) -> None:
    open_page.wait("return document.querySelector('.card[data-state=here]')")
    open_page.run("document.querySelector('#pad').focus()")
    open_page.press("Space", *["ArrowDown"] * 6, "Space")
    open_page.wait("return document.querySelector('#answer').textContent !== '?'")
    open_page.press("Escape")
    open_page.wait("return document.querySelector('#answer').textContent === '?'")
    open_page.press("Tab", "Tab", "Enter")  # past “Clear” to “Test image”
    open_page.wait("return document.querySelector('#truth').textContent.startsWith('a test image')")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_page_fits_a_phone(open_page: Visitor, theme: str) -> None:
    open_page.prefer(theme)
    open_page.resize(360, 740, phone=True)
    open_page.wait("return document.querySelectorAll('.card').length === 4")
    assert open_page.run("return document.documentElement.scrollWidth <= innerWidth")
    back, text = open_page.run(
        "const s = getComputedStyle(document.body); return [s.backgroundColor, s.color]"
    )
    dark = sum(map(int, back[4:-1].split(","))) < sum(map(int, text[4:-1].split(",")))
    assert dark == (theme == "dark")


def reference(tensors: dict[str, np.ndarray], image: np.ndarray) -> np.ndarray:
    """The network of elsa_train.models.DigitsNet, in numpy."""
    x = (image.reshape(8, 8, 1) - 4.88) / 6.02
    for i in (1, 2, 3):
        kernel, width = tensors[f"conv{i}/kernel"], x.shape[0]
        padded = np.pad(x, ((1, 1), (1, 1), (0, 0)))
        shifts = [(a, b) for a in range(3) for b in range(3)]
        x = sum(padded[a : a + width, b : b + width] @ kernel[a, b] for a, b in shifts)
        scale, bias, mean, var = (tensors[f"norm{i}/{k}"] for k in ("scale", "bias", "mean", "var"))
        x = np.maximum((x - mean) / np.sqrt(var + 1e-5) * scale + bias, 0)
        if i == 1:
            x = x.reshape(4, 2, 4, 2, -1).max((1, 3))
    logits = x.mean((0, 1)) @ tensors["head/kernel"] + tensors["head/bias"]
    return np.exp(logits) / np.exp(logits).sum()


def test_engine_of_the_page(run_node: Callable[..., str], tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"head/kernel": (64, 10), "head/bias": (10,)}
    for i, (inputs, outputs) in enumerate(((1, 32), (32, 64), (64, 64)), 1):
        shapes[f"conv{i}/kernel"] = (3, 3, inputs, outputs)
        shapes |= {f"norm{i}/{part}": (outputs,) for part in ("scale", "bias", "mean", "var")}
    tensors = {name: rng.random(shape) - 0.4 for name, shape in shapes.items()}
    tensors |= {name: x * (rng.random(x.shape) < 0.2) for name, x in tensors.items() if x.ndim == 4}
    tensors |= {name: x + 0.5 for name, x in tensors.items() if name.endswith("var")}
    images = rng.integers(0, 17, (5, 64))
    written = {k: {"shape": v.shape, "data": v.ravel().tolist()} for k, v in tensors.items()}
    (tmp_path / "net.json").write_text(json.dumps([written, images.tolist()]))
    script = tmp_path / "run.mjs"
    script.write_text(
        f"""
        import {{ readFileSync }} from 'node:fs'
        import {{ makeNetwork }} from '{(ROOT / "examples/web/engine.js").as_uri()}'
        const [tensors, images] = JSON.parse(readFileSync('{tmp_path}/net.json', 'utf8'))
        for (const tensor of Object.values(tensors)) tensor.data = Float32Array.from(tensor.data)
        const network = makeNetwork(new Map(Object.entries(tensors)))
        console.log(JSON.stringify(images.map(image => [...network(image)])))
        """
    )
    expected = [reference(tensors, image) for image in images]
    np.testing.assert_allclose(json.loads(run_node(script)), expected, rtol=1e-2, atol=1e-4)
