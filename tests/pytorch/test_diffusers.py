"""Models of diffusers, by load_level."""

from pathlib import Path

import elsa_converters.torch as elsa_torch
import pytest
from decoder import content, decode
from diffusers import UNet2DModel
from pages import ROOT, blocks

import elsa_format


def test_a_level_of_a_unet(tmp_path: Path) -> None:
    sizes = {"sample_size": 8, "block_out_channels": (8, 16), "norm_num_groups": 4}
    blocks = {
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
    }
    UNet2DModel(**sizes, **blocks, layers_per_block=1).save_pretrained(tmp_path / "dense")
    packed = tmp_path / "packed"
    UNet2DModel.from_pretrained(tmp_path / "dense").save_config(packed)
    path = packed / "diffusion_pytorch_model.safetensors"
    elsa_format.pack(tmp_path / "dense" / path.name, path, sparsities=[80, 50], scope="uniform")

    model = UNet2DModel.from_pretrained(packed)  # dense, as ever
    assert {n: content(t) for n, t in model.state_dict().items()} == decode(path, None)
    elsa_torch.load_level(model, packed, level=1)
    assert {n: content(t) for n, t in model.state_dict().items()} == decode(path, 1)
    with elsa_torch.attach(model, packed, level=1) as levels:
        levels.use(2)
    assert {n: content(t) for n, t in model.state_dict().items()} == decode(path, 2)


def test_the_fragment_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/pytorch.md, as written."""
    monkeypatch.chdir(tmp_path)
    sizes = {"sample_size": 8, "block_out_channels": (8, 16), "norm_num_groups": 4}
    kinds = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
    UNet2DModel(**sizes, **kinds, layers_per_block=1).save_pretrained("dense")
    elsa_format.pack("dense", "unet-elsa", sparsities=[90, 50])
    elsa_format.extract("unet-elsa", "unet-90", level=1)
    page = blocks(ROOT / "docs" / "pytorch.md")
    (code,) = [block.code for block in page if block.kind == "py" and "unet" in block.code]
    names = {"UNet2DModel": UNet2DModel, "load_level": elsa_torch.load_level}
    exec(code, names)
    expected = decode(Path("unet-elsa/diffusion_pytorch_model.safetensors"), 2)
    assert {n: content(t) for n, t in names["unet"].state_dict().items()} == expected
