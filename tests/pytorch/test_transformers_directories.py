"""From a model directory to a level that `from_pretrained` loads, in two commands, to the bit."""

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from decoder import content, decode
from elsa_converters.torch import load_level
from safetensors.torch import load_file

import elsa_format

BIN = Path(sys.executable).parent
SIZES = {"vocab_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32}
LLAMA = {**SIZES, "intermediate_size": 48, "num_key_value_heads": 2}
GPT2 = {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16}
T5 = {"vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}


def commands(*commands: tuple[object, ...]) -> None:
    for name, *words in commands:
        path = [str(BIN / str(name)), *map(str, words)]
        subprocess.run(path, check=True, capture_output=True)


def state(model: Any) -> dict[str, tuple[torch.dtype, bytes]]:
    return {name: (t.dtype, content(t)) for name, t in model.state_dict().items()}


def by_hand(model: Any, packed: Path, level: int | None) -> dict[str, tuple[torch.dtype, bytes]]:
    """What the model holds at a level that was decoded independently."""
    weights = decode(elsa_format.plugins.weights_file(packed), level)
    own = model.state_dict()
    stored = {name: (own[name].dtype, value) for name, value in weights.items()}
    names: dict[int, str] = {own[name].data_ptr(): name for name in stored}
    return {name: stored[names[t.data_ptr()]] for name, t in own.items()}


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA)), {}),
        (lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA)), {"max_shard_size": "20kB"}),
        (
            lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA)),
            {"max_shard_size": "20kB", "variant": "fp16"},
        ),
        (lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA, tie_word_embeddings=True)), {}),
        (lambda: hf.T5ForConditionalGeneration(hf.T5Config(**T5)), {"max_shard_size": "20kB"}),
        (lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2)), {}),
    ],
    ids=["llama", "shards", "variant", "tied", "t5", "gpt2"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_two_commands(make: Any, options: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    make().to(dtype).save_pretrained(tmp_path / "dense", **options)
    packed = tmp_path / "packed"
    commands(("elsa-pack", tmp_path / "dense", "--sparsities", "90,80,50", "-o", packed))
    variant = options.get("variant")
    for level in (1, 3, None):
        out = tmp_path / f"level {level}"
        commands(("elsa-extract", packed, "--level", level or "dense", "-o", out))
        model, info = type(make()).from_pretrained(
            out, variant=variant, output_loading_info=True, dtype="auto"
        )
        assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        assert state(model) == by_hand(model, packed, level)
        assert (out / "config.json").read_bytes() == (tmp_path / "dense/config.json").read_bytes()
    # A packed directory is the dense network to those who know nothing of it.
    assert state(type(make()).from_pretrained(packed, variant=variant, dtype="auto")) == state(
        model
    )
    # Every layer keeps its share, which a threshold for all would not give T5's.
    with elsa_format.open(packed) as file:
        for name, kept in file.nested.items():
            assert kept[0] == pytest.approx(file.tensors[name].elements * 0.1, abs=1)
        assert not [name for name in file.nested if "embed" in name or "shared" in name]


def test_patterns_of_gpt2_lie_along_inputs(tmp_path: Path) -> None:
    """Its layers have their inputs first, unlike all others."""
    torch.manual_seed(0)
    hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2)).save_pretrained(tmp_path / "dense")
    packed, level = tmp_path / "packed", tmp_path / "level"
    commands(
        ("elsa-pack", tmp_path / "dense", "--sparsities", "1:8,2:4", "-o", packed),
        ("elsa-extract", packed, "--level", "2:4", "-o", level),
    )
    model = hf.GPT2LMHeadModel.from_pretrained(level)
    layers = [m for m in model.modules() if isinstance(m, hf.pytorch_utils.Conv1D)]
    assert len(layers) == 8
    for layer in layers:
        inputs, outputs = layer.weight.shape
        kept = (layer.weight.reshape(inputs // 4, 4, outputs) != 0).sum(1)
        assert set(kept.unique().tolist()) == {2}


def test_a_sparse_layout_is_refused_by_plain_loaders(tmp_path: Path) -> None:
    hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA)).save_pretrained(tmp_path / "dense")
    elsa_format.pack(tmp_path / "dense", tmp_path / "packed", sparsities=[90])
    for number, options in enumerate(({}, {"max_shard_size": 20_000})):
        out = tmp_path / f"sparse {number}"
        elsa_format.extract(tmp_path / "packed", out, level=1, layout="bitmask", **options)
        with pytest.raises(OSError, match=r"no file named model\.safetensors"):
            hf.LlamaForCausalLM.from_pretrained(out)
        model = hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA))
        load_level(model, out, 1)
        assert state(model) == by_hand(model, tmp_path / "packed", 1)


def test_weights_of_torch_save(tmp_path: Path) -> None:
    """Directories from before safetensors."""
    torch.manual_seed(0)
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA)).to(torch.bfloat16)
    model.config.save_pretrained(tmp_path / "dense")
    torch.save(model.state_dict(), tmp_path / "dense" / "pytorch_model.bin")
    report = elsa_format.pack(tmp_path / "dense", tmp_path / "packed", sparsities=[30])
    names = {path.name for path in (tmp_path / "packed").iterdir()}
    assert (names, report.notes) == ({"config.json", "model.safetensors"}, ())
    elsa_format.extract(tmp_path / "packed", tmp_path / "level", level=1)
    loaded = hf.LlamaForCausalLM.from_pretrained(tmp_path / "level", dtype="auto")
    assert state(loaded) == by_hand(loaded, tmp_path / "packed", 1)


