"""The main job, end to end: train nested networks, write one file, ship levels, run them.

    make demo

Trains a small network on handwritten digits (embedded in scikit-learn), nests levels into another
one that was trained without them, and leaves the files and a report in demo-out/.
"""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import jax
import numpy as np
import onnxruntime
from elsa_converters import onnx
from elsa_converters.flax_onnx import template_from_flax
from onnx import helper, numpy_helper, save
from sklearn.neural_network import MLPClassifier

import elsa_format
from elsa_format.cli import show_size, table
from elsa_train import data, models

OUT = Path("demo-out")
NET, TEMPLATE = OUT / "net.safetensors", OUT / "net.onnx"
SHIPPED, DEVICE = OUT / "net.ship.safetensors", OUT / "device.ship.safetensors"
LEVEL_1, LEVEL_2 = OUT / "level1.safetensors", OUT / "level2.onnx"
ALL_LEVELS = OUT / "all-levels.onnx"
SHORT = "--epochs 12 --sparsify-epochs 12 --densify-epochs 6 --densify-factor 0.1"


def main() -> None:
    """Run the demo."""
    started = time.monotonic()
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir()
    digits = data.load("digits")
    images, labels = digits.batch("test", np.arange(digits.size("test")), 0)
    inputs = (images.astype(np.float32) - np.float32(digits.mean)) / np.float32(digits.std)
    model = models.DigitsNet(num_classes=10)

    say("1. Train three sparse networks inside one dense network (JAX)")
    shell(f"elsa-train digits {SHORT} -o {OUT}/run")
    shutil.copy(OUT / "run" / "seed-0" / "model.safetensors", NET)

    say("2. One file holds them all")
    shell(f"elsa-inspect {NET}")
    shell(f"elsa-verify {NET}")
    shell(f"elsa-inspect {NET} --full --html {OUT}/report.html")

    say("3. A device fetches level 1 by its own bytes, and each upgrade by the difference")
    shell(f"elsa-ship {NET} -o {SHIPPED}")
    networks: dict[Any, dict[str, np.ndarray]] = {}
    took = {}
    with serving(OUT) as url:
        for level in (1, 2, 3, "dense"):
            wish = f"--level {level}" if level == 1 else f"--upgrade {level}"
            said = shell(f"elsa-fetch {url}/{SHIPPED.name} {wish} -o {DEVICE} --json")
            took[level] = json.loads(said)["fetched"]
            with elsa_format.open(DEVICE) as delivery:
                networks[level] = delivery.load(level)
    print("  or streams it, from any source, in constant memory:")
    shell(f"cat {NET} | elsa-extract - --level 1 --layout bitmask -o {LEVEL_1}")

    say("4. Export to ONNX: one level, and all levels in one small graph")
    print("  template_from_flax(model, sample, ...): the graph, its weights in the ELSA file")
    template_from_flax(model, inputs[:1], NET, TEMPLATE, train=False)
    shell(f"elsa-export {NET} --onnx {TEMPLATE} --level 2 -o {LEVEL_2}")
    shell(f"elsa-export {NET} --onnx {TEMPLATE} --all-levels -o {ALL_LEVELS}")

    say("5. Run everything: accuracy when it froze, from the file, and in ONNX Runtime")
    head = ["level", "sparsity", "fetched", "at freeze", "as fetched", "from file"]
    rows = [[*head, "ONNX Runtime", "all levels"]]
    streamed = elsa_format.load_level(LEVEL_1)
    equal = True
    with elsa_format.open(NET) as file:
        for level in (1, 2, 3, "dense"):
            outputs = [
                in_jax(model, networks[level], inputs),
                in_jax(model, streamed if level == 1 else file.load(level), inputs),
                in_onnx_runtime(level, inputs),
                run(onnx.all_levels_session(ALL_LEVELS, level=level), inputs),
            ]
            right = [recorded(file, level, len(labels))]
            right += [int((logits.argmax(axis=1) == labels).sum()) for logits in outputs]
            equal = equal and len(set(right)) == 1
            row = [str(level), f"{file.sparsity(level):.2%}", show_size(took[level])]
            rows.append(row + [f"{count / len(labels):.2%}" for count in right])
    print(f"\n{table(rows)}\n")
    if not equal:
        sys.exit("The accuracies of a level differ; they should not.")
    print("All columns are equal.")

    say("6. Nest levels into a network that was trained without them (scikit-learn)")
    print(f"  pretrained(...): {OUT}/pretrained.onnx; samples.npz has images alone, no labels")
    pretrained(digits)
    bench = f"--data {OUT}/test.npz --no-time --quiet"
    for way, option in (("magnitude", ""), ("calibrated", f" --calibrate {OUT}/samples.npz")):
        net = f"{OUT}/{way}.safetensors"
        packed = f"-o {net} --template {OUT}/{way}.onnx --quiet"
        shell(f"elsa-pack {OUT}/pretrained.onnx --sparsities 95,90,80,50{option} {packed}")
        shell(f"elsa-bench {net} --onnx {OUT}/{way}.onnx {bench}")
        print()

    print(f"{time.monotonic() - started:.0f} seconds; the files are in {OUT}/. Try next:")
    print(f"  open {OUT}/report.html in a browser")
    print(f"  {bin_folder()}/elsa-extract {DEVICE} --restore -o whole.safetensors")
    yours = "YOUR.onnx --sparsities 90,80,50 --calibrate SAMPLES.npz"
    print(f"  {bin_folder()}/elsa-pack {yours} -o yours.safetensors --template yours.onnx")


