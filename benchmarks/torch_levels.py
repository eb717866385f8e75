"""PyTorch: what loading and switching levels cost, each against the plain way in the same run.

    python benchmarks/torch_levels.py [--megabytes 200] [--repeat 7]

is part of `make bench` where PyTorch is installed; docs/pytorch.md has some of its rows.
"""

import argparse
import gc
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from elsa_converters.torch import attach, load_level
from safetensors.torch import load_file
from torch import nn

import elsa_format
from elsa_train.torch import Nesting

WIDTH = 1024
Row = tuple[str, float, str]


def make_model(megabytes: int) -> nn.Module:
    """A chain of square layers."""
    layers = max(1, megabytes * 10**6 // (WIDTH * WIDTH * 4))
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))


def meta_model(megabytes: int) -> nn.Module:
    with torch.device("meta"):
        return make_model(megabytes)


def best(actions: dict[str, Callable[[], object]], repeat: int) -> dict[str, float]:
    """Least time of each, with the threads it takes, in turn so that all see the same machine."""
    times = dict.fromkeys(actions, float("inf"))
    for _ in range(repeat):
        for name, action in actions.items():
            gc.collect()
            start = time.perf_counter()
            action()
            times[name] = min(times[name], time.perf_counter() - start)
    return times


def private_memory() -> int:
    """Bytes that this process has for itself; pages of mapped files are not among them."""
    gc.collect()
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty"))


def loading(path: Path, megabytes: int, repeat: int) -> list[Row]:
    """Into a model that is there, and into one on the meta device."""
    model = make_model(megabytes)
    times = best(
        {
            "load_state_dict": lambda: model.load_state_dict(load_file(path)),
            "load_level": lambda: load_level(model, path, 2),
            "unverified": lambda: load_level(model, path, 2, verify=False),
        },
        repeat,
    )
    plain = times["load_state_dict"]
    return [
        ("load_level, in place / load_file + load_state_dict", times["load_level"] / plain, "1.3"),
        ("the same with verify=False", times["unverified"] / plain, ""),
    ]


def loading_meta(path: Path, megabytes: int, repeat: int) -> list[Row]:
    """New memory for every weight, as a plain load has to have it before the weights are used."""

    def plain() -> None:
        model = meta_model(megabytes)
        model.load_state_dict({k: v.clone() for k, v in load_file(path).items()}, assign=True)

    def level() -> None:
        load_level(meta_model(megabytes), path, 2)

    times = best({"plain": plain, "level": level}, repeat)
    return [
        (
            "load_level, meta device / load_file, cloned, assigned",
            times["level"] / times["plain"],
            "",
        )
    ]


def memory(path: Path, megabytes: int) -> list[Row]:
    """What loading and being attached take, beyond the model that is there."""
    model = make_model(megabytes)
    size = sum(p.nbytes for p in model.parameters())
    before = private_memory()
    load_level(model, path, 2)
    loaded = private_memory()
    levels = attach(model, path)
    levels.use(1)
    attached = private_memory()
    levels.close()
    empty = meta_model(megabytes)
    start = private_memory()
    load_level(empty, path, 2)
    made = private_memory()
    return [
        ("private memory of load_level, in place / the model", (loaded - before) / size, "0.02"),
        ("private memory of load_level, meta device / the model", (made - start) / size, "1.05"),
        ("private memory of attach / the model", (attached - loaded) / size, "0.02"),
    ]


def switching(path: Path, megabytes: int, repeat: int) -> list[Row]:
    """A switch, against copying the same tensors."""
    model, other = make_model(megabytes), make_model(megabytes)
    levels = attach(model, path)
    pairs = list(zip(model.parameters(), other.parameters(), strict=True))

    def copy() -> None:
        with torch.no_grad():
            for mine, theirs in pairs:
                mine.copy_(theirs)

    times = best(
        {
            "copy": copy,
            "level 2": lambda: levels.use(2),
            "dense": lambda: levels.use("dense"),
            "load_state_dict": lambda: model.load_state_dict(load_file(path)),
        },
        repeat,
    )
    levels.close()
    return [
        ("switch to a level / copy_ of the same tensors", times["level 2"] / times["copy"], "1.2"),
        ("switch to dense / copy_", times["dense"] / times["copy"], ""),
        (
            "switch to a level / load_file + load_state_dict",
            times["level 2"] / times["load_state_dict"],
            "",
        ),
    ]


def training(repeat: int) -> list[Row]:
    """A step of AdamW on a small transformer, with weights held after it and without."""

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
        model = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        return model, torch.optim.AdamW(model.parameters())

    words = torch.randn(8, 64, 256)

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(3):
            optimizer.zero_grad()
            model(words).square().mean().backward()
            optimizer.step()

    plain, held = make(), make()
    nesting = Nesting(*held, levels="90,50")
    nesting.sparsify()
    nesting.freeze()
    times = best({"plain": lambda: steps(*plain), "held": lambda: steps(*held)}, repeat)
    return [("a step with frozen weights held / without", times["held"] / times["plain"], "1.10")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--repeat", type=int, default=7)
    options = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "net.safetensors"
        state = make_model(options.megabytes).state_dict()
        elsa_format.pack(state, path, sparsities=[95, 90, 80])
        used = memory(path, options.megabytes)  # first, while nothing has been freed
        rows = [
            *switching(path, options.megabytes, options.repeat),
            *loading(path, options.megabytes, options.repeat),
            *loading_meta(path, options.megabytes, options.repeat),
            *used,
            *training(options.repeat),
        ]
    print("Ratios of time, each with the threads that it takes, and of private memory.\n")
    print("| what | ratio | target | reached |\n| --- | ---: | --- | --- |")
    for what, ratio, limit in rows:
        target, reached = "", ""
        if limit:
            target, reached = f"≤ {limit} ×", "yes" if ratio <= float(limit) else "**no**"
        print(f"| {what} | {ratio:.2f} × | {target} | {reached} |")


if __name__ == "__main__":
    main()
