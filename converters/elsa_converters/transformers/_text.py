"""How well each level of a language model predicts a text."""

import os
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from elsa_converters._errors import InvalidData
from elsa_converters.torch._evaluate import run_levels, switching
from elsa_converters.transformers._quantizer import ElsaConfig
from elsa_format import ElsaError, Incomplete, InvalidOption, Metric
from elsa_format.plugins import LevelNumber, Progress, no_progress, open_network

LONGEST = 1024
"""Tokens of a part, at most: a model may take many more, for which memory is short."""


def evaluate_text(
    directory: str | os.PathLike[str],
    text: str | os.PathLike[str],
    *,
    limit: int | None = None,
    progress: Progress = no_progress,
) -> dict[LevelNumber, dict[str, Metric]]:
    """Measure the loss and the perplexity of every level of a causal language model on a text.

    The text is cut into parts as long as the model takes, 1024 tokens at most, each read on its
    own. The loss is the mean over all predicted tokens, in nats; its standard error is that of the
    parts, which are the samples.

    Args:
        directory: A packed model directory with its tokenizer, or one that `elsa-fetch` made.
        text: A file of UTF-8 text that the model was not trained on.
        limit: Use the first parts only.
        progress: Called with the numbers of parts that are done, and of all.

    Returns:
        The metrics of each available level, sparsest first, and of "dense".

    Raises:
        InvalidData: The text or the tokenizer does not fit the model.

    >>> evaluate_text("no-model", "no-text.txt")
    Traceback (most recent call last):
    FileNotFoundError: [Errno 2] No such file or directory: 'no-text.txt'
    """
    if limit is not None and (type(limit) is not int or limit < 1):
        raise InvalidOption(f"limit={limit!r}: expected a whole number from 1 on")
    words = _read(text)
    where = os.fspath(directory)
    with open_network(directory) as network:
        levels = network.available
    if not levels:
        raise Incomplete(f"{where}: no level is downloaded yet; run: elsa-fetch")
    parts = _parts(where, words, os.fspath(text))[:limit]
    model = from_pretrained(AutoModelForCausalLM, where, quantization_config=ElsaConfig(levels[0]))
    with switching(model, None) as (levels, use):
        return run_levels(model, levels, use, parts, "perplexity", progress)


def _read(text: str | os.PathLike[str]) -> str:
    try:
        words = Path(text).read_text("utf-8")
    except UnicodeDecodeError:
        raise InvalidData(f"{os.fspath(text)}: is not UTF-8 text") from None
    if not words.strip():
        raise InvalidData(f"{os.fspath(text)}: holds no text")
    return words


def _parts(where: str, words: str, text: str) -> list[torch.Tensor]:
    """Token numbers of each part, with the token first that begins a text, if there is one."""
    config = from_pretrained(AutoConfig, where)
    tokenizer = from_pretrained(AutoTokenizer, where)
    tokens = tokenizer(words, add_special_tokens=False, verbose=False).input_ids
    first = [t for t in tokenizer("").input_ids[:1] if t == tokenizer.bos_token_id]
    known = getattr(config, "vocab_size", None)
    if known is not None and max(tokens, default=0) >= known:
        raise InvalidData(
            f"{where}: the tokenizer gives token {max(tokens)}, the model has {known}; "
            "it is another model's tokenizer"
        )
    size = min(getattr(config, "max_position_embeddings", None) or LONGEST, LONGEST) - len(first)
    parts = [first + tokens[at : at + size] for at in range(0, len(tokens), size)]
    parts = [part for part in parts if len(part) > 1]  # nothing is predicted of a single one
    if not parts:
        raise InvalidData(f"{text}: holds {len(tokens)} tokens, expected 2 or more")
    return [torch.tensor([part]) for part in parts]


def from_pretrained(kind: Any, where: str, **options: Any) -> Any:
    """Load something of a model directory, and say in a line why it cannot be."""
    try:
        return kind.from_pretrained(where, local_files_only=True, **options)
    except ElsaError:
        raise
    except (OSError, ValueError, KeyError, ImportError) as error:
        first, *_ = str(error).strip().splitlines() or [type(error).__name__]
        raise InvalidData(f"{where}: {kind.__name__}: {first}") from error
