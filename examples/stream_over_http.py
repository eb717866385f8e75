"""Stream a level from a web server: the dense network never touches the device's disk or memory.

    pip install .
    python examples/stream_over_http.py

Starts a server on loopback, so that it runs anywhere; put your own URL in its place.
"""

import http.server
import tempfile
import threading
from functools import partial
from pathlib import Path

import numpy as np

import elsa_format


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


class Server(http.server.ThreadingHTTPServer):
    def handle_error(self, *args: object) -> None:
        """A client that has what it wants hangs up: this server knows no byte ranges."""


folder = Path(tempfile.mkdtemp())
rng = np.random.default_rng(0)
dense = {f"layer{i}": rng.standard_normal((1024, 1024)).astype(np.float32) for i in range(4)}
elsa_format.pack(dense, folder / "net.safetensors", sparsities=[95, 90, 80])

server = Server(("127.0.0.1", 0), partial(Quiet, directory=folder))
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}/net.safetensors"

# What is there? Only the header is fetched.
with elsa_format.open(url) as file:
    print(f"{file.file_size:,} bytes on the server; levels {[x.name for x in file.levels]}")
    level = file.choose(max_size=2_000_000, layout="bitmask")

# Fetch the level that fits, decided weight by weight while the file streams in.
elsa_format.extract(url, folder / "device.safetensors", level=level, layout="bitmask")
size = (folder / "device.safetensors").stat().st_size
weights = elsa_format.load_level(folder / "device.safetensors")
kept = sum(int(np.count_nonzero(array)) for array in weights.values())
print(f"level {level}: {size:,} bytes on the device, {kept:,} weights")
server.shutdown()
