"""What calibrating a large model directory takes: some blocks are measured, the rest computed.

    python -m benchmarks.large_directory [--blocks 16] [--sparsities 70,50] [--scope SCOPE]

makes a Llama-shaped directory of random bfloat16 weights, 1.1 billion of them with 16 blocks, and
nests levels into the block in its middle by 128 samples of 128 tokens. All blocks are loaded and
run, so the peak of memory is that of the whole. A block more takes as long as this one, but for its
first layer, 2 % of it. With `--folder` the directory stays, and is made only once.
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
    """When each layer was measured and solved, told as it happens."""

    def __init__(self) -> None:
        self.begun, self.told = time.monotonic(), list[tuple[float, str]]()

    def __call__(self, done: int, total: int) -> None:
        """Bytes are not looked at."""

    def doing(self, what: str, unit: str | None = None) -> None:
        """What is finished."""
        self.told.append((time.monotonic() - self.begun, what))
        print(f"{self.told[-1][0]:8.1f} s  {memory():5.2f} GB  {what}", flush=True)

    def between(self, kind: str) -> float:
        """What all layers but the first took, of one kind of work."""
        times = [at for at, what in self.told if what.startswith(kind)]
        return times[-1] - times[0] if times else 0.0


def memory() -> float:
    """The peak of this process so far, in GB: pages of mapped weights count."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def main() -> None:
    """Make the directory, nest one of its blocks, print what it took."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--sparsities", default="70,50")
    parser.add_argument("--scope", choices=("auto", "uniform", "global"))
    parser.add_argument("--folder", type=Path, help="Where the directory is, or is to be.")
    parser.add_argument("--small", action="store_true", help="Tiny layers, to try the command.")
    parser.add_argument("--make", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    sizes = {n: size // (32 if given.small else 1) for n, size in SIZES.items()}
    if given.make is not None:
        make(given.make, given.blocks, sizes)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary) / "model"
        if not folder.is_dir():  # by another process, whose memory does not count
            words = [*sys.argv[1:], "--make", str(folder)]
            subprocess.run([sys.executable, "-m", "benchmarks.large_directory", *words], check=True)
        measure(folder, Path(temporary) / "out", given)


def measure(folder: Path, out: Path, given: Any) -> None:
    """Nest levels into one block."""
    import elsa_format

    times = Times()
    report = elsa_format.pack(
        folder,
        out,
        sparsities=given.sparsities,
        calibrate=folder.with_suffix(".txt"),
        scope=given.scope,
        include=f"model.layers.{given.blocks // 2}.*proj*",
        progress=times,
    )
    took = time.monotonic() - times.begun
    block = times.between("measured") + times.between("solved")
    print(f"{report.parameters:,} parameters, {report.nested_weights:,} of them nested")
    print(f"all but solving: {took - block:.0f} s; a block: {block:.0f} s; peak {memory():.2f} GB")
    hours = (took + (given.blocks - 1) * block) / 3600
    print(f"computed: {given.blocks} blocks in {hours:.1f} h")


if __name__ == "__main__":
    main()
