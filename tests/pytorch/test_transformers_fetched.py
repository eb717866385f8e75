"""`from_pretrained` of a directory that elsa-fetch made: it holds the first bytes of a delivery."""

import gc
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from elsa_converters.transformers import ElsaConfig, use_level
from test_transformers import load, make, plain, state

import elsa_format
from elsa_format import ElsaError, Incomplete, InvalidOption


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files go."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def fetched(packed: Path, level: Any) -> Path:
    """What a device has of a packed directory."""
    ship, device = packed.parent / "ship", packed.parent / f"device {level}"
    if not ship.exists():
        elsa_format.ship(packed, ship)
    elsa_format.fetch(ship, device, level=level)
    return device


@pytest.mark.parametrize(
    ("name", "dtype", "options"),
    [
        ("llama", torch.float32, {}),
        ("llama", torch.bfloat16, {"shard": "20KB"}),
        ("mixtral", torch.float32, {}),
        ("mixtral", torch.bfloat16, {"shard": "20KB"}),
        ("vit", torch.float32, {}),
    ],
    ids=["llama", "llama-shards", "mixtral", "mixtral-shards", "vit"],
)
def test_the_level_that_was_fetched(
    name: str, dtype: torch.dtype, options: Any, tmp_path: Path, own_folder: Path
) -> None:
    packed = make(name, tmp_path, dtype, **options)
    device = fetched(packed, 2)
    config = device / "config.json"
    config.write_text(config.read_text().replace('"dtype"', '"other"'))  # as in old configs
    for level in (1, 2):
        model = load(name, device, quantization_config=ElsaConfig(level=level))
        assert state(model) == state(load(name, plain(packed, level, tmp_path)))
        assert not os.listdir(own_folder)
    use_level(model, 1)
    assert state(model) == state(load(name, tmp_path / "plain-1"))
    with pytest.raises(Incomplete):
        use_level(model, "dense")
    assert state(model) == state(load(name, tmp_path / "plain-1"))
    wide = load(name, device, dtype=torch.float64, quantization_config=ElsaConfig(level=1))
    assert state(wide) == state(load(name, tmp_path / "plain-1", dtype=torch.float64))


def test_auto_classes_and_folders(tmp_path: Path) -> None:
    packed = make("bert", tmp_path, torch.float32)
    expected = state(hf.BertModel.from_pretrained(plain(packed, 1, tmp_path)))
    device = fetched(packed, 1)
    config = ElsaConfig(level=1)
    assert state(hf.AutoModel.from_pretrained(device, quantization_config=config)) == expected
    found = hf.AutoModel.from_pretrained(
        tmp_path, subfolder=device.name, quantization_config=config
    )
    assert state(found) == expected


def test_a_level_in_the_config(tmp_path: Path) -> None:
    """For those who write it there themselves."""
    packed = make("bert", tmp_path, torch.float32)
    device = fetched(packed, 1)
    for folder in (packed, device):
        config = hf.BertConfig.from_pretrained(folder)
        config.quantization_config = ElsaConfig(level=1).to_dict()
        config.save_pretrained(folder)
        found = hf.BertForSequenceClassification.from_pretrained(folder)
        (folder / "config.json").write_bytes((tmp_path / "dense" / "config.json").read_bytes())
        assert state(found) == state(load("bert", plain(packed, 1, tmp_path / folder.name)))


@pytest.mark.parametrize("layout", ["bitmask", "csr"])
def test_a_sparse_layout_says_what_to_run(layout: str, tmp_path: Path) -> None:
    packed = make("llama", tmp_path, torch.float32)
    level = tmp_path / "level"
    elsa_format.extract(packed, level, level=1, layout=layout)
    with pytest.raises(InvalidOption, match=f"elsa-extract {level} --layout dense -o OUT"):
        load("llama", level, quantization_config=ElsaConfig(level=1))
    with pytest.raises(OSError, match=r"no file named model\.fp16\.safetensors"):
        load("llama", level, variant="fp16", quantization_config=ElsaConfig(level=1))
    elsa_format.extract(level, tmp_path / "dense again", layout="dense")
    assert state(load("llama", tmp_path / "dense again")) == state(
        load("llama", plain(packed, 1, tmp_path))
    )


def test_what_cannot_be_loaded(tmp_path: Path, own_folder: Path) -> None:
    packed = make("llama", tmp_path, torch.float32)
    device = fetched(packed, 1)
    with pytest.raises(InvalidOption, match=f"run: elsa-extract {device} --level N -o OUT"):
        load("llama", device)
    with pytest.raises(Incomplete, match="has level 1"):
        load("llama", device, quantization_config=ElsaConfig(level=2))
    with pytest.raises(OSError, match=r"no file named model\.fp16\.safetensors"):
        load("llama", device, variant="fp16", quantization_config=ElsaConfig(level=1))
    with pytest.raises(OSError, match="no file named"):
        load("llama", own_folder, config=hf.LlamaConfig(), quantization_config=ElsaConfig(level=1))
    places = {"model.embed_tokens": "cpu", "model.layers": "cpu", "model.norm": "disk"}
    places |= {"model.rotary_emb": "cpu", "lm_head": "cpu"}
    with pytest.raises(ElsaError, match=r"is offloaded, .* run: elsa-extract"):
        load(
            "llama",
            device,
            quantization_config=ElsaConfig(level=1),
            device_map=places,
            offload_folder=str(tmp_path / "offload"),
        )
    weights = device / "model.ship.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-5] ^= 64
    weights.write_bytes(raw)
    with pytest.raises(ElsaError):
        load("llama", device, quantization_config=ElsaConfig(level=1))
    gc.collect()
    assert not os.listdir(own_folder)
