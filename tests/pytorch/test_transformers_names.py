"""What names tell of a model's tensors is what its modules are."""

import re

import pytest
import torch
from internals import input_axes, layer_kind
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM
from transformers.pytorch_utils import Conv1D

KINDS = "llama qwen3 gemma2 gpt2 gpt_neox opt bloom falcon phi bert electra whisper openai-gpt"
LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, Conv1D)


def build(kind: str) -> nn.Module:
    config = AutoConfig.for_model(kind)
    for name in ("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers"):
        if isinstance(getattr(config, name, None), int):
            setattr(config, name, 2)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:2]
    auto = AutoModelForSeq2SeqLM if kind == "t5" else AutoModelForCausalLM
    with torch.device("meta"):
        model: nn.Module = auto.from_config(config)
    return model


@pytest.mark.parametrize("kind", [*KINDS.split(), "t5"])
def test_layers_are_nested_and_nothing_else(kind: str) -> None:
    model = build(kind)
    shapes = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    axes, vocabulary = input_axes(shapes), model.config.vocab_size
    head, layers = model.get_output_embeddings(), 0
    for path, module in model.named_modules():
        name = f"{path}.weight"
        if name not in shapes or len(shapes[name]) < 2:
            continue
        kept = layer_kind(name, shapes[name], vocabulary)
        if isinstance(module, nn.Embedding) or module is head:
            assert kept is not None, name
        elif isinstance(module, LAYERS) and not re.search(
            "^cls|^generator|embeddings_project", path
        ):
            assert kept is None, name
            layers += 1
        if isinstance(module, LAYERS):
            assert axes[name] == (0 if isinstance(module, Conv1D) else 1), name
    assert layers > 5
