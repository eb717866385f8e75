"""Every block of docs/web.md runs, in Chromium, on pages from a server that understands ranges."""

import functools
import itertools
import json
import re
import shutil
import sys
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from conftest import ROOT, missing
from pages import Block, blocks
from report.browser import find_programs
from test_browser import Visitor

import elsa_format

sys.path.insert(0, str(ROOT / "examples" / "web"))

import serve

MODULES = ROOT / ".cache" / "transformers" / "node_modules"
RUNTIME = ROOT / ".cache" / "web" / "node_modules" / "onnxruntime-web" / "dist"
NUMBERS = itertools.count()
NAMES = ("load", "loadImage", "openDelivery", "inspect", "extract")
PAGE = """<!doctype html><link rel="icon" href="data:,">
<script type="importmap">
{"imports": {"elsa-format": "./src/index.js",
  "elsa-format/transformers": "./src/transformers.js", "elsa-format/run": "./src/run.js",
  "@huggingface/transformers": "./modules/newest/dist/transformers.min.js",
  "onnxruntime-web/wasm": "./ort/ort.wasm.bundle.min.mjs"}}
</script>
<script type="module">
import { openDelivery } from 'elsa-format'
// What the blocks take for granted.
globalThis.used = []
globalThis.use = tensors => used.push([...tensors.keys()].length)
globalThis.bar = {}
globalThis.controller = new AbortController()
globalThis.delivery = await openDelivery('net.ship.safetensors')
globalThis.found = {}
const [name, library] = location.search.slice(1).split('&')
if (library) {
  // Nothing is fetched from a CDN.
  const { env } = await import('@huggingface/transformers')
  const runtime = 'modules/onnxruntime-web/dist/ort-wasm-simd-threaded.asyncify'
  const [mjs, wasm] = ['mjs', 'wasm'].map(kind => new URL(`${runtime}.${kind}`, location).href)
  env.backends.onnx.wasm.wasmPaths = { mjs, wasm }
}
try {
  await import(`./${name}.js`)
  found.done = true
} catch (error) {
  found.error = error.stack
}
</script>"""


class Ranges(serve.Handler):
    """Notes what is asked for, and tells a version."""

    asked: list[tuple[str, str | None]] = []  # noqa: RUF012
    version = '"1"'

    def do_GET(self) -> None:  # noqa: N802
        """A file, or a part of it."""
        Ranges.asked.append((self.path, self.headers.get("Range")))
        super().do_GET()

    def end_headers(self) -> None:
        """The version of every file."""
        self.send_header("ETag", Ranges.version)
        super().end_headers()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, networks: Path) -> Iterator[tuple[Path, str]]:
    """A network, its template, its delivery file and a directory, beside the package."""
    folder = tmp_path_factory.mktemp("site")
    rng = np.random.default_rng(0)
    kernel = rng.standard_normal((64, 512)).astype(np.float32)
    elsa_format.pack({"conv1/kernel": kernel}, folder / "net.safetensors", sparsities=[95, 80])
    elsa_format.ship(folder / "net.safetensors", folder / "net.ship.safetensors")
    (folder / "net.onnx").write_bytes(template(folder / "net.safetensors"))
    (folder / "index.html").write_text(PAGE)
    shutil.copytree(ROOT / "js" / "src", folder / "src")
    (folder / "minilm").symlink_to(networks / "www" / "bert")
    if (MODULES / "newest").exists():
        (folder / "modules").symlink_to(MODULES)
    if all((RUNTIME / name).exists() for name in serve.RUNTIME):
        (folder / "ort").mkdir()
        for name in serve.RUNTIME:
            shutil.copy(RUNTIME / name, folder / "ort")
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Ranges, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield folder, f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()
    thread.join()


