"""Sparse operators in ONNX Runtime against its dense ones and others.

    python benchmarks/fast.py [--tables networks,memory] [--only RESNET] [--seconds 2] [--quick]

prints the tables of "Fast levels" in docs/benchmarks.md, and the example of docs/fast.md, in about
ten minutes. `make bench` puts them there.
"""

import argparse
import itertools
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import _private  # noqa: F401 - finds internals
import numpy as np
import onnx
import onnxruntime
from _networks import NETWORKS, Network, with_weights
from _rivals import OTHERS, int8, matrix_runs, openvino_runs
from delivery_sizes import MODELS, model
from elsa_converters.onnx import OnnxCheckpoint, export
from elsa_converters.sparse import find_library, instructions
from internals import example_inputs, fastest_layers, prepare, use_sparse

import elsa_format

RESNET, FFN, MLP = (
    "ResNet-50-shaped, 1 picture",
    "FFN 4096-11008, 1 token",
    "MLP of 1024 × 1024, 1 row",
)
GLOBAL = "ResNet-50-shaped, one threshold for all layers"
THREADS = (1, 2)
SPARSITIES = (0.7, 0.8, 0.9, 0.95, 0.99)
TARGETS = {
    RESNET: {0.8: 2.0, 0.9: 3.0, 0.95: 4.2},
    FFN: {0.8: 2.0, 0.9: 3.8, 0.95: 7.0},
    MLP: {0.8: 1.2, 0.9: 1.9, 0.95: 2.8},
}
"""At least so many times faster than dense, with one thread; with two, 80 % of it."""
BERT = "BERT-base-like, 128 tokens"
INTEGERS = {
    (RESNET, 16): {0.7: 2.2, 0.8: 3.0, 0.9: 4.5, 0.95: 6.0},
    (RESNET, 8): {0.7: 2.8, 0.8: 4.0, 0.9: 6.0, 0.95: 8.0},
    ("FFN 4096-11008, 128 tokens", 16): {0.7: 4.0, 0.8: 5.5, 0.9: 9.0, 0.95: 14.0},
    ("FFN 4096-11008, 128 tokens", 8): {0.7: 6.5, 0.8: 9.0, 0.9: 15.0, 0.95: 22.0},
    (FFN, 8): {0.7: 5.5, 0.8: 5.5, 0.9: 5.5},
    ("FFN 4096-11008, 8 tokens", 8): {0.7: 3.6, 0.8: 3.6, 0.9: 3.6, 0.95: 4.5},
    (BERT, 16): {0.7: 2.8, 0.8: 3.8, 0.9: 5.5, 0.95: 7.0},
    (BERT, 8): {0.7: 3.8, 0.8: 5.0, 0.9: 7.0, 0.95: 9.0},
}
"""The same with integers of so many bits."""
MEMORY = {0.8: 0.30, 0.9: 0.22, 0.95: 0.18}
"""At most this part of the dense session's memory after a run, ResNet-50."""
PATTERNS = ((2, 4), (1, 4), (1, 8))
REAL = {
    "magika": {},
    "Silero VAD": {"sequence": 576},
    "PP-OCRv4 detection": {"p2o.DynamicDimension.1": 320, "p2o.DynamicDimension.2": 320},
    "PP-OCRv4 recognition": {"?": 48, "p2o.DynamicDimension.1": 320},
}
"""Real models, and the sizes of the axes that they leave open."""
TURN = 0.03
Run = Callable[[], Any]
Rows = Iterator[str]


def clock() -> float:
    """Seconds, of this thread's processor if that is asked for: its waits are not counted."""
    return time.thread_time() if "--processor-time" in sys.argv else time.perf_counter()


def best_times(runs: list[Run], seconds: float, threads: int = 1) -> list[float]:
    """The shortest of each, taken in turn.

    With several threads each runs for a while: the others' threads wait for more to do for about
    15 ms after a run, and would keep the processors busy.
    """
    best = [float("inf")] * len(runs)
    for run in runs:
        run()
    began = clock()
    while clock() - began < seconds or min(best) == float("inf"):
        for index, run in enumerate(runs):
            start = now = clock()
            while now == start or (threads > 1 and now - start < TURN):
                before = now
                run()
                now = clock()
                best[index] = min(best[index], now - before)
    return best


