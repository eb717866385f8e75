"""Fast levels in PyTorch: products without their zeros, against dense, bfloat16 and int8.

    python benchmarks/torch_fast.py [--threads 1] [--repeat 15] [--shape 4096x11008]

prints the tables of docs/fast.md. With one thread, what is measured is the time of that thread on a
processor, which other processes disturb little; with several it is the time that passes.
Switching is measured in the processor time of all threads.
"""

import argparse
import copy
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from elsa_converters.torch import attach, load_level, sparsify
from torch import nn

import elsa_format

SPARSITIES = (70, 80, 90, 95)
ROWS = (1, 8, 128)


def make_network(width: int, hidden: int, zeros: float) -> nn.Module:
    """Two layers, as a transformer has them."""
    model = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width)).eval()
    for layer in (model[0], model[2]):
        layer.weight.data *= torch.rand(layer.weight.shape) >= zeros
    return model


def best(
    actions: dict[str, Callable[[], object]], repeat: int, clock: Callable[[], float]
) -> dict[str, float]:
    """Least time of each, in turn, so that all see the same machine."""
    times = dict.fromkeys(actions, float("inf"))
    for turn in range(repeat + 1):
        for name, action in actions.items():
            start = clock()
            action()
            if turn:
                times[name] = min(times[name], clock() - start)
    return times


def compare(width: int, hidden: int, zeros: float, repeat: int) -> dict[int, dict[str, float]]:
    """How many times as fast as dense float32 each is, by the rows of the input."""
    model = make_network(width, hidden, zeros)
    fast, half = copy.deepcopy(model), copy.deepcopy(model).to(torch.bfloat16)
    sparsify(fast, fast=0)
    fast_half = copy.deepcopy(half)
    sparsify(fast_half, fast=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        int8 = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    found = {}
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    for rows in ROWS:
        x = torch.randn(rows, width)
        y = x.to(torch.bfloat16)
        actions = {
            "dense": lambda x=x: model(x),
            "fast": lambda x=x: fast(x),
            "int8": lambda x=x: int8(x),
            "bfloat16": lambda y=y: half(y),
            "fast bfloat16": lambda y=y: fast_half(y),
        }
        with torch.inference_mode():
            times = best(actions, repeat, clock)
        dense = times.pop("dense")
        found[rows] = {name: dense / seconds for name, seconds in times.items()}
    return found


def switching(width: int, hidden: int, repeat: int) -> dict[str, float]:
    """Seconds to switch between levels, and to copy weights of that size."""
    model = make_network(width, hidden, 0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "net.safetensors"
        elsa_format.pack(model.state_dict(), path, sparsities=[95, 90], scope="uniform")
        plain, packed = copy.deepcopy(model), copy.deepcopy(model)
        source, target = (model[0].weight.detach().clone() for _ in range(2))
        with (
            attach(plain, path, 1) as levels,
            attach(packed, path, 1, fast=0.5, keep_dense=False) as fast,
        ):
            actions = {
                "copy_ of as many weights": lambda: [target.copy_(source) for _ in range(2)],
                "load_level": lambda: load_level(model, path, 2),
                "use(2)": lambda: levels.use(2),
                "use(2), fast": lambda: fast.use(2),
                "use(1), fast": lambda: fast.use(1),
            }
            return best(actions, repeat, time.process_time)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--shape", default="4096x11008")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    width, hidden = map(int, options.shape.split("x"))
    names = ["fast", "int8", "bfloat16", "fast bfloat16"]
    print(f"| zeros | rows | {' | '.join(names)} |")
    print(f"| --- | --- |{' --- |' * len(names)}")
    for percent in SPARSITIES:
        for rows, found in compare(width, hidden, percent / 100, options.repeat).items():
            cells = " | ".join(f"{found[name]:.1f} ×" for name in names)
            print(f"| {percent} % | {rows} | {cells} |", flush=True)
    print("\n| | ms |\n| --- | --- |")
    for name, seconds in switching(width, hidden, max(options.repeat // 3, 2)).items():
        print(f"| {name} | {seconds * 1e3:.0f} |")


if __name__ == "__main__":
    main()
