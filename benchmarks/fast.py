"""Sparse operators in ONNX Runtime against its dense ones and others, whole networks in turn.

    python benchmarks/fast.py [--seconds 6] [--threads 1,2] [--only RESNET] [--quick]

prints the tables of docs/fast.md.
"""

import argparse
import importlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import onnxruntime
from _networks import NETWORKS, Network, ffn, mlp, with_weights
from elsa_converters.onnx._fast import prepare, use_sparse
from elsa_converters.onnx._measure import fastest_layers
from elsa_converters.onnx_sparse import find_library, instructions

SPARSITIES = (0.7, 0.8, 0.9, 0.95, 0.99)
TARGETS = {
    "ResNet-50-shaped, 1 picture": {0.8: 2.0, 0.9: 3.0, 0.95: 4.2},
    "FFN 4096-11008, 1 token": {0.8: 2.0, 0.9: 3.8, 0.95: 7.0},
    "MLP of 1024 × 1024, 1 row": {0.8: 1.2, 0.9: 1.9, 0.95: 2.8},
}
"""At least so many times faster than dense, with one thread; with two, 80 % of it."""
MEMORY = {0.8: 0.30, 0.9: 0.22, 0.95: 0.18}
"""At most this part of the dense session's memory after a run, ResNet-50."""
Run = Callable[[], Any]


def best_times(runs: list[Run], seconds: float) -> list[float]:
    """The shortest of each, taken in turn."""
    best = [float("inf")] * len(runs)
    for run in runs:
        run()
    began = time.perf_counter()
    while time.perf_counter() - began < seconds or min(best) == float("inf"):
        for index, run in enumerate(runs):
            start = time.perf_counter()
            run()
            best[index] = min(best[index], time.perf_counter() - start)
    return best


