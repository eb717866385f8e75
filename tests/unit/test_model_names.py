"""What is told of a model's tensors from their names and shapes."""

import io

import numpy as np
import pytest
from internals import empty_layers, input_axes, layer_kind

import elsa_format


@pytest.mark.parametrize(
    ("name", "shape", "kind"),
    [
        ("model.embed_tokens.weight", (1000, 64), "embedding"),
        ("transformer.wte.weight", (1000, 64), "embedding"),
        ("shared.weight", (1000, 64), "embedding"),
        ("bert.embeddings.token_type_embeddings.weight", (2, 64), "embedding"),
        ("vit.embeddings.cls_token", (1, 1, 64), "vector"),
        ("patch_embed.proj.weight", (64, 3, 16, 16), "embedding"),
        ("transformer.wpe.weight", (512, 64), "position"),
        ("pos_embed", (1, 197, 64), "position"),
        ("block.0.SelfAttention.relative_attention_bias.weight", (32, 8), "position"),
        ("lm_head.weight", (1000, 64), "output head"),
        ("cls.predictions.decoder.weight", (1000, 64), "output head"),
        ("score.weight", (2, 64), "output head"),
        ("fc.weight", (10, 512), "output head"),
        ("Dense_0/head/kernel", (512, 10), "output head"),
        ("output.weight", (1000, 64), "output head"),
        ("projection.weight", (1000, 64), "output head"),  # by the vocabulary
        ("model.layers.0.block_sparse_moe.gate.weight", (8, 64), "router"),
        ("model.layers.0.mlp.router.weight", (32, 64), "router"),
        ("encoder.block.1.layer.1.mlp.router.classifier.weight", (8, 64), "router"),
        ("backbone.layers.0.mixer.A_log", (128, 16), "state space"),
        ("blocks.0.norm.weight", (8, 64), "norm"),
        ("rwkv.blocks.0.attention.time_mix_key", (1, 1, 64), "vector"),
        ("model.norm.weight", (64,), "vector"),
        ("scale", (), "vector"),
        ("model.layers.0.self_attn.q_proj.weight", (64, 64), None),
        ("model.layers.0.mlp.gate_proj.weight", (172, 64), None),
        ("model.layers.0.mlp.experts.3.w1.weight", (172, 64), None),
        ("blocks.0.gate.weight", (64, 64), None),  # a gate, but no router
        ("bert.encoder.layer.0.attention.output.dense.weight", (64, 64), None),
        ("transformer.h.0.mlp.c_fc.weight", (64, 256), None),
        ("layer1.0.conv1.weight", (64, 64, 3, 3), None),
        ("layer4.fc.weight", (10, 64), None),  # not that of the model
        ("größe.weight", (64, 64), None),
    ],
)
def test_what_a_tensor_is_for(name: str, shape: tuple[int, ...], kind: str | None) -> None:
    assert layer_kind(name, shape, vocabulary=1000) == kind


def test_inputs_of_layers() -> None:
    shapes = {
        "h.0.attn.c_attn.weight": (64, 192),
        "h.0.attn.c_attn.bias": (192,),
        "h.0.attn.c_proj.weight": (64, 64),  # square, but of a kind that is told elsewhere
        "h.0.attn.c_proj.bias": (64,),
        "h.0.mlp.c_proj.weight": (256, 64),
        "h.0.mlp.c_proj.bias": (64,),
        "linear.weight": (10, 64),
        "linear.bias": (10,),
        "alone.weight": (64, 64),
        "up.weight": (32, 16, 2, 2),  # a transposed convolution
        "up.bias": (16,),
        "conv.weight": (8, 3, 3, 3),
        "dense/kernel": (64, 10),
        "conv/kernel": (3, 3, 8, 16),
        "kernel": (4, 4),
        "weight": (6, 7),
        "odd.weight": (6, 7),
        "odd.bias": (5,),
        "scalar": (),
    }
    assert input_axes(shapes) == {
        "h.0.attn.c_attn.weight": 0,
        "h.0.attn.c_proj.weight": 0,
        "h.0.mlp.c_proj.weight": 0,
        "linear.weight": 1,
        "alone.weight": 1,
        "up.weight": 0,
        "conv.weight": 1,
        "dense/kernel": 0,
        "conv/kernel": 2,
        "kernel": 0,
        "weight": 1,
        "odd.weight": 1,
    }


def test_empty_layers() -> None:
    kept = {"big": [900, 900], "none": [0, 50], "thin": [1, 50], "empty": [0, 0]}
    sizes = {"big": 1000, "none": 100, "thin": 100, "empty": 0}
    advice = "use another scope"
    notes = empty_layers(kept, sizes, ["90%", "50%"], advice=f"; {advice}")
    assert notes == (
        f"level 90% keeps no weight of 1 of 3 tensors ('none'); {advice}",
        f"level 90% keeps less than a tenth as much of 1 of 3 tensors ('thin'); {advice}",
    )
    assert empty_layers({}, {}, ["90%"]) == ()


def test_scales_that_differ_starve_a_global_scope() -> None:
    rng = np.random.default_rng(0)
    tensors = {
        f"layer{i}": (rng.standard_normal((50, 50)) * 10.0**-i).astype(np.float32) for i in range(3)
    }
    sizes = {name: tensor.size for name, tensor in tensors.items()}
    for scope, starved in (("global", True), ("uniform", False)):
        report = elsa_format.pack(tensors, io.BytesIO(), sparsities=[90, 50], scope=scope)
        names = [level.name for level in report.profile.levels]
        assert bool(empty_layers(report.profile.nested, sizes, names)) is starved
