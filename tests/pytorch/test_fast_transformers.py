"""Fast levels in transformers: the same outputs as dense, saved and switched like any model."""

import json
import os
import shutil

import pytest
import torch
import transformers as hf
from click.testing import CliRunner
from elsa_converters.sparse import find_library
from elsa_converters.transformers import ElsaConfig, use_level
from internals import _fast_layers, _fast_levels, _fast_sparsify, bench

import elsa_format

pytestmark = pytest.mark.skipif(
    find_library() is None and not os.environ.get("CI"), reason="the sparse layers were not built"
)
TEXT = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2}
LLAMA = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
MODELS = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**TEXT, **LLAMA, **HEADS)),
    "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**TEXT, n_embd=32, n_layer=2, n_head=4)),
}


@pytest.fixture(params=MODELS)
def packed(request, tmp_path):
    """A packed directory."""
    torch.manual_seed(0)
    model = MODELS[request.param]()
    model.save_pretrained(tmp_path / "dense")
    folder = tmp_path / "packed"
    shutil.copytree(tmp_path / "dense", folder)
    name = "model.safetensors"
    options = {"scope": "uniform", "force": True}
    elsa_format.pack(tmp_path / "dense" / name, folder / name, sparsities=[90, 50], **options)
    return folder


def load(folder, level, **options):
    config = ElsaConfig(level=level, **options)
    return hf.AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)


@pytest.mark.parametrize("keep_dense", [True, False])
def test_as_dense_at_every_level(packed, keep_dense, tmp_path):
    """Logits and generated tokens; what is saved is the level."""
    dense = load(packed, 1)
    model = load(packed, 1, fast=0.4, keep_dense=keep_dense)
    tokens = torch.randint(3, 64, (2, 9))
    for level in (1, 2, "dense", 1):
        for each in (dense, model):
            use_level(each, level)
        fast = [m for m in model.modules() if isinstance(m, _fast_layers.FastLayer)]
        assert bool(fast) == (level != "dense")
        assert all(m.weight.is_meta != keep_dense for m in fast if m is not model.lm_head)
        with torch.inference_mode():
            expected, found = dense(tokens).logits, model(tokens).logits
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        options = {"max_new_tokens": 6, "do_sample": False}
        assert torch.equal(model.generate(tokens, **options), dense.generate(tokens, **options))
    model.save_pretrained(tmp_path / "saved")
    saved = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "saved").state_dict()
    assert all(torch.equal(saved[name], value) for name, value in dense.state_dict().items())


def test_delivered_levels(packed, tmp_path):
    elsa_format.ship(packed, tmp_path / "ship")
    dense = load(packed, 1)
    model = load(tmp_path / "ship", 1, fast=0.4, keep_dense=False)
    tokens = torch.randint(3, 64, (1, 5))
    for level in (1, 2):
        for each in (dense, model):
            use_level(each, level)
        with torch.inference_mode():
            expected = dense(tokens).logits
            torch.testing.assert_close(model(tokens).logits, expected, rtol=1e-4, atol=1e-5)


def test_what_cannot_be_fast_is_refused_before_loading():
    with pytest.raises(elsa_format.InvalidOption, match="expected True, False, or a sparsity"):
        ElsaConfig(level=1, fast="yes")


def test_bench_of_a_directory(packed, monkeypatch):
    """Every level, dense and fast; where nothing gains, dense alone."""
    gained = []
    for module in (_fast_sparsify, _fast_levels):
        monkeypatch.setattr(module, "gains", lambda *layer: bool(gained))
    words = [str(packed), "--seconds", "0", "--threads", "1"]
    result = CliRunner().invoke(bench, [*words, "-q"])
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    names = "level sparsity tokens/s fast prefill fast memory fast"
    assert lines[0].split() == names.split()
    assert [line.split()[3] for line in lines[1:4]] == ["-"] * 3
    gained.append(True)
    result = CliRunner().invoke(bench, [*words, "--json"])
    rows = json.loads(result.stdout)
    assert [row["level"] for row in rows] == [1, 2, "dense"]
    assert rows[0]["layers"][0] > 0
    assert rows[0]["fast"]["memory"] < rows[1]["fast"]["memory"] < rows[0]["dense"]["memory"]
    assert rows[2]["fast"] is None
    result = CliRunner().invoke(bench, [*words, "--html", "page.html"])
    assert (result.exit_code, result.stdout) == (2, "")