def session(content: bytes | str, threads: int) -> Any:
    """A session, with the operators."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    options.register_custom_ops_library(str(find_library()))
    return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])


def fast_model(net: Network, *, threads: int | None = None) -> bytes:
    """With sparse operators: wherever possible, or, for so many threads, where it was measured."""
    proto, arrays = net.graph(), dict(net.arrays)
    layers = prepare(proto, arrays, "network")
    if threads is not None:
        layers = fastest_layers(proto, arrays, layers, threads=threads)
    else:
        layers = [layer for layer in layers if layer.sparsity >= 0.3]
    return with_weights(*use_sparse(proto, arrays, layers))


def speedups(
    name: str, threads: int, sparsities: tuple[float, ...], seconds: float
) -> Iterator[str]:
    """A cell for each sparsity: how many times faster, and whether that was the target."""
    for sparsity in sparsities:
        net = NETWORKS[name]()
        net.prune(sparsity)
        content = with_weights(net.graph(), net.arrays), fast_model(net)
        dense, fast = (session(model, threads) for model in content)
        runs: list[Run] = [lambda s=s, n=net: s.run(None, n.feeds) for s in (dense, fast)]  # type: ignore[misc]
        times = best_times(runs, seconds)
        target = TARGETS.get(name, {}).get(sparsity, 0) * (1 if threads == 1 else 0.8)
        ratio = times[0] / times[1]
        note = (
            ""
            if not target
            else f" (≥ {target:.2g})"
            if ratio >= target
            else f" (**< {target:.2g}**)"
        )
        yield f"{ratio:.2f} ×{note}"


def global_levels(seconds: float) -> Iterator[str]:
    """ResNet-50 pruned by one threshold for all layers; the layers are chosen by time."""
    for sparsity in (0.8, 0.9, 0.95):
        net = NETWORKS["ResNet-50-shaped, 1 picture"]()
        net.prune(sparsity, everywhere=True)
        content = with_weights(net.graph(), net.arrays), fast_model(net, threads=1)
        sessions = [session(model, 1) for model in content]
        runs: list[Run] = [lambda s=s, n=net: s.run(None, n.feeds) for s in sessions]  # type: ignore[misc]
        times = best_times(runs, seconds)
        yield f"{times[0] / times[1]:.2f} ×"


PROBE = """
import sys, time, numpy as np, onnxruntime
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = 1
options.register_custom_ops_library(sys.argv[2])
before, start = resident(), time.perf_counter()
session = onnxruntime.InferenceSession(sys.argv[1], options)
took = time.perf_counter() - start
session.run(None, {"x": np.ones([1, 3, 224, 224], np.float32)})
print(resident() - before, took)
"""


def memory(model: bytes) -> tuple[int, float]:
    """Bytes of a session after a run, and the seconds to load it, in a process of its own."""
    with tempfile.NamedTemporaryFile(suffix=".onnx") as file:
        file.write(model)
        file.flush()
        command = [sys.executable, "-c", PROBE, file.name, str(find_library())]
        found = [
            subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
            for _ in range(3)
        ]
    return min(int(f[0]) for f in found), min(float(f[1]) for f in found)


def memory_rows() -> Iterator[str]:
    """Size, memory and load time of ResNet-50."""
    for sparsity in (0.0, 0.8, 0.9, 0.95):
        net = NETWORKS["ResNet-50-shaped, 1 picture"]()
        net.prune(sparsity)
        dense = with_weights(net.graph(), net.arrays)
        model = fast_model(net) if sparsity else dense
        used, took = memory(model)
        if not sparsity:
            first = used
        limit = f" (≤ {MEMORY[sparsity]:.0%})" if sparsity else ""
        yield (
            f"| {sparsity:.0%} | {len(model) / 1e6:.1f} MB | {used / 2**20:.0f} MiB "
            f"| {used / first:.0%}{limit} | {took * 1e3:.0f} ms |"
        )


def module(name: str) -> Any:
    """A package that not everybody has, or None."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def int8(net: Network, folder: Path) -> str:
    """The dense network in 8 bits, as ONNX Runtime's own tool makes it."""
    quantization = importlib.import_module("onnxruntime.quantization")
    source, target = folder / "dense.onnx", folder / "int8.onnx"
    source.write_bytes(with_weights(net.graph(), net.arrays))
    if len(next(iter(net.feeds.values())).shape) < 4:
        quantization.quantize_dynamic(source, target, weight_type=quantization.QuantType.QInt8)
        return str(target)

    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc]
        left = 2

        def get_next(self) -> Any:
            self.left -= 1
            return net.feeds if self.left >= 0 else None

    quantization.quantize_static(source, target, Reader(), per_channel=True)
    return str(target)


def rivals(sparsity: float, seconds: float) -> Iterator[str]:
    """One row for each of the others, at one sparsity, one thread: times faster than dense."""
    nets = {
        "ResNet-50": NETWORKS["ResNet-50-shaped, 1 picture"](),
        "FFN, 1 token": ffn(1),
        "MLP, 1 row": mlp(),
        "BERT": NETWORKS["BERT-base-like, 128 tokens"](),
    }
    table: dict[str, list[str]] = {}
    for net in nets.values():
        net.prune(sparsity)
        runs: dict[str, Run] = {}
        with tempfile.TemporaryDirectory() as folder:
            feeds = net.feeds
            dense = session(with_weights(net.graph(), net.arrays), 1)
            quick, small = session(fast_model(net), 1), session(int8(net, Path(folder)), 1)
            runs["ONNX Runtime, dense"] = lambda s=dense, f=feeds: s.run(None, f)  # type: ignore[misc]
            runs["sparse operators"] = lambda s=quick, f=feeds: s.run(None, f)  # type: ignore[misc]
            runs["ONNX Runtime, dense int8"] = lambda s=small, f=feeds: s.run(None, f)  # type: ignore[misc]
            runs |= openvino_runs(net, Path(folder)) | matrix_runs(net)
            times = dict(zip(runs, best_times(list(runs.values()), seconds), strict=True))
        for name in ("sparse operators", "ONNX Runtime, dense int8", *OTHERS):
            ratio = f"{times['ONNX Runtime, dense'] / times[name]:.2f} ×" if name in times else "–"
            table.setdefault(name, []).append(ratio)
    yield f"| {sparsity:.0%} zeros | " + " | ".join(nets) + " |"
    yield "| --- |" + " --- |" * len(nets)
    for name, cells in table.items():
        if set(cells) != {"–"}:
            yield f"| {name} | " + " | ".join(cells) + " |"