def test_what_the_index_says_is_kept(tmp_path: Path) -> None:
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA))
    model.save_pretrained(tmp_path / "dense", max_shard_size="20kB")
    elsa_format.pack(tmp_path / "dense", tmp_path / "packed", sparsities=[90])
    elsa_format.extract(tmp_path / "packed", tmp_path / "level", level=1)
    for name in ("packed", "level"):
        index = json.loads((tmp_path / name / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_parameters"] == model.num_parameters()
        for file in set(index["weight_map"].values()):
            load_file(tmp_path / name / file)
            raw = (tmp_path / name / file).read_bytes()
            (length,) = struct.unpack("<Q", raw[:8])
            assert json.loads(raw[8 : 8 + length])["__metadata__"]["format"] == "pt"


def save_bin_shards(model: torch.nn.Module, folder: Path, variant: str = "") -> Path:
    """As `save_pretrained(safe_serialization=False)` of older versions; returns the index."""
    folder.mkdir(exist_ok=True)
    tensors = list(model.state_dict().items())
    weight_map = {}
    for number, own in enumerate((tensors[:3], tensors[3:5], tensors[5:]), 1):
        file = f"pytorch_model{variant}-{number:05}-of-00003.bin"
        torch.save(dict(own), folder / file)
        weight_map |= {name: file for name, _ in own}
    index = folder / f"pytorch_model.bin.index{variant}.json"
    about = {"total_size": sum(t.nbytes for _, t in tensors), "total_parameters": 7}
    index.write_text(json.dumps({"metadata": about, "weight_map": weight_map}))
    return index


@pytest.mark.parametrize("variant", ["", ".fp16"])
def test_shards_of_torch_save(variant: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA)).to(torch.bfloat16)
    model.config.save_pretrained(tmp_path / "dense")
    index = save_bin_shards(model, tmp_path / "dense", variant)
    report = elsa_format.pack(tmp_path / "dense", tmp_path / "packed", sparsities=[30, 20])
    assert report.notes == ()
    made = tmp_path / "packed" / f"model.safetensors.index{variant}.json"
    shards = {f"model{variant}-{n:05}-of-00003.safetensors" for n in (1, 2, 3)}
    names = {path.name for path in (tmp_path / "packed").iterdir()}
    assert names == {"config.json", made.name} | shards
    assert json.loads(made.read_text())["metadata"]["total_parameters"] == 7
    # By the index itself, and from one file: the same levels.
    elsa_format.pack(index, tmp_path / "by.index.json", sparsities=[90, 50], nest_all=False)
    torch.save(model.state_dict(), tmp_path / "one.bin")
    elsa_format.pack(tmp_path / "one.bin", tmp_path / "one.safetensors", sparsities=[90, 50])
    assert decode(tmp_path / "by.index.json", 1) == decode(tmp_path / "one.safetensors", 1)
    elsa_format.extract(tmp_path / "packed", tmp_path / "level", level=1)
    loaded = hf.LlamaForCausalLM.from_pretrained(
        tmp_path / "level", dtype="auto", variant=variant.lstrip(".") or None
    )
    assert state(loaded) == by_hand(loaded, tmp_path / "packed", 1)


def test_shards_of_torch_save_that_are_not_as_the_index_says(tmp_path: Path) -> None:
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA))
    index = save_bin_shards(model, tmp_path / "dense")
    good = json.loads(index.read_text())
    first, *_, last = good["weight_map"]
    shard = tmp_path / "dense" / good["weight_map"][first]

    def refused(error: type[elsa_format.ElsaError], words: str) -> None:
        with pytest.raises(error, match=words):
            elsa_format.pack(tmp_path / "dense", tmp_path / "out", sparsities=[90])
        assert not (tmp_path / "out").exists()

    def write(weight_map: dict[str, str]) -> None:
        index.write_text(json.dumps({"weight_map": weight_map}))

    write({n: f for n, f in good["weight_map"].items() if n != first})
    refused(elsa_format.InvalidIndex, f"'{first}' of .* is not in the index")
    write(good["weight_map"] | {"more": good["weight_map"][last]})
    refused(elsa_format.InvalidIndex, "'more' is not in")
    write(good["weight_map"] | {first: "../pytorch_model-00001-of-00003.bin"})
    refused(elsa_format.UnsafePath, "outside the directory")
    write(good["weight_map"])
    raw = shard.read_bytes()
    shard.write_bytes(raw[: len(raw) // 2])
    refused(elsa_format.InvalidCheckpoint, "not a PyTorch checkpoint")
    shard.write_bytes(b"GGUF" + bytes(100))
    refused(elsa_format.InvalidCheckpoint, "is not a file of the kind")
    torch.save({first: torch.nn.Linear(2, 2)}, shard)
    refused(elsa_format.InvalidCheckpoint, "holds more than tensors")
    shard.unlink()
    refused(elsa_format.InvalidIndex, "does not exist")
