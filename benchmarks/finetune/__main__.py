"""Fine-tune packed levels of a network and measure what they are worth on test data.

    python -m benchmarks.finetune gpt
    python -m benchmarks.finetune cifar --data cifar-10-batches-bin --seeds 3

The networks are trained by `python -m benchmarks.calibrate.networks`. The learning rate is the one
whose levels come nearest to the original on training data that no fine-tune sees, after 100 steps
of three networks each from calibrated levels. Test data decides nothing. What is finished is left
alone, and what was interrupted is resumed, so that this can be stopped and started at any time.
"""

import argparse
import json
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.calibrate.cifar import Cifar
from benchmarks.calibrate.gpt import Gpt
from benchmarks.calibrate.methods import Run
from benchmarks.calibrate.table import ORIGINAL, Found, path_of, read, write
from benchmarks.finetune import LEVELS, RUNS
from benchmarks.finetune.networks import batches_of, opened
from benchmarks.finetune.table import show
from elsa_train.torch import FinetuneReport, finetune

RATES = 1e-3, 3e-3
CHOICE = 100
"""Steps to choose a rate by."""


@dataclass(frozen=True)
class Method:
    """A way from the original network to levels."""

    title: str
    start: str = "nested"
    """How the levels are packed first, as `benchmarks.calibrate` calls it."""
    levels: str = LEVELS
    steps: int = 0
    each: str = "sandwich"
    shares: tuple[int, ...] = ()
    train: str = "all"


METHODS = {
    "magnitude": Method("by magnitude", "magnitude"),
    "nested": Method("calibrated"),
    "sandwich": Method("+ 500 steps, three networks each", steps=500),
    "one": Method("+ 1,500 steps, one network each", steps=1500, each="one"),
    "own": Method("+ 500 steps, biases and norms alone", steps=500, train="own"),
    "from-magnitude": Method("magnitude + 500 steps, three networks each", "magnitude", steps=500),
    "alone": Method("90 % alone, 1,500 steps", "alone", "90", 1500, "one", (1, 0)),
}


class Bench:
    """A network, and what was found out about it."""

    def __init__(self, network: Cifar | Gpt) -> None:
        self.network, self.folder = network, RUNS / network.name
        self.folder.mkdir(parents=True, exist_ok=True)

    def packed(self, method: Method, seed: int) -> tuple[Path, float]:
        """The packed file to start from, and the seconds it took."""
        run = Run(method.start, method.levels, seed)
        path = self.folder / f"{run.method}-{run.levels}-{seed}.safetensors"
        times = path.with_suffix(".seconds")
        if not path.exists():
            start = time.perf_counter()
            run.pack(self.network, path)
            times.write_text(f"{time.perf_counter() - start}\n", "utf-8")
        return path, float(times.read_text("utf-8"))

    def tune(self, name: str, method: Method, seed: int, rate: float, out: Path) -> FinetuneReport:
        """Fine-tune; resumes."""
        batches = batches_of(self.network, seed)
        return finetune(
            self.network.model,
            self.packed(method, seed)[0],
            batches,
            steps=method.steps,
            out=out,
            validation=batches.validation(),
            state=out.with_suffix(".state"),
            save_every=50,
            force=True,
            progress=lambda done, steps: done % 50 or print(f"{name}: {done}/{steps}", flush=True),
            rate=rate,
            each=method.each,
            shares=method.shares,
            train=method.train,
            classes="logits",
            seed=seed,
        )

    def rate(self) -> float:
        """The learning rate, chosen on training data that is held back."""
        found = {}
        for rate in RATES:
            path = self.folder / f"rate-{rate:g}.json"
            if not path.exists():
                out = path.with_suffix(".safetensors")
                method = replace(METHODS["sandwich"], steps=CHOICE)
                report = self.tune(f"rate {rate:g}", method, 1, rate, out)
                losses = {str(level): m["loss"] for level, m in report.after.items()}
                path.write_text(json.dumps(losses) + "\n", "utf-8")
                out.unlink()
            losses = json.loads(path.read_text("utf-8"))
            found[rate] = sum(losses.values()) / len(losses)
        print(f"held-back loss by rate: {found}", flush=True)
        return min(found, key=found.__getitem__)

    def measure(self, name: str, seed: int) -> Found:
        """Train and test."""
        method, busy = METHODS[name], os.getloadavg()[0] > 1.5
        path, seconds = self.packed(method, seed)
        if method.steps:
            rate = self.rate()
            start, out = time.perf_counter(), self.folder / f"{name}-{seed}.safetensors"
            self.tune(name, method, seed, rate, out)
            path, seconds = out, time.perf_counter() - start
        levels: dict[str, Any] = {n: t for t, n in enumerate(method.levels.split(","), 1)}
        if name != "alone":
            levels["dense"] = "dense"
        scores = {n: self.network.scores(path, level) for n, level in levels.items()}
        return Found(scores, seconds, 0, busy)


def main() -> None:
    """Measure what is not measured yet, and show the table after each run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.finetune", description=__doc__)
    parser.add_argument("name", choices=("cifar", "gpt"))
    parser.add_argument("--data", type=Path, help="images of cifar")
    parser.add_argument("--seeds", type=int, default=1, help="choices of samples and batches (1)")
    parser.add_argument("--methods", default=",".join(METHODS), help="of all: %(default)s")
    given = parser.parse_args()
    if unknown := set(given.methods.split(",")) - METHODS.keys():
        parser.error(f"no method {min(unknown)!r}; there are {', '.join(METHODS)}")
    bench = Bench(opened(given.name, given.data))
    if not path_of(bench.folder, ORIGINAL).exists():
        write(bench.folder, ORIGINAL, Found({"dense": bench.network.scores(None, "dense")}))
    for seed in range(1, given.seeds + 1):
        for name in given.methods.split(","):
            run = Run(name, METHODS[name].levels, seed)
            if read(bench.folder, run) is None:
                torch.manual_seed(seed)
                write(bench.folder, run, bench.measure(name, seed))
                show(bench.network, bench.folder, METHODS, given.seeds)


if __name__ == "__main__":
    main()