OTHERS = ("OpenVINO, dense", "OpenVINO, sparse weights", "torch CSR", "scipy CSR")


def openvino_runs(net: Network, folder: Path) -> dict[str, Run]:
    """OpenVINO, without and with its setting for sparse weights."""
    openvino = module("openvino")
    if openvino is None:
        return {}
    (folder / "net.onnx").write_bytes(with_weights(net.graph(), net.arrays))
    runs: dict[str, Run] = {}
    for name, rate in {"OpenVINO, dense": 1.0, "OpenVINO, sparse weights": 0.5}.items():
        settings = {"INFERENCE_NUM_THREADS": 1, "CPU_SPARSE_WEIGHTS_DECOMPRESSION_RATE": rate}
        model = openvino.Core().compile_model(folder / "net.onnx", "CPU", settings)
        shaped = {k: openvino.Tensor(v) for k, v in net.feeds.items()}
        runs[name] = lambda m=model, f=shaped: m(f)  # type: ignore[misc]
    return runs


def matrix_runs(net: Network) -> dict[str, Run]:
    """Compressed rows in torch and scipy, for networks that are nothing but products."""
    kinds = {node.op_type for node in net.nodes}
    if not kinds <= {"MatMul", "Add", "Relu"}:
        return {}
    matrices = [a.T for name, a in net.arrays.items() if name.startswith("w")]
    x = next(iter(net.feeds.values())).T
    runs: dict[str, Run] = {}
    for name, library in (("torch CSR", module("torch")), ("scipy CSR", module("scipy.sparse"))):
        if library is None:
            continue
        if name == "torch CSR":
            library.set_num_threads(1)
            rows = [library.from_numpy(m.copy()).to_sparse_csr() for m in matrices]
            start: Any = library.from_numpy(x.copy())
        else:
            rows, start = [library.csr_array(m) for m in matrices], x

        def run(rows: Any = rows, start: Any = start) -> Any:
            y = start
            for matrix in rows:
                y = (matrix @ y).clip(min=0)
            return y

        runs[name] = run
    return runs


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=6, help="for each pair")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--only", default="", help="part of a network's name")
    parser.add_argument("--quick", action="store_true", help="few networks, short")
    options = parser.parse_args()
    seconds = 0.2 if options.quick else options.seconds
    sparsities = (0.9,) if options.quick else SPARSITIES
    if find_library() is None:
        sys.exit("the sparse operators were not built, for want of a C compiler")
    version = onnxruntime.__version__
    print(f"Sparse operators ({instructions()}) against ONNX Runtime {version}, dense,")
    print("times faster; every layer of a network has the sparsity that the column says:\n")
    print("| network | threads | " + " | ".join(f"{s:.0%} zeros" for s in sparsities) + " |")
    print("| --- | --- |" + " --- |" * len(sparsities))
    for name in NETWORKS:
        if options.only.lower() not in name.lower() or (options.quick and "MLP" not in name):
            continue
        for threads in map(int, options.threads.split(",")):
            cells = " | ".join(speedups(name, threads, sparsities, seconds))
            print(f"| {name} | {threads} | {cells} |", flush=True)
    if options.quick or options.only:
        return
    cells = " | ".join(global_levels(seconds))
    print(
        f"\nResNet-50-shaped by one threshold for all layers, 1 thread, 80, 90 and 95 %: {cells}.\n"
    )
    print(
        "| zeros | model | memory after a run | of dense | load |\n| --- | --- | --- | --- | --- |"
    )
    for row in memory_rows():
        print(row, flush=True)
    for sparsity in (0.8, 0.95):
        print()
        for row in rivals(sparsity, seconds):
            print(row, flush=True)


if __name__ == "__main__":
    main()
