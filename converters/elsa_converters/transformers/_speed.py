"""How fast each level of a language model generates, densely and without its zeros."""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from elsa_converters.sparse._choice import Fast
from elsa_converters.torch._fast.layers import FastLayer
from elsa_converters.torch._fast.sparsify import layers_of
from elsa_converters.transformers._levels import use_level
from elsa_converters.transformers._quantizer import ElsaConfig
from elsa_converters.transformers._text import from_pretrained
from elsa_format import Incomplete
from elsa_format.plugins import LevelNumber, counted, open_network

PROMPT = 128
"""Tokens that are read at once, unless the model takes fewer."""
STEPS = 8
"""Tokens that are generated after them, one at a time."""


@dataclass(frozen=True)
class Pace:
    """What a model does on this machine."""

    tokens: float
    """Generated in a second."""
    prefill: float
    """Seconds to read the prompt."""
    memory: int
    """Bytes of all its tensors."""


@dataclass(frozen=True)
class Speed:
    """One level, measured."""

    level: LevelNumber
    sparsity: float
    """Of the nested weights."""
    dense: Pace
    fast: Pace | None
    """None if no layer is faster without its zeros."""
    layers: tuple[int, int]
    """How many layers skip their zeros, of how many that could."""

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


def measure_speed(
    directory: str | os.PathLike[str],
    *,
    fast: Fast = True,
    threads: int | None = None,
    seconds: float = 2.0,
    prompt: int = PROMPT,
    progress: Callable[[str], object] = lambda what: None,
) -> list[Speed]:
    """Measure how fast every level of a causal language model generates text on this CPU.

    Two models run in turn, a dense one and one with fast layers, so that both see the same noise;
    the shortest times count. Tokens are random, one sequence at a time, with a cache.

    Args:
        directory: A packed model directory, or one that `elsa-fetch` made.
        fast: Which layers skip their zeros, as `elsa_converters.torch.sparsify` takes it.
        threads: Of PyTorch; None leaves their number as it is.
        seconds: For each level.
        prompt: Tokens to read before the generation, fewer if the model takes no more.
        progress: Called with what is measured next.

    Returns:
        The available levels, sparsest first, and "dense".

    Raises:
        Incomplete: No level is downloaded yet.
    """
    where = os.fspath(directory)
    with open_network(directory) as network:
        levels, counts = network.available, counted(network)
        sparsity = {level: counts.sparsity(level) or 0.0 for level in levels}
    if not levels:
        raise Incomplete(f"{where}: no level is downloaded yet; run: elsa-fetch")
    rows = []
    with _threads(threads):
        progress("loading")
        dense, sparse = (
            from_pretrained(
                AutoModelForCausalLM,
                where,
                quantization_config=ElsaConfig(levels[0], fast=chosen, keep_dense=not chosen),
            )
            for chosen in (False, fast)
        )
        for level in levels:
            progress(f"level {level}")
            use_level(sparse, level)
            layers = layers_of(sparse).values()
            count = sum(isinstance(layer, FastLayer) for layer in layers)
            first, *second = _paces([dense, sparse] if count else [dense], prompt, seconds)
            found = second[0] if second else None
            rows.append(Speed(level, sparsity[level], first, found, (count, len(layers))))
    return rows


@contextmanager
def _threads(count: int | None) -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@torch.inference_mode()
def _paces(models: Sequence[nn.Module], prompt: int, seconds: float) -> list[Pace]:
    """Of models that run in turn."""
    config = models[0].config
    most = getattr(config, "max_position_embeddings", None) or prompt + STEPS
    tokens = torch.randint(0, config.vocab_size, (1, max(min(prompt, most - STEPS), 1)))
    best = [[float("inf")] * 2 for _ in models]
    began, turns = time.perf_counter(), 0
    while turns < 2 or time.perf_counter() - began < seconds:
        for model, times in zip(models, best, strict=True):
            start = time.perf_counter()
            read = model(tokens, use_cache=True)
            times[0] = min(times[0], time.perf_counter() - start)
            cache, chosen = read.past_key_values, read.logits[:, -1:].argmax(-1)
            for _ in range(STEPS):
                start = time.perf_counter()
                step = model(chosen, past_key_values=cache, use_cache=True)
                chosen = step.logits[:, -1:].argmax(-1)
                times[1] = min(times[1], time.perf_counter() - start)
        turns += 1
    return [
        Pace(1 / step, prefill, _memory(model))
        for model, (prefill, step) in zip(models, best, strict=True)
    ]


def _memory(model: nn.Module) -> int:
    """Bytes of what is stored once."""
    tensors = [*model.parameters(), *model.buffers()]
    held = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors if not t.is_meta}
    return sum(storage.nbytes() for storage in held.values())
