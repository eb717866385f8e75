"""flax models become templates under their parameters' names."""

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import onnx
import onnx_models as m
import pytest
from elsa_converters.flax_onnx import template_from_flax
from elsa_converters.onnx import UnsupportedOnnx, all_levels_session, export, export_all_levels
from flax import linen as nn
from flax import nnx

import elsa_format
from elsa_format.cli import install_command


class Block(nn.Module):
    """A residual block with batch norm, pooled with positional arguments."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        x = nn.Conv(8, (3, 3), name="stem")(x)
        x = nn.max_pool(x, (2, 2), (2, 2))
        y = nn.BatchNorm(not train, name="norm")(nn.Conv(8, (3, 3), use_bias=False, name="conv")(x))
        x = x + nn.relu(y)
        x = jnp.max(x, axis=(1, 2))
        return nn.Dense(5, name="head")(x)


class Net(nnx.Module):
    """The same in nnx, smaller."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(12, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.second = nnx.Linear(16, 3, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.second(self.drop(nnx.relu(self.norm(self.first(x)))))


def flatten(*trees: Any) -> dict[str, Any]:
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf)
        for tree in trees
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def fill(tree: Any, leaves: dict[str, Any]) -> Any:
    return jax.tree_util.tree_map_with_path(
        lambda path, _: jnp.asarray(
            leaves[jax.tree_util.keystr(path, simple=True, separator="/")], jnp.float32
        ),
        tree,
    )


def write(path: Path, params: dict[str, Any], state: dict[str, Any], dtype: Any = None) -> None:
    """What a trainer writes: every parameter nested, statistics per level."""
    rng = np.random.default_rng(0)
    tensors = {}
    for name, array in params.items():
        noisy = (array + 0.05 * rng.standard_normal(array.shape)).astype(dtype or np.float32)
        counters = rng.integers(0, 4, array.shape).astype(np.uint8)
        tensors[name] = elsa_format.embed_counters(noisy, counters, 2)
    per_level = {
        name: [array + np.float32(0.1 * t) for t in (1, 2, 3)] for name, array in state.items()
    }
    elsa_format.write(
        path,
        tensors | state,
        bits=2,
        levels=[elsa_format.LevelSpec(f"level {t}") for t in (1, 2, 3)],
        nested=list(params),
        per_level=per_level,
    )


@pytest.mark.parametrize("dtype", [None, ml_dtypes.bfloat16])
def test_linen(tmp_path: Path, dtype: Any) -> None:
    model, x = Block(), m.weights(3, 16, 16, 3)
    variables = model.init(jax.random.key(1), x)
    params, state = flatten(variables["params"]), flatten(variables["batch_stats"])
    elsa, template = tmp_path / "net.safetensors", tmp_path / "net.onnx"
    write(elsa, params, state, dtype)
    template_from_flax(model, x[:2], elsa, template, train=False)
    onnx.checker.check_model(template)
    export_all_levels(elsa, template, tmp_path / "levels.onnx")
    onnx.checker.check_model(tmp_path / "levels.onnx")
    for level in ("dense", 1, 2, 3):
        with elsa_format.open(elsa) as file:
            leaves = file.load(level)
        filled = {part: fill(tree, leaves) for part, tree in variables.items()}
        expected = [np.asarray(model.apply(filled, x))]
        path = tmp_path / f"{level}.onnx"
        export(elsa, template, path, level=level)
        onnx.checker.check_model(path)
        found = m.run(path, {"x": x})
        m.assert_near(found, expected, 1e-5)
        m.assert_same(
            m.run(all_levels_session(tmp_path / "levels.onnx", level=level), {"x": x}), found
        )
        if dtype is None:
            export(elsa, template, tmp_path / "folded.onnx", level=level, fold=True, force=True)
            ops = {node.op_type for node in onnx.load(tmp_path / "folded.onnx").graph.node}
            assert "BatchNormalization" not in ops
            m.assert_near(m.run(tmp_path / "folded.onnx", {"x": x}), expected, 1e-5)