def pretrained(digits: data.Data) -> None:
    """Train one hidden layer as users of other libraries do, and write it as an ONNX model."""
    (images, labels), (test, answers) = (
        digits.batch(split, np.arange(digits.size(split)), 0) for split in ("train", "test")
    )
    images, test = (x.reshape(len(x), -1).astype(np.float32) / 16 for x in (images, test))
    trained = MLPClassifier([128], tol=0.01, random_state=0).fit(images, labels)
    tensors = dict(zip(["w1", "w2", "b1", "b2"], trained.coefs_ + trained.intercepts_, strict=True))
    nodes = [
        helper.make_node("Gemm", ["image", "w1", "b1"], ["hidden"]),
        helper.make_node("Relu", ["hidden"], ["active"]),
        helper.make_node("Gemm", ["active", "w2", "b2"], ["logits"]),
    ]
    graph = helper.make_graph(
        nodes,
        "digits",
        [helper.make_tensor_value_info("image", 1, ["n", images.shape[1]])],
        [helper.make_tensor_value_info("logits", 1, ["n", 10])],
        [numpy_helper.from_array(x.astype(np.float32), name) for name, x in tensors.items()],
    )
    opset = [helper.make_opsetid("", 21)]
    save(helper.make_model(graph, opset_imports=opset, ir_version=10), OUT / "pretrained.onnx")
    np.savez(OUT / "samples.npz", image=images)
    np.savez(OUT / "test.npz", image=test, labels=answers)


def recorded(file: elsa_format.File, level: Any, images: int) -> int:
    """How many test images the network got right when it was trained."""
    dense = level == "dense"
    metrics = file.profile.dense_metrics if dense else file.levels[level - 1].metrics
    return round(metrics["accuracy"] * images)


def in_jax(model: Any, weights: dict[str, np.ndarray], inputs: np.ndarray) -> np.ndarray:
    """The network's outputs, from the tensors of a file."""
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), inputs[:1]))
    variables = jax.tree_util.tree_map_with_path(
        lambda path, _: weights[jax.tree_util.keystr(path[1:], simple=True, separator="/")], shapes
    )
    return np.asarray(model.apply(variables, inputs))


def in_onnx_runtime(level: Any, inputs: np.ndarray) -> np.ndarray:
    """The network's outputs: level 2 from its exported file, the others from memory."""
    if level == 2:
        return run(onnxruntime.InferenceSession(LEVEL_2), inputs)
    return run(onnx.session(NET, TEMPLATE, level=level), inputs)


def run(session: onnxruntime.InferenceSession, inputs: np.ndarray) -> np.ndarray:
    """The first output of a session."""
    outputs: list[np.ndarray] = session.run(None, {session.get_inputs()[0].name: inputs})
    return outputs[0]


def say(text: str) -> None:
    """Print a heading."""
    print(f"\n\033[1m{text}\033[0m" if sys.stdout.isatty() else f"\n{text}", flush=True)


def shell(command: str) -> str:
    """Show a command, run it, and return what it printed if that is JSON."""
    print(f"  $ {command}", flush=True)
    path = f"{bin_folder()}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        env={**os.environ, "PATH": path, "no_proxy": "127.0.0.1"},
        stdout=subprocess.PIPE if command.endswith("--json") else None,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(done.returncode)
    return done.stdout or ""


class Ranges(SimpleHTTPRequestHandler):
    """Serves a folder, by ranges of bytes as any web server does but Python's own."""

    def do_GET(self) -> None:
        content = (Path(self.directory) / Path(self.path).name).read_bytes()
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "bytes=0-"))
        assert found is not None
        first, last = int(found[1]), min(int(found[2] or len(content)), len(content) - 1)
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
        self.send_header("Content-Length", str(last + 1 - first))
        self.send_header("ETag", '"demo"')
        self.end_headers()
        with contextlib.suppress(ConnectionError):
            self.wfile.write(content[first : last + 1])

    def log_message(self, format: str, *arguments: Any) -> None:
        """Say nothing."""


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[str]:
    """A server on this machine; gives its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Ranges, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def bin_folder() -> str:
    """Where the commands are installed."""
    folder = Path(sys.executable).parent
    return str(folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder)


if __name__ == "__main__":
    main()
