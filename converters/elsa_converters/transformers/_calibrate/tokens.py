"""Texts as a model takes them, by the tokenizer of its directory."""

from collections.abc import Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer

from elsa_converters._errors import InvalidData
from elsa_converters.transformers._calibrate.text import Text
from elsa_converters.transformers._text import from_pretrained

FILES = "tokenizer*", "vocab*", "*.model", "*.tiktoken", "tekken.json"
"""What tokenizers are stored as; without any, transformers makes one that knows no words."""


def tokenize(
    texts: Sequence[Text], folder: Path, model: nn.Module, length: int, size: int
) -> list[dict[str, Tensor]]:
    """The arguments for batches of texts, each cut to a length and padded to the longest.

    Experts cannot tell padding from other tokens: batches for them hold texts of one length.
    """
    config: Any = getattr(model, "config", None)
    if config is None:
        raise InvalidData(f"{folder}: the model takes no text; expected arrays (.npz, .npy)")
    accepted = signature(model.forward).parameters
    if "input_ids" not in accepted:
        first = getattr(model, "main_input_name", next(iter(accepted)))
        raise InvalidData(f"{folder}: the model takes {first}, no text; expected arrays (.npz)")
    if not any(found for pattern in FILES for found in folder.glob(pattern)):
        raise InvalidData(f"{folder}: has no tokenizer; expected batches of token numbers")
    tokenizer = from_pretrained(AutoTokenizer, str(folder))
    tokenizer.padding_side = tokenizer.truncation_side = "right"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    most = getattr(config, "max_position_embeddings", None) or 0  # -1 stands for any number
    longest = most if most > 0 else length
    words = getattr(config, "vocab_size", None)

    def encode(texts: Sequence[str]) -> dict[str, Tensor]:
        found = tokenizer(
            list(texts),
            padding=len(texts) > 1,
            truncation=True,
            max_length=min(length, longest),
            return_tensors="pt",
        )
        ids = found["input_ids"]
        if not ids.numel():
            raise InvalidData(f"{folder}: the tokenizer gives no tokens for {texts[0]!r}")
        if words is not None and int(ids.max()) >= words:
            raise InvalidData(
                f"{folder}: the tokenizer gives token {int(ids.max())}, the model has {words}; "
                "it is another model's tokenizer"
            )
        return {name: tensor for name, tensor in found.items() if name in accepted}

    groups = [list(texts)]
    if has_experts(model):
        lengths: dict[int, list[Text]] = {}
        for text in texts:
            lengths.setdefault(encode([text.text])["input_ids"].shape[1], []).append(text)
        groups = [lengths[tokens] for tokens in sorted(lengths)]
    batches = []
    for some in (group[at : at + size] for group in groups for at in range(0, len(group), size)):
        batch = encode([text.text for text in some])
        if getattr(config, "is_encoder_decoder", False):
            given = encode([text.text if text.target is None else text.target for text in some])
            batch |= _shifted(given, model, folder)
        batches.append(batch)
    return batches


def _shifted(given: dict[str, Tensor], model: Any, folder: Path) -> dict[str, Tensor]:
    """What a decoder reads to write a text: all but its last token, after one that begins it."""
    ids, mask = given["input_ids"], given["attention_mask"]
    config = model.config
    places = (model.generation_config, config)
    names = ("decoder_start_token_id", "bos_token_id", "pad_token_id")
    known = [getattr(place, name, None) for name in names for place in places]
    start = next((token for token in known if token is not None), None)
    if start is None:
        raise InvalidData(f"{folder}: config.json has no decoder_start_token_id")
    first = torch.full_like(ids[:, :1], start)
    return {
        "decoder_input_ids": torch.cat([first, ids[:, :-1]], 1),
        "decoder_attention_mask": torch.cat([torch.ones_like(first), mask[:, :-1]], 1),
    }


def has_experts(model: nn.Module) -> bool:
    """Whether some tensors hold a matrix for each expert."""
    return any(tensor.ndim == 3 and "expert" in name for name, tensor in model.named_parameters())
