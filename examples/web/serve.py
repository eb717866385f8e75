"""A page on which the demo's network arrives level by level.

    make web

Puts the page, the JavaScript package and the network of `make demo`, as a delivery file, into
demo-out/web, and serves them on this machine only.
"""

import argparse
import contextlib
import functools
import http.server
import json
import re
import shutil
import sys
import time
from pathlib import Path

import numpy as np

import elsa_format
from elsa_train import data

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RUNTIME = ("ort.wasm.bundle.min.mjs", "ort-wasm-simd-threaded.wasm")


def main() -> None:
    """Build the folder, and serve it until interrupted."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--demo", type=Path, default=Path("demo-out"), help="what make demo left")
    parser.add_argument("--runtime", type=Path, help="the dist folder of onnxruntime-web, if any")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    folder = build(options.demo, options.demo / "web", options.runtime)
    with make_server(folder, options.port) as server:
        print(f"http://127.0.0.1:{server.server_port}/", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()


def build(demo: Path, folder: Path, runtime: Path | None = None) -> Path:
    """Everything the page asks for, in one folder."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(HERE, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    shutil.copytree(ROOT / "js" / "src", folder / "elsa-format")
    shutil.copy(demo / "net.onnx", folder)
    ship(demo / "net.safetensors", folder / "net.ship.safetensors")
    (folder / "digits.bin").write_bytes(test_images())
    has_runtime = runtime is not None and all((runtime / name).exists() for name in RUNTIME)
    (folder / "engines.json").write_text(json.dumps({"ort": has_runtime}))
    if runtime is not None and has_runtime:
        (folder / "ort").mkdir()
        for name in RUNTIME:
            shutil.copy(runtime / name, folder / "ort")
    return folder


def ship(source: Path, target: Path) -> None:
    """The network as a delivery file."""
    if hasattr(elsa_format, "ship"):
        elsa_format.ship(source, target)
        return
    sys.path.insert(0, str(ROOT))
    from spec import plain_delivery

    target.write_bytes(plain_delivery.ship(source.read_bytes()))


def test_images() -> bytes:
    """The test images of the digits, 64 bytes each, and then the digit that each is."""
    digits = data.load("digits")
    images, labels = digits.batch("test", np.arange(digits.size("test")), 0)
    return images.astype(np.uint8).tobytes() + labels.astype(np.uint8).tobytes()


class Handler(http.server.SimpleHTTPRequestHandler):
    """Files with the types that browsers insist on, and no log."""

    protocol_version = "HTTP/1.1"
    extensions_map = {  # noqa: RUF012
        **http.server.SimpleHTTPRequestHandler.extensions_map,
        ".js": "text/javascript",
        ".mjs": "text/javascript",
        ".wasm": "application/wasm",
    }

    def do_GET(self) -> None:
        """A file; of a delivery file the bytes that Range asks for, at most ?rate= a second."""
        name, _, query = self.path.partition("?")
        path = Path(self.translate_path(name))
        if not name.endswith(".ship.safetensors") or not path.is_file():
            super().do_GET()
            return
        data = path.read_bytes()
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        begin, end = (int(asked[1]), min(int(asked[2]) + 1, len(data))) if asked else (0, len(data))
        if begin >= len(data):
            self.send_error(416)
            return
        self.send_response(206 if asked else 200)
        if asked:
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(data)}")
        self.send_header("Content-Length", str(end - begin))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.send(data[begin:end], int(query.removeprefix("rate=") or 0))

    def send(self, data: bytes, rate: int) -> None:
        """So many bytes a second, or as fast as can be, until the other side has enough."""
        piece = max(64, rate // 40) if rate else max(1, len(data))
        start = time.monotonic()
        with contextlib.suppress(ConnectionError):
            for at in range(0, len(data), piece):
                if rate:
                    time.sleep(max(0, start + at / rate - time.monotonic()))
                self.wfile.write(data[at : at + piece])

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def make_server(folder: Path, port: int = 0) -> http.server.ThreadingHTTPServer:
    """A server of a folder on this machine; port 0 is any that is free."""
    handler = functools.partial(Handler, directory=str(folder))
    return http.server.ThreadingHTTPServer(("127.0.0.1", port), handler)


if __name__ == "__main__":
    main()
