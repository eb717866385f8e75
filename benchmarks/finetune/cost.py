"""What a step of a fine-tune costs beside its passes: `python -m benchmarks.finetune.cost`.

The passes are those of the plain network in the same process, interleaved with the steps: a forward
and backward for each level that a step trains, and a forward of the teacher. Processor time of one
thread, the least of all repeats.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from internals import FinetuneRun
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import elsa_format
from benchmarks.calibrate.networks import GPT, ResNet
from elsa_train.torch import FinetuneOptions, Student


def networks() -> dict[str, tuple[nn.Module, Tensor]]:
    """Networks as they are drawn, and a batch for each."""
    torch.manual_seed(0)
    return {
        "CIFAR-10 ResNet": (ResNet(), torch.randn(100, 3, 32, 32)),
        "byte GPT": (GPT(), torch.randint(0, 256, (16, 128))),
    }


def seconds(function: Callable[[], object]) -> float:
    """Processor time of a call: others may use the machine."""
    start = time.process_time()
    function()
    return time.process_time() - start


def measure(model: nn.Module, batch: Tensor, each: str, repeats: int) -> tuple[float, float]:
    """Seconds of a step, and of its passes."""
    with tempfile.TemporaryDirectory() as folder:
        net = Path(folder) / "net.safetensors"
        elsa_format.pack(model.state_dict(), net, sparsities=[90, 80, 70, 50])
        options = FinetuneOptions(each=each, classes="logits")  # type: ignore[arg-type]
        run = FinetuneRun(Student(model, net, options), steps=10_000)
    run.student.train()

    @torch.no_grad()
    def forward() -> None:
        model.eval()(batch)

    def both() -> None:
        model.train()
        logits = model(batch).flatten(0, -2)
        cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long)).backward()
        model.zero_grad()

    steps, passes, answers = [], [], []
    for _ in range(repeats):
        steps.append(seconds(lambda: run.step([batch])))
        passes.append(seconds(both))
        answers.append(seconds(forward))
    trained = len(run.student.drawn(0))
    return min(steps), trained * min(passes) + min(answers)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=12)
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(f"load {os.getloadavg()[0]:.1f}; least of {given.repeats}")
    for name, (model, batch) in networks().items():
        for each in ("sandwich", "one"):
            step, passes = measure(model, batch, each, given.repeats)
            print(f"{name}, {each}: {step:.3f} s, its passes {passes:.3f} s: {step / passes:.2f} x")


if __name__ == "__main__":
    main()