def test_nnx(tmp_path: Path) -> None:
    model, x = Net(), m.weights(4, 12)
    _, params, state, _ = nnx.split(model, nnx.Param, nnx.BatchStat, ...)
    named = [flatten(nnx.to_pure_dict(part)) for part in (params, state)]
    assert set(named[1]) == {"norm/mean", "norm/var"}
    elsa, template = tmp_path / "net.safetensors", tmp_path / "net.onnx"
    write(elsa, *named)
    template_from_flax(model, x, elsa, template)
    export(elsa, template, tmp_path / "two.onnx", level=2)
    with elsa_format.open(elsa) as file:
        leaves = file.load(2)
    for part in (params, state):
        pure = fill(nnx.to_pure_dict(part), leaves)
        nnx.replace_by_pure_dict(part, pure)
        nnx.update(model, part)
    model.eval()  # the template is that of a model in use, though this one was training
    m.assert_near(m.run(tmp_path / "two.onnx", {"x": x}), [np.asarray(model(x))], 1e-5)


def test_a_transformer_has_the_same_loss(tmp_path: Path) -> None:
    gpt = pytest.importorskip("elsa_train.models").GPT(width=32, layers=1, context=16)
    text = np.random.default_rng(0).integers(0, 256, (3, 17)).astype(np.int32)
    variables = jax.jit(gpt.init)(jax.random.key(1), text[:, :-1])
    elsa, template = tmp_path / "gpt.safetensors", tmp_path / "gpt.onnx"
    write(elsa, flatten(variables["params"]), {})
    template_from_flax(gpt, text[:1, :-1], elsa, template, train=False)
    onnx.checker.check_model(template)
    for level in (1, "dense"):
        with elsa_format.open(elsa) as file:
            filled = {"params": fill(variables["params"], file.load(level))}
        expected = jax.jit(gpt.apply)(filled, text[:, :-1])
        export(elsa, template, tmp_path / f"{level}.onnx", level=level)
        (found,) = m.run(tmp_path / f"{level}.onnx", {"x": text[:, :-1]})
        m.assert_near([found], [np.asarray(expected)], 1e-5)
        losses = [
            -float(np.mean(np.take_along_axis(jax.nn.log_softmax(logits), text[:, 1:, None], -1)))
            for logits in (found, expected)
        ]
        assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_a_file_of_another_model_is_refused(tmp_path: Path) -> None:
    model, x = Block(), m.weights(2, 16, 16, 3)
    elsa = tmp_path / "net.safetensors"
    elsa_format.pack({"other": m.weights(4, 4)}, elsa, sparsities=[50])
    with pytest.raises(elsa_format.FormatError, match="other"):
        template_from_flax(model, x, elsa, tmp_path / "net.onnx")
    assert not (tmp_path / "net.onnx").exists()


def test_what_cannot_be_converted_is_said(tmp_path: Path) -> None:
    class Odd(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return nn.Dense(4, name="d")(jnp.linalg.eigh(x @ x.T)[0][None])

    elsa = tmp_path / "net.safetensors"
    elsa_format.pack({"d/kernel": m.weights(4, 4), "d/bias": m.weights(4)}, elsa, sparsities=[50])
    with pytest.raises(UnsupportedOnnx, match="jax2onnx"):
        template_from_flax(Odd(), m.weights(4, 4), elsa, tmp_path / "net.onnx", batch=None)


def test_without_jax2onnx_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "jax2onnx", None)
    with pytest.raises(elsa_format.MissingExtra) as caught:
        template_from_flax(nn.Dense(4), m.weights(1, 4), tmp_path / "net", tmp_path / "net.onnx")
    assert str(caught.value).endswith(f"needs jax2onnx; run: {install_command('flax-onnx')}")
