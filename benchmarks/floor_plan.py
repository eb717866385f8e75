"""How much of `elsa_format` a level passes through: `python -m benchmarks.floor_plan`.

Prints, for a level extracted from a URL by the command and from Python, the functions that are
under way at the read of a block (frames) and the modules in which a function runs; the same for a
model directory that is packed; and the modules and lines of code of the package. `--names` lists
the frames and the modules.
"""

import argparse
import ast
import io
import json
import re
import sys
import tempfile
import threading
import tokenize
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

import elsa_format as elsa
from elsa_format import _start

PACKAGE = Path(elsa.__file__).parent
SIDE = 512
"""Rows of the layer: more bytes than come with a header."""
READS = frozenset({"recv_into", "preadv", "readinto"})
"""What reads a block: functions of the system."""


class Trace:
    """What runs of the package."""

    def __init__(self) -> None:
        self.modules: set[str] = set()
        self.frames: list[str] = []
        """The functions under way at the read below most of them, the innermost first."""

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Take what `sys.setprofile` tells."""
        if event == "call" and (module := _module(frame.f_code)):
            self.modules.add(module)
        elif event == "c_call" and argument.__name__ in READS:
            found = [f"{_module(c)}: {c.co_qualname}" for c in _callers(frame) if _module(c)]
            self.frames = max(self.frames, found, key=len)


def _module(code: CodeType) -> str:
    """The module of a function of the package; of others nothing."""
    path = Path(code.co_filename)
    inside = code.co_name != "<module>" and path.is_relative_to(PACKAGE)
    return path.relative_to(PACKAGE).as_posix() if inside else ""


def _callers(frame: FrameType | None) -> Iterator[CodeType]:
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back


def trace(call: Callable[[], object]) -> Trace:
    """What a call passes through, made once before, so that it imports nothing."""
    call()
    found = Trace()
    threading.setprofile(found)
    sys.setprofile(found)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return found


def run_command(main: Callable[[], object], *words: str) -> None:
    """Run a command here."""
    with mock.patch.object(sys, "argv", ["elsa", *words]), suppress(SystemExit):
        main()


def write_model(folder: Path, layer: NDArray[np.float32]) -> None:
    """A model directory of two shards behind an index."""
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "bert"}')
    shards = {f"model-0000{i}-of-00002.safetensors": f"layer{i}.weight" for i in (1, 2)}
    for file, tensor in shards.items():
        save_file({tensor: layer}, folder / file)
    index = {"metadata": {}, "weight_map": {tensor: file for file, tensor in shards.items()}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def code_lines(path: Path) -> int:
    """Lines of a module without blank ones, comments and docstrings."""
    text, lines = path.read_text(), set[int]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.string.strip() and token.type != tokenize.COMMENT:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            lines -= set(range(node.lineno, (node.end_lineno or 0) + 1))
    return len(lines)


class _Ranges(BaseHTTPRequestHandler):
    """Serves the files of a folder, or ranges of them."""

    folder: Path
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        content = (self.folder / self.path[1:]).read_bytes()
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"])
        assert asked is not None
        start, stop = int(asked[1]), min(int(asked[2]) + 1, len(content))
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(content)}")
        self.send_header("Content-Length", str(stop - start))
        self.end_headers()
        self.wfile.write(content[start:stop])

    def log_message(self, format: str, *args: object) -> None:
        """Be quiet."""


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """A server on this machine; its URL."""
    handler = type("Handler", (_Ranges,), {"folder": folder})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


def show(called: str, found: Trace, *, names: bool) -> None:
    """Print a line on a trace, and what it passes through."""
    print(f"{called}: {len(found.frames)} frames, {len(found.modules)} modules")
    if names:
        print(*found.frames, "", *sorted(found.modules), "", sep="\n")


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks.floor_plan")
    parser.add_argument("--names", action="store_true", help="List the frames and the modules.")
    names = parser.parse_args().names
    with tempfile.TemporaryDirectory() as name, serving(Path(name)) as url:
        plain, net, ship, out = (
            f"{name}/{file}.safetensors" for file in ("plain", "net", "ship", "out")
        )
        layer = np.random.default_rng(0).standard_normal((SIDE, SIDE), np.float32)
        save_file({"layer.weight": layer, "layer.bias": layer[0]}, plain)
        elsa.pack(plain, net, sparsities=[95, 90, 80])
        elsa.ship(net, ship)
        for kind, file in (("ELSA file", "net"), ("delivery file", "ship")):
            source = f"{url}/{file}.safetensors"
            calls = {
                "elsa-extract": partial(
                    run_command, _start.extract, source, "-l", "3", "-fqo", out
                ),
                "elsa_format.extract": partial(elsa.extract, source, out, level=3, force=True),
            }
            for called, call in calls.items():
                show(f"{called}, {kind}", trace(call), names=names)
        write_model(Path(name, "model"), layer)
        words = (f"{name}/model", "--sparsities", "95,90,80", "-fqo", f"{name}/packed")
        show("elsa-pack, directory", trace(partial(run_command, _start.pack, *words)), names=names)
    modules = {path.relative_to(PACKAGE): code_lines(path) for path in PACKAGE.rglob("*.py")}
    print(f"elsa_format: {len(modules)} modules, {sum(modules.values())} lines of code")


if __name__ == "__main__":
    main()
