"""What calibrating a large model directory takes: some blocks are measured, the rest computed.

    python -m benchmarks.large_directory [--blocks 16] [--sparsities 70,50] [--samples 128]
        [--length 128] [--divide 1] [--folder DIR]

makes a Llama-shaped directory of random bfloat16 weights, 1.1 billion of them with 16 blocks, and
nests levels into a small matrix and then the largest one of the block in its middle. All blocks are
loaded and run, and matrices are solved one after the other, so the peak of memory is that of the
whole. What the other matrices take is computed: each step of one costs rows x columns^2. Shares are
uniform. With `--folder` the directory stays, and is made only once.
"""

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np

SIZES = {"hidden_size": 2048, "intermediate_size": 8192, "vocab_size": 32000}
HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8}


def make(folder: Path, blocks: int, sizes: dict[str, int]) -> None:
    """A model directory with a tokenizer and, beside it, a text."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    text = "\n".join(topics[name] for name in sorted(topics))
    folder.with_suffix(".txt").write_text(text)
    tokenizer = Tokenizer(models.BPE(unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(vocab_size=1000, special_tokens=["?"], show_progress=False)
    tokenizer.train_from_iterator([text], trainer)
    torch.manual_seed(0)
    config = LlamaConfig(num_hidden_layers=blocks, dtype="bfloat16", **sizes, **HEADS)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="?").save_pretrained(folder)


class Times:
    """Prints what was done when, and keeps the last two times: of the clock, and of all cores."""

    def __init__(self) -> None:
        self.begun = np.array([time.monotonic(), time.process_time()])
        self.solved: list[Any] = []

    def __call__(self, done: int, total: int) -> None:
        """Bytes are not looked at."""

    def doing(self, what: str, unit: str | None = None) -> None:
        """What is finished."""
        now = self.passed()
        if what.startswith("solved"):
            self.solved.append(now)
        print(f"{now[0]:.0f} s ({now[1]:.0f} s of cores), {memory():.2f} GB: {what}", flush=True)

    def passed(self) -> Any:
        """Since it was made."""
        return np.array([time.monotonic(), time.process_time()]) - self.begun


def steps(sizes: dict[str, int]) -> tuple[int, int]:
    """What a step of all matrices of a block costs, and of the largest one."""
    n, inner = sizes["hidden_size"], sizes["intermediate_size"]
    values = n * HEADS["num_key_value_heads"] // HEADS["num_attention_heads"]
    largest = n * inner**2
    return 2 * (n + values) * n**2 + 2 * inner * n**2 + largest, largest


def memory() -> float:
    """The peak of this process so far, in GB: pages of mapped weights count."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def main() -> None:
    """Make the directory, nest two of its matrices, print what it took."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--sparsities", default="70,50")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--folder", type=Path, help="Where the directory is, or is to be.")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--divide", type=int, default=1, help="Layers so many times narrower.")
    parser.add_argument("--make", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    sizes = {n: size // given.divide for n, size in SIZES.items()}
    if given.make is not None:
        make(given.make, given.blocks, sizes)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary) / "model"
        if not folder.is_dir():  # by another process, whose memory does not count
            words = [*sys.argv[1:], "--make", str(folder)]
            subprocess.run([sys.executable, "-m", "benchmarks.large_directory", *words], check=True)
        measure(folder, Path(temporary) / "out", given, sizes)


def measure(folder: Path, out: Path, given: Any, sizes: dict[str, int]) -> None:
    """Nest levels into two matrices."""
    import elsa_format

    block, times = f"model.layers.{given.blocks // 2}", Times()
    report = elsa_format.pack(
        folder,
        out,
        sparsities=given.sparsities,
        calibrate=folder.with_suffix(".txt"),
        samples=given.samples,
        length=given.length,
        scope="uniform",
        include=[f"{block}.self_attn.k_proj.weight", f"{block}.mlp.down_proj.weight"],
        progress=times,
    )
    every, largest = steps(sizes)
    took, one = times.passed(), times.solved[1] - times.solved[0]
    whole = took - one + one * (given.blocks * every / largest)
    print(f"{report.parameters:,} parameters, peak {memory():.2f} GB; all {given.blocks} blocks:")
    for name, seconds, matrix in zip(("clock", "cores"), whole, one, strict=True):
        print(
            f"{seconds / 3600:.1f} h of {name}, {matrix * every / largest:.0f} s a block, computed"
        )


if __name__ == "__main__":
    main()
