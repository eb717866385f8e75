"""ONNX: what an export and a session cost, each against the plain way in the same run.

    python benchmarks/onnx_export.py [--megabytes 400] [--repeat 5] [--quick]

prints the rows of the table in docs/onnx.md.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from elsa_converters.onnx import (
    OnnxCheckpoint,
    all_levels_session,
    export,
    export_all_levels,
    session,
)
from onnx import TensorProto, helper

import elsa_format

WIDTH = 2048
Row = tuple[str, str, str]


def make_model(path: Path, megabytes: int) -> int:
    """A chain of square layers; gives the bytes of its weights."""
    layers = max(1, megabytes * 10**6 // (WIDTH * WIDTH * 4))
    rng = np.random.default_rng(0)
    nodes, initializers, value = [], [], "x"
    for layer in range(layers):
        w = (rng.standard_normal((WIDTH, WIDTH), np.float32) + 1e-9) / WIDTH**0.5
        initializers.append(onnx.numpy_helper.from_array(w, f"w{layer}"))
        nodes.append(helper.make_node("MatMul", [value, f"w{layer}"], [f"h{layer}"]))
        value = f"h{layer}"
    graph = helper.make_graph(
        nodes,
        "chain",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", WIDTH])],
        [helper.make_tensor_value_info(value, TensorProto.FLOAT, ["n", WIDTH])],
        initializers,
    )
    imports = [helper.make_opsetid("", 21)]
    onnx.save(helper.make_model(graph, opset_imports=imports, ir_version=10), path)
    return layers * WIDTH * WIDTH * 4


def best(actions: dict[str, Callable[[], object]], repeat: int) -> dict[str, float]:
    """Shortest time of each, taken in turn so that all see the same machine."""
    times = {name: float("inf") for name in actions}
    for _ in range(repeat):
        for name, action in actions.items():
            start = time.perf_counter()
            action()
            times[name] = min(times[name], time.perf_counter() - start)
    return times


def peak_of(elsa: Path, template: Path, out: Path, options: str) -> int:
    """Bytes that an export adds to a process that has imported everything."""
    # The kernel's high-water mark of this program image; ru_maxrss would include the parent's.
    program = f"""
from elsa_converters.onnx import export
def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
before = peak()
export({str(elsa)!r}, {str(template)!r}, {str(out)!r}, level=2, force=True{options})
print(peak() - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return int(done.stdout) * 1024


def measure(folder: Path, megabytes: int, repeat: int) -> list[Row]:
    """The rows: what was done, its ratio, the limit."""
    source, elsa, template = (folder / name for name in ("m.onnx", "net.safetensors", "net.onnx"))
    weights = make_model(source, megabytes)
    checkpoint = OnnxCheckpoint(source)
    elsa_format.pack(checkpoint, elsa, sparsities=[95, 90, 80])
    checkpoint.write_template(template, elsa)
    copy, out, sparse, levels = (folder / f"{n}.onnx" for n in ("copy", "out", "sparse", "levels"))
    export_all_levels(elsa, template, levels)
    exports = best(
        {
            "plain": lambda: onnx.save(onnx.load(source), copy),
            "template": lambda: export(elsa, template, out, level=2, force=True),
            "model": lambda: export(elsa, source, out, level=2, force=True),
            "sparse": lambda: export(elsa, template, sparse, level=2, sparse=True, force=True),
            "fold": lambda: export(elsa, template, out, level=2, fold=True, force=True),
        },
        repeat,
    )
    sessions = best(
        {
            "plain": lambda: onnxruntime.InferenceSession(str(out)),
            "memory": lambda: session(elsa, template, level=2),
            "levels": lambda: all_levels_session(levels, level=2),
        },
        repeat,
    )
    base = f"onnx.load + onnx.save ({exports['plain']:.2f} s)"
    plain = f"InferenceSession of a file ({sessions['plain']:.2f} s)"
    rows = [
        ("what", "measured", "limit"),
        *(
            (f"export, {label}", f"{exports[key] / exports['plain']:.2f} × {base}", limit)
            for key, label, limit in (
                ("template", "template", "3 ×"),
                ("model", "original model as template", "3 ×"),
                ("sparse", "`--sparse`", ""),
                ("fold", "`--fold-batch-norm`", ""),
            )
        ),
        ("`session()`", f"{sessions['memory'] / sessions['plain']:.2f} × {plain}", "1.5 ×"),
        ("session of all levels", f"{sessions['levels'] / sessions['plain']:.2f} × {plain}", ""),
    ]
    for label, graph, options in (
        ("template", template, ""),
        ("original model as template", source, ""),
        ("`--sparse`", template, ", sparse=True"),
        ("`--fold-batch-norm`", template, ", fold=True"),
    ):
        ratio = peak_of(elsa, graph, out, options) / weights
        rows.append((f"peak memory of export, {label}", f"{ratio:.3f} × the weights", "2 ×"))
    return rows


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=400)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="a small model, few repeats")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.megabytes, arguments.repeat = 40, 2
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(Path(folder), arguments.megabytes, arguments.repeat)
    rows.insert(1, ("---", "---", "---"))
    for row in rows:
        print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
