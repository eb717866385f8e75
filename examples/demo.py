"""The main job, end to end: train nested networks, write one file, ship levels, run them.

    make demo

Trains a small network on handwritten digits (embedded in scikit-learn), and leaves the files and a
report in demo-out/.
"""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import onnxruntime
from elsa_converters import onnx
from elsa_converters.flax_onnx import template_from_flax

import elsa_format
from elsa_format.cli import show_size, table
from elsa_train import data, models

OUT = Path("demo-out")
NET, TEMPLATE = OUT / "net.safetensors", OUT / "net.onnx"
LEVEL_1, LEVEL_2 = OUT / "level1.safetensors", OUT / "level2.onnx"
ALL_LEVELS = OUT / "all-levels.onnx"


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
    shell(f"elsa-train digits --epochs 12 --sparsify-epochs 12 --densify-epochs 6 -o {OUT}/run")
    shutil.copy(OUT / "run" / "seed-0" / "model.safetensors", NET)

    say("2. One file holds them all")
    shell(f"elsa-inspect {NET}")
    shell(f"elsa-verify {NET}")
    shell(f"elsa-inspect {NET} --full --html {OUT}/report.html")

    say("3. A device streams the level it wants, through a pipe, in constant memory")
    shell(f"cat {NET} | elsa-extract - --level 1 --layout bitmask -o {LEVEL_1}")

    say("4. Export to ONNX: one level, and all levels in one small graph")
    print("  template_from_flax(model, sample, ...): the graph, its weights in the ELSA file")
    template_from_flax(model, inputs[:1], NET, TEMPLATE, train=False)
    shell(f"elsa-export {NET} --onnx {TEMPLATE} --level 2 -o {LEVEL_2}")
    shell(f"elsa-export {NET} --onnx {TEMPLATE} --all-levels -o {ALL_LEVELS}")

    say("5. Run everything: accuracy when it froze, from the file, and in ONNX Runtime")
    networks = {1: elsa_format.load_level(LEVEL_1)}
    rows = [["level", "sparsity", "size", "at freeze", "from file", "ONNX Runtime", "all levels"]]
    equal = True
    with elsa_format.open(NET) as file:
        for level in (1, 2, 3, "dense"):
            weights = networks.get(level) or file.load(level)
            outputs = [
                in_jax(model, weights, inputs),
                in_onnx_runtime(level, inputs),
                run(onnx.all_levels_session(ALL_LEVELS, level=level), inputs),
            ]
            right = [recorded(file, level, len(labels))]
            right += [int((logits.argmax(axis=1) == labels).sum()) for logits in outputs]
            equal = equal and len(set(right)) == 1
            size = file.size(level, "dense" if level == "dense" else "bitmask")
            row = [str(level), f"{file.sparsity(level):.2%}", show_size(size)]
            rows.append(row + [f"{count / len(labels):.2%}" for count in right])
    print(f"\n{table(rows)}\n")
    if not equal:
        sys.exit("The accuracies of a level differ; they should not.")
    print(
        f"All equal. {time.monotonic() - started:.0f} seconds; the files are in {OUT}/. Try next:"
    )
    print(f"  open {OUT}/report.html in a browser")
    print(f"  {bin_folder()}/elsa-extract {NET} --max-size 60kB --layout csr -o small.safetensors")
    print(f"  {bin_folder()}/elsa-pack YOUR.safetensors --sparsities 95,90,80 -o yours.safetensors")


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


def shell(command: str) -> None:
    """Show a command and run it."""
    print(f"  $ {command}", flush=True)
    path = f"{bin_folder()}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], env={**os.environ, "PATH": path}, check=False
    )
    if done.returncode:
        sys.exit(done.returncode)


def bin_folder() -> str:
    """Where the commands are installed."""
    folder = Path(sys.executable).parent
    return str(folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder)


if __name__ == "__main__":
    main()
