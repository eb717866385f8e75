"""The package and its page in Chromium."""

import json
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ROOT, missing
from report.browser import Browser, find_programs

import elsa_format

sys.path[:0] = [str(ROOT), str(ROOT / "examples" / "web")]

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
    (page / "index.html").write_text(
        """<!doctype html><link rel="icon" href="data:,"><script type="module">
        import * as elsa from './js/src/index.js'
        import { checkVectors } from './tests/js/vectors.js'
        const manifest = await (await fetch('spec/vectors/manifest.json')).json()
        const there = new Set(['manifest.json', ...manifest.vectors.map(v => v.file)])
        const got = new Map()
        const get = async path => new Uint8Array(await (await fetch('spec/vectors/' + path)).arrayBuffer())
        const read = path => there.has(path) ? got.get(path) ?? got.set(path, get(path)).get(path) : undefined
        window.result = await checkVectors(elsa, read, { sizes: [0, 7] }).catch(e => ({ failures: [e.stack] }))
        </script>""",
        "utf-8",
    )
    for url in served(page):
        browser.visit(url)
        result = browser.wait("return window.result", 120)
        assert result["failures"] == []
        manifest = json.loads((ROOT / "spec" / "vectors" / "manifest.json").read_text("utf-8"))
        assert result["count"] == 2 * len(manifest["vectors"])
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


CARDS = "return [...document.querySelectorAll('.card')].map(card => card.dataset.state)"
DIGITS = "return [...document.querySelectorAll('.digit')].map(digit => digit.textContent)"


@pytest.fixture
def open_page(browser: Visitor, page: str) -> Iterator[Visitor]:
    browser.prefer("light")
    browser.resize(1280)
    browser.visit(page)
    yield browser
    # Whether ONNX Runtime Web is installed is asked for, and here it is not.
    assert [line for line in browser.console() if "/ort/" not in line] == []


def test_levels_answer_one_after_the_other(open_page: Visitor) -> None:
    open_page.draw("#pad", STROKE)
    open_page.wait(
        f"{CARDS.replace('return ', 'const s = ')}; return s[0] === 'here' && s[3] === 'waiting'"
    )
    answered = open_page.wait(
        f"{DIGITS.replace('return ', 'const d = ')}; return /[0-9]/.test(d[0]) && d"
    )
    assert answered[3] == "–"
    open_page.wait("return document.querySelector('#answer').textContent !== '?'")
    open_page.run("document.querySelector('#speed').value = 0")
    open_page.click("#again")
    open_page.wait(
        f"{CARDS.replace('return ', 'const s = ')}; return s.length === 4 && s.every(x => x === 'here')"
    )
    measured = "return [...document.querySelectorAll('.measured')].map(m => m.textContent)"
    open_page.wait(
        f"{measured.replace('return ', 'const m = ')}; return m.every(x => x.endsWith('%'))"
    )
    assert open_page.run("return document.querySelectorAll('#legend span').length") == 4


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


def test_engine_gives_what_jax_gives(run_node: Any, tmp_path: Path) -> None:
    """The engine of the page on the network of the demo, a third of its weights being kept."""
    pytest.importorskip("flax")
    import jax

    from elsa_train import models

    model = models.DigitsNet(num_classes=10)
    rng = np.random.default_rng(0)
    images = rng.integers(0, 17, (5, 8, 8, 1))
    inputs = ((images - 4.88) / 6.02).astype(np.float32)
    variables = model.init(jax.random.key(0), inputs)
    flat = {
        jax.tree_util.keystr(path[1:], simple=True, separator="/"): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(variables)
    }
    flat = {k: v + rng.random(v.shape).astype(np.float32) * 0.1 for k, v in flat.items()}
    flat = {k: v * (rng.random(v.shape) < 0.3) if "conv" in k else v for k, v in flat.items()}
    tree = jax.tree_util.tree_map_with_path(
        lambda path, _: flat[jax.tree_util.keystr(path[1:], simple=True, separator="/")], variables
    )
    expected = np.asarray(jax.nn.softmax(model.apply(tree, inputs)))
    document = {k: {"shape": v.shape, "data": v.ravel().tolist()} for k, v in flat.items()}
    (tmp_path / "net.json").write_text(json.dumps([document, images.reshape(5, 64).tolist()]))
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
    np.testing.assert_allclose(json.loads(run_node(script)), expected, rtol=1e-3, atol=1e-5)