def session(content: bytes | str, threads: int) -> Any:
    """A session, with the operators."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    options.register_custom_ops_library(str(find_library()))
    return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])


def ratio(
    models: tuple[bytes | str, bytes | str], feeds: Any, seconds: float, threads: int
) -> float:
    """How many times faster the second is."""
    sessions = [session(content, threads) for content in models]
    runs: list[Run] = [lambda s=s: s.run(None, feeds) for s in sessions]  # type: ignore[misc]
    first, second = best_times(runs, seconds, threads)
    return first / second


def fast_model(net: Network, *, threads: int | None = None, bits: int = 0) -> bytes:
    """With sparse operators: wherever possible, or, for so many threads, where it was measured."""
    proto, arrays = net.graph(), dict(net.arrays)
    layers = prepare(proto, arrays, "network")
    if threads is not None:
        layers = fastest_layers(proto, arrays, layers, threads=threads)
    else:
        layers = [replace(layer, bits=bits) for layer in layers if layer.sparsity >= 0.3]
    return with_weights(*use_sparse(proto, arrays, layers))


def head(*cells: str) -> Rows:
    """The first lines of a table."""
    yield "| " + " | ".join(cells) + " |"
    yield "|" + " --- |" * len(cells)


def networks(seconds: float, only: str, quick: bool) -> Rows:
    """Every layer has the sparsity that the column says, at random places. Times faster."""
    sparsities = (0.9,) if quick else SPARSITIES
    yield from head("network", "threads", *(f"{s:.0%} zeros" for s in sparsities))
    named = [n for n in ((MLP,) if quick else (*NETWORKS, GLOBAL)) if only.lower() in n.lower()]
    for _, group in itertools.groupby(named, lambda n: n if n == GLOBAL else n.partition(",")[0]):
        # Of one group, only the inputs differ: the models are made once.
        inputs = {n: NETWORKS[RESNET if n == GLOBAL else n]().feeds for n in group}
        cells: dict[tuple[str, int], list[str]] = {(n, t): [] for n in inputs for t in THREADS}
        for sparsity in sparsities:
            everywhere = GLOBAL in inputs
            net = NETWORKS[RESNET if everywhere else next(iter(inputs))]()
            net.prune(sparsity, everywhere=everywhere)
            dense = with_weights(net.graph(), net.arrays)
            fast = None if everywhere else fast_model(net)
            for (name, threads), row in cells.items():
                models = dense, fast or fast_model(net, threads=threads)
                found = ratio(models, inputs[name], seconds, threads)
                target = TARGETS.get(name, {}).get(sparsity, 0) * (1 if threads == 1 else 0.8)
                row.append(f"{found:.2f} ×{judged(found >= target, f'≥ {target:.2f}', target)}")
        for (name, threads), row in cells.items():
            yield f"| {name} | {threads} | " + " | ".join(row) + " |"


def judged(reached: bool, limit: str, target: float) -> str:
    """What to add to a figure that has a target."""
    return "" if not target else f" ({limit})" if reached else f" (**not {limit}**)"


def integers(seconds: float, only: str, quick: bool) -> Rows:
    """Floats, integers and ONNX Runtime's own int8 in turn, 1 thread. Times faster than dense.

    In brackets how far the outputs are from those of floats, as a part of them.
    """
    kinds = {"floats": 0, "16 bits": 16, "8 bits": 8}
    yield from head("network", "sparsity", *kinds, "ONNX Runtime, dense int8")
    for name in (MLP,) if quick else NETWORKS:
        for sparsity in (0.9,) if quick else SPARSITIES[:-1]:
            if only.lower() not in f"{name} {sparsity:.0%}".lower():
                continue
            net = NETWORKS[name]()
            net.prune(sparsity)
            dense = with_weights(net.graph(), net.arrays)
            with tempfile.TemporaryDirectory() as place:
                models: dict[str, bytes | str] = {"dense": dense}
                models |= {kind: fast_model(net, bits=bits) for kind, bits in kinds.items()}
                models["int8"] = int8(net, dense, Path(place))
                sessions = {kind: session(model, 1) for kind, model in models.items()}
                del models
            outputs = {kind: made.run(None, net.feeds)[0] for kind, made in sessions.items()}
            runs: list[Run] = [
                lambda made=made, feeds=net.feeds: made.run(None, feeds)  # type: ignore[misc]
                for made in sessions.values()
            ]
            times = dict(zip(sessions, best_times(runs, seconds), strict=True))
            cells = []
            for kind in (*kinds, "int8"):
                gain = times["dense"] / times[kind]
                target = INTEGERS.get((name, kinds.get(kind, 0)), {}).get(sparsity, 0)
                cells.append(f"{gain:.2f} ×{judged(gain >= target, f'≥ {target:.1f}', target)}")
                if kind != "floats":
                    error = outputs[kind] - outputs["floats"]
                    share = np.linalg.norm(error) / np.linalg.norm(outputs["floats"])
                    cells[-1] += f" [{share:.0e}]"
            yield f"| {name} | {sparsity:.0%} | " + " | ".join(cells) + " |"


def patterns(seconds: float, only: str, quick: bool) -> Rows:
    """N:M patterns, 1 thread. Times faster."""
    yield from head("network", *(f"{n}:{m}" for n, m in PATTERNS))
    for name in (MLP,) if quick else (FFN, "FFN 4096-11008, 8 tokens", MLP):
        cells = []
        for n, m in PATTERNS:
            net = NETWORKS[name]()
            net.prune_pattern(n, m)
            models = with_weights(net.graph(), net.arrays), fast_model(net)
            cells.append(f"{ratio(models, net.feeds, seconds, 1):.2f} ×")
        yield f"| {name} | " + " | ".join(cells) + " |"


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


def memory_of(content: bytes) -> tuple[int, float]:
    """Bytes of a session after a run, and the seconds to load it, in a process of its own."""
    with tempfile.NamedTemporaryFile(suffix=".onnx") as file:
        file.write(content)
        file.flush()
        command = [sys.executable, "-c", PROBE, file.name, str(find_library())]
        found = [
            subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
            for _ in range(5)
        ]
    return min(int(f[0]) for f in found), min(float(f[1]) for f in found)


def memory(seconds: float, only: str, quick: bool) -> Rows:
    """ResNet-50-shaped, 1 thread: the model, a session of it after a run, and the time to load."""
    yield from head("ResNet-50", "model", "memory after a run", "of dense", "load")
    for sparsity in (0.0, 0.8, 0.9, 0.95):
        net = NETWORKS[RESNET]()
        net.prune(sparsity)
        content = fast_model(net) if sparsity else with_weights(net.graph(), net.arrays)
        used, took = memory_of(content)
        if not sparsity:
            first = used
        limit = MEMORY.get(sparsity, 0.0)
        share = f"{used / first:.0%}{judged(used / first <= limit, f'≤ {limit:.0%}', limit)}"
        yield (
            f"| {f'{sparsity:.0%} zeros' if sparsity else 'dense'} | {len(content) / 1e6:.1f} MB "
            f"| {used / 2**20:.0f} MiB | {share} | {took * 1e3:.0f} ms |"
        )


def real(seconds: float, only: str, quick: bool) -> Rows:
    """Models in wheels on PyPI, packed one-shot, each layer alike; `--fast` chose the layers.

    Times faster, and how many layers of those that could be are sparse.
    """
    levels = {3: "80% zeros", 2: "90% zeros", 1: "95% zeros"}
    yield from head("model", "threads", "dense", *levels.values())
    for name, sizes in REAL.items():
        if only.lower() not in name.lower() or (quick and name != "magika"):
            continue
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            checkpoint = OnnxCheckpoint(model(*MODELS[name], folder))
            elsa, template = folder / "net.safetensors", folder / "net.onnx"
            elsa_format.pack(checkpoint, elsa, sparsities=[95, 90, 80], scope="uniform")
            checkpoint.write_template(template, elsa)
            for threads in THREADS:
                row = [measured(folder, elsa, template, n, sizes, threads, seconds) for n in levels]
                yield f"| {name} | {threads} | {row[0][0]} | {' | '.join(r[1] for r in row)} |"


def measured(
    folder: Path,
    elsa: Path,
    template: Path,
    level: int,
    sizes: dict[str, int],
    threads: int,
    seconds: float,
) -> tuple[str, str]:
    """Milliseconds of a level, and what its fast model gains."""
    dense, fast = folder / "dense.onnx", folder / "fast.onnx"
    counts: list[int] = []
    export(elsa, template, dense, level=level, force=True)
    export(
        elsa,
        template,
        fast,
        level=level,
        fast=True,
        threads=threads,
        sizes=sizes,
        chosen=lambda *found: counts.extend(found),
        force=True,
    )
    sessions = [session(str(path), threads) for path in (dense, fast)]
    feeds = example_inputs(sessions[0], sizes)
    if "sr" in feeds:  # Silero VAD takes two sampling rates, and 1 is none of them
        feeds["sr"][...] = 16000
    runs: list[Run] = [lambda s=s: s.run(None, feeds) for s in sessions]  # type: ignore[misc]
    first, second = best_times(runs, seconds, threads)
    gain = f"{first / second:.2f} × ({counts[0]} of {counts[1]})" if counts[0] else "stays dense"
    return f"{first * 1e3:.3g} ms", gain


def rivals(seconds: float, only: str, quick: bool) -> Rows:
    """Others, 1 thread, all in turn, so that little stays in the cache. Times faster than dense."""
    shown = {"ResNet-50": RESNET, "FFN, 1 token": FFN, "MLP, 1 row": MLP}
    shown |= {"BERT": "BERT-base-like, 128 tokens"}
    for sparsity in (0.9,) if quick else (0.8, 0.9):
        table: dict[str, list[str]] = {}
        for name in shown.values():
            if quick and name != MLP:
                continue
            net = NETWORKS[name]()
            net.prune(sparsity)
            with tempfile.TemporaryDirectory() as place:
                times = times_of_rivals(net, Path(place), seconds)
            for other in ("sparse operators", "ONNX Runtime, dense int8", *OTHERS):
                known = f"{times['dense'] / times[other]:.2f} ×" if other in times else "–"
                table.setdefault(other, []).append(known)
        yield from head(f"{sparsity:.0%} zeros", *(["MLP, 1 row"] if quick else shown))
        for other, cells in table.items():
            if set(cells) != {"–"}:
                yield f"| {other} | " + " | ".join(cells) + " |"
        yield ""


def times_of_rivals(net: Network, folder: Path, seconds: float) -> dict[str, float]:
    """Seconds of each, ours included."""
    dense = with_weights(net.graph(), net.arrays)
    models = {"dense": dense, "sparse operators": fast_model(net)}
    runs: dict[str, Run] = {}
    for name, content in (models | {"ONNX Runtime, dense int8": int8(net, dense, folder)}).items():
        made = session(content, 1)
        runs[name] = lambda s=made: s.run(None, net.feeds)  # type: ignore[misc]
    runs |= openvino_runs(net, dense, folder) | matrix_runs(net)
    return dict(zip(runs, best_times(list(runs.values()), seconds), strict=True))


def example(seconds: float, only: str, quick: bool) -> Rows:
    """The commands of docs/fast.md, run: a ResNet-50-shaped network, every layer alike."""
    net = NETWORKS[MLP if quick else RESNET]()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "model.onnx").write_bytes(with_weights(net.graph(), net.arrays))
        levels = "--sparsities 95,90,80 --scope uniform"
        yield "```text"
        for command in (
            f"elsa-pack model.onnx {levels} -o net.safetensors --template net.onnx --quiet",
            "elsa-bench net.safetensors --onnx net.onnx --threads 1 --quiet",
            "elsa-export net.safetensors --onnx net.onnx --level 1 --fast --threads 1 -o fast.onnx",
            "elsa-export net.safetensors --onnx net.onnx --max-latency 30ms --fast --threads 1"
            " -o in-time.onnx",
        ):
            verb, *arguments = command.split()
            found = subprocess.run(
                [str(Path(sys.executable).with_name(verb)), *arguments],
                cwd=folder,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
            yield f"$ {command}"
            if found.stdout.strip():
                yield found.stdout.rstrip()
        yield "```"


TABLES: dict[str, Callable[[float, str, bool], Rows]] = {
    "networks": networks,
    "integers": integers,
    "patterns": patterns,
    "memory": memory,
    "real": real,
    "rivals": rivals,
    "example": example,
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=2, help="for each pair")
    parser.add_argument("--tables", default=",".join(TABLES), help="of " + ", ".join(TABLES))
    parser.add_argument("--only", default="", help="part of a network's or model's name")
    parser.add_argument(
        "--processor-time",
        action="store_true",
        help="of one thread, where others keep the processors busy; not with two threads",
    )
    parser.add_argument("--quick", action="store_true", help="few networks, short")
    options = parser.parse_args()
    if find_library() is None:
        sys.exit("the sparse operators were not built, for want of a C compiler")
    if unknown := set(options.tables.split(",")) - TABLES.keys():
        parser.error(f"no such table: {', '.join(unknown)}")
    print(
        f"Sparse operators ({instructions()}) against ONNX Runtime {onnxruntime.__version__}"
        f" and ONNX {onnx.__version__}.",
    )
    for name in options.tables.split(","):
        table = TABLES[name]
        print(f"\n**{name}**: {' '.join((table.__doc__ or '').split())}\n", flush=True)
        for row in table(0.2 if options.quick else options.seconds, options.only, options.quick):
            print(row, flush=True)


if __name__ == "__main__":
    main()
