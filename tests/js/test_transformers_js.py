"""elsa-format/transformers: levels in transformers.js, in Node.js, Deno, Bun and Chromium."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ROOT, missing
from report.browser import find_programs
from test_browser import Visitor
from test_runtimes import found as find_runtime
from test_web_docs import Ranges
from web_networks import assert_same, served

import elsa_format

HERE = Path(__file__).parent
MODULES = ROOT / ".cache" / "transformers" / "node_modules"
LIBRARY = "dist/transformers.node.mjs"
VERSIONS = ("newest", "before")
"""Of transformers.js, as `make runtimes` installs them."""
PAGE = """<!doctype html><link rel="icon" href="data:,">
<script type="module">
import * as transformers from './modules/newest/dist/transformers.min.js'
import { elsa } from './src/transformers.js'
import { tasks } from './transformers_tasks.js'
const { env } = transformers
const runtime = 'modules/onnxruntime-web/dist/ort-wasm-simd-threaded.asyncify'
const [mjs, wasm] = ['mjs', 'wasm'].map(kind => new URL(`${runtime}.${kind}`, location).href)
env.backends.onnx.wasm.wasmPaths = { mjs, wasm }
Object.assign(env, { allowLocalModels: true, allowRemoteModels: false, localModelPath: '/www/' })
globalThis.visit = async level => {
  const events = []
  const net = await elsa('www/bert/', { level, progress_callback: event => events.push(event) })
  const { externalData } = net.options.session_options
  const data = externalData.map(({ data }) => data.reduce((a, b) => a + b, 0))
  return { data, level: net.level, bytes: net.bytes(level), last: events.at(-1) }
}
try {
  globalThis.found = location.search ? 'ready' : await tasks(transformers, elsa, 'www/')
} catch (error) {
  globalThis.found = { error: error.stack }
}
</script>"""


def test_what_is_downloaded_and_kept(node: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    layers = {f"layer {i}": rng.standard_normal((256, 512)).astype(np.float32) for i in range(4)}
    elsa_format.pack(layers, tmp_path / "net.safetensors", sparsities=[95, 80])
    elsa_format.ship(tmp_path / "net.safetensors", tmp_path / "net.ship.safetensors")
    environment = os.environ | {"ELSA_TEST_FILE": str(tmp_path / "net.ship.safetensors")}
    command = [node, "--test", str(HERE / "transformers.test.mjs")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert re.search(r"^# pass [1-9]", done.stdout, re.MULTILINE), done.stdout


def library(version: str) -> str:
    """The library, where make runtimes has put it."""
    path = MODULES / version
    if not (path / LIBRARY).exists():
        pytest.skip("transformers.js is not installed (make runtimes)")
    return str(path / LIBRARY)


@pytest.mark.parametrize("version", VERSIONS)
def test_levels_in_node(
    run_node: Callable[..., str],
    networks: Path,
    expected: dict[str, Any],
    version: str,
    tmp_path: Path,
) -> None:
    """Of a folder here, and with the release before of a server."""
    bases = iter([f"{networks}/www/"]) if version == "newest" else served(networks / "www", Ranges)
    for base in bases:
        script = HERE / "run_transformers.mjs"
        found = json.loads(run_node(script, library(version), base, tmp_path))
        assert found.pop("pipeline") in ("x", "y", "z")
        assert_same(found, expected, 1e-5)


def test_levels_by_kernels_that_skip_zeros(
    run_node: Callable[..., str], networks: Path, expected: dict[str, Any], tmp_path: Path
) -> None:
    script, base = HERE / "run_transformers.mjs", f"{networks}/www/"
    found = json.loads(run_node(script, library("newest"), base, tmp_path, "run"))
    assert found.pop("pipeline") in ("x", "y", "z")
    assert_same(found, expected, 1e-4)


@pytest.mark.parametrize("command", [["deno", "run", "-A", "--node-modules-dir=manual"], ["bun"]])
def test_levels_elsewhere(command: list[str], networks: Path, expected: dict[str, Any]) -> None:
    script = [str(HERE / "run_transformers.mjs"), library("newest"), f"{networks}/www/"]
    command = [find_runtime(command[0]), *command[1:], *script]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    del found["pipeline"]
    assert_same(found, expected, 1e-5)


@pytest.fixture(scope="module")
def site(networks: Path) -> Iterator[str]:
    """The page, with the library, its runtime and the networks beside it."""
    library("newest")
    page = networks / "page"
    page.mkdir()
    (page / "index.html").write_text(PAGE)
    for name, place in (("modules", MODULES), ("src", ROOT / "js" / "src")):
        (page / name).symlink_to(place)
    (page / "www").symlink_to(networks / "www")
    shutil.copy(HERE / "transformers_tasks.js", page)
    yield from served(page, Ranges)


@pytest.fixture(scope="module")
def browser() -> Iterator[Visitor]:
    if find_programs() is None:
        missing("needs chromium and chromedriver (Debian: chromium, chromium-driver)")
    with Visitor() as opened:
        yield opened


def test_levels_in_chromium(site: str, browser: Visitor, expected: dict[str, Any]) -> None:
    browser.visit(site)
    found = browser.wait("return window.found", 60)
    assert "error" not in found, found
    del found["pipeline"]
    assert_same(found, expected, 1e-5)


def visit(browser: Visitor, site: str, level: Any) -> Any:
    """A visit of the page: what it answers, and which bytes of weights it asked for."""
    browser.visit(f"{site}?visit")
    browser.wait("return window.found", 60)
    Ranges.asked.clear()
    browser.run(
        "window.answer = undefined; const set = answer => window.answer = answer;"
        "visit(arguments[0]).then(set, error => set({ error: error.stack }))",
        level,
    )
    answer = browser.wait("return window.answer", 60)
    assert "error" not in answer, answer
    return answer, [span for path, span in Ranges.asked if path.endswith("model.ship.safetensors")]


def test_the_browser_keeps_what_it_downloaded(site: str, browser: Visitor) -> None:
    """A second visit downloads no weights, an upgrade the difference, a new version all."""
    first, asked = visit(browser, site, 1)
    assert first["last"]["status"] == "done"
    assert first["last"]["loaded"] == first["bytes"]
    assert asked[0] == "bytes=0-65535"
    ends = [int(span.rpartition("-")[2]) for span in asked if span]
    assert max(ends) < max(first["bytes"], 1 << 16)
    again, asked = visit(browser, site, 1)
    assert asked == []
    assert again["data"] == first["data"]
    _, asked = visit(browser, site, "dense")
    assert all(int(re.findall(r"\d+", span or "")[0]) >= first["bytes"] for span in asked)
    before, Ranges.version = Ranges.version, '"2"'
    try:
        assert visit(browser, site, 1)[1][0] == "bytes=0-65535"
    finally:
        Ranges.version = before