def template(path: Path) -> bytes:
    """x · w, where w points into the ELSA file."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    entry = json.loads(data[8 : 8 + length])["conv1/kernel"]
    begin, end = entry["data_offsets"]
    weights = onnx.TensorProto(name="w", data_type=onnx.TensorProto.FLOAT, dims=entry["shape"])
    weights.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", path.name), ("offset", 8 + length + begin)):
        weights.external_data.add(key=key, value=str(value))
    weights.external_data.add(key="length", value=str(end - begin))
    rows, columns = entry["shape"]
    make = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("MatMul", ["x", "w"], ["y"])],
        "net",
        [make("x", onnx.TensorProto.FLOAT, [1, rows])],
        [make("y", onnx.TensorProto.FLOAT, [1, columns])],
        [weights],
    )
    opset = onnx.helper.make_opsetid("", 17)
    return onnx.helper.make_model(graph, opset_imports=[opset], ir_version=8).SerializeToString()


@pytest.fixture(scope="module")
def browser() -> Iterator[Visitor]:
    if find_programs() is None:
        missing("needs chromium and chromedriver (Debian: chromium, chromium-driver)")
    with Visitor() as opened:
        yield opened


BLOCKS = [block for block in blocks(ROOT / "docs" / "web.md") if block.kind == "js"]


def block_with(text: str) -> Block:
    (found,) = [block for block in BLOCKS if text in block.code]
    return found


def visit(browser: Visitor, site: tuple[Path, str], block: Block) -> Any:
    """Run a block, with imports of what blocks above it imported; gives what it left."""
    folder, base = site
    library = "@huggingface/transformers'\n" in block.code or "await net." in block.code
    if "await net." in block.code:  # of the block before
        before = block_with("const { data } = await extract").code
        block = block._replace(code=f"{before}\n{block.code}")
    needed = [name for name in NAMES if re.search(rf"\b{name}\(", block.code)]
    needed = [name for name in needed if f"const {name} " not in block.code]
    needed = [name for name in needed if not re.search(rf"import {{[^}}]*\b{name}\b", block.code)]
    whole = "net.safetensors" if "load(" in block.code and "openDelivery(" not in block.code else ""
    names = re.findall(r"^const (?:\{ ([\w, ]+) \}|(\w+))", block.code, re.MULTILINE)
    kept = ", ".join(a or b for a, b in names)
    name = f"block{next(NUMBERS)}"
    (folder / f"{name}.js").write_text(
        f"import {{ {', '.join(needed)} }} from 'elsa-format'\n"
        f"const url = '{whole or 'net.ship.safetensors'}'\n"
        f"{block.code}\nObject.assign(found, {{ {kept} }})\n",
        "utf-8",
    )
    browser.visit(f"{base}?{name}{'&library' * library}")
    browser.wait("return window.found?.done || window.found?.error")
    return browser.run("return found.error")


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: f"line{block.line}")
def test_the_block_runs(browser: Visitor, site: tuple[Path, str], block: Block) -> None:
    if "onnxruntime-web" in block.code and not (site[0] / "ort").exists():
        pytest.skip("onnxruntime-web is not installed (make runtimes)")
    if re.search("huggingface|await net", block.code) and not (site[0] / "modules").exists():
        pytest.skip("transformers.js is not installed (make runtimes)")
    assert visit(browser, site, block) is None
    assert browser.console() == []


def test_what_the_blocks_say(browser: Visitor, site: tuple[Path, str]) -> None:
    visit(browser, site, block_with("findLast"))
    assert browser.run("return found.small.level") == 2
    visit(browser, site, block_with("delivery.levels()"))
    assert browser.run("return used.length") == 3
    visit(browser, site, block_with("onProgress"))
    assert browser.run("return bar.value") == 1
    if (site[0] / "ort").exists():
        visit(browser, site, block_with("InferenceSession"))
        script = """
          const x = new Float32Array(64)
          x[3] = 1
          globalThis.answer = undefined
          import('onnxruntime-web/wasm').then(async ort => {
            const { y } = await found.session.run({ x: new ort.Tensor('float32', x, [1, 64]) })
            globalThis.answer = Array.from(y.data)
          })"""
        browser.run(script)
        answer = browser.wait("return globalThis.answer")
        with elsa_format.open(site[0] / "net.safetensors") as file:
            assert answer == file.load(1)["conv1/kernel"][3].tolist()


def test_what_arrived_is_kept(browser: Visitor, site: tuple[Path, str]) -> None:
    """By the browser: a second visit asks for nothing, and a new version is noticed."""
    block = block_with("getDirectory")
    ship = "/net.ship.safetensors"

    def asked() -> list[str | None]:
        """By the block alone: the page itself opens the delivery first."""
        found = [wanted for path, wanted in Ranges.asked if path == ship]
        return found[1:]

    Ranges.asked.clear()
    forget = """
      navigator.storage.getDirectory().then(folder => folder.removeEntry('net.ship.safetensors'))
        .catch(() => {})"""
    browser.visit(site[1])
    browser.run(forget)
    Ranges.asked.clear()
    assert visit(browser, site, block) is None
    assert asked()
    Ranges.asked.clear()
    assert visit(browser, site, block) is None
    assert asked() == []
    Ranges.version = '"2"'
    try:
        third = block._replace(
            code=block.code.replace("delivery.load(2)", "delivery.load('dense')")
        )
        assert "the file on the server has changed" in visit(browser, site, third)
    finally:
        Ranges.version = '"1"'
    Ranges.asked.clear()
    assert visit(browser, site, third) is None
    assert all(int(re.findall(r"\d+", wanted or "")[0]) > 0 for wanted in asked())
    browser.console()
