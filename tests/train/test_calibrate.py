"""A calibrated JAX network goes into a file, and comes out of it as it was measured."""

import io
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from internals import BadData, BadRecipe, TrainError, spread, tensors_of

import elsa_format as elsa
from elsa_train import calibrate, restore

LEVELS = [75, 50]


def inputs(batches=8, count=16, shape=(12,), seed=0):
    """Samples that a few causes explain, so that weights can stand in for others."""
    rng = np.random.default_rng(seed)
    causes = np.random.default_rng(1).normal(size=(5, int(np.prod(shape))))
    x = rng.normal(size=(batches * count, 5)) @ causes
    return (x + 0.3 * rng.normal(size=x.shape)).astype(np.float32).reshape(batches, count, *shape)


def drawn(model, x, *rest):
    """Variables of a model, drawn at once; variances are positive."""
    rng = np.random.default_rng(2)
    shapes = jax.eval_shape(model.init, jax.random.key(0), x, *rest)

    def draw(path, like):
        found = rng.normal(size=like.shape) / np.sqrt(np.prod(like.shape[:-1], initial=1.0))
        name = jax.tree_util.keystr(path[-1:])
        found = {"'var'": 0.5 + found**2, "'scale'": 1 + 0.3 * found}.get(name[1:-1], found)
        return np.asarray(found, like.dtype)

    return jax.tree_util.tree_map_with_path(draw, shapes)


class Mlp(nn.Module):
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x):
        types = {"dtype": self.dtype, "param_dtype": self.dtype}
        x = nn.relu(nn.Dense(20, **types)(x))
        x = nn.relu(nn.Dense(16, use_bias=False, **types)(x))
        return nn.Dense(6, **types)(x)


class Cnn(nn.Module):
    """Convolutions of every kind, and a network's two ways to normalise."""

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.Conv(8, (3, 3), strides=2, use_bias=False)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train)(x))
        x = nn.Conv(8, (3, 3), feature_group_count=8, padding="CIRCULAR")(x)
        x = nn.Conv(12, (3, 3), kernel_dilation=2, feature_group_count=2, padding="VALID")(x)
        x = nn.BatchNorm(use_running_average=not train)(x)
        return nn.Dense(6)(nn.LayerNorm()(nn.relu(x).mean((1, 2))))


class Encoder(nn.Module):
    """Tokens with padding, attention, an embedding that is the head, too."""

    @nn.compact
    def __call__(self, batch):
        embed = nn.Embed(30, 12)
        x = embed(batch["tokens"])
        real = batch["real"]
        attention = nn.MultiHeadDotProductAttention(3)
        x = x + attention(nn.LayerNorm()(x), mask=nn.make_attention_mask(real, real))
        x = x + nn.Dense(12)(nn.gelu(nn.Dense(24)(nn.LayerNorm()(x))))
        return embed.attend(x)


class Module(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([nnx.Linear(12, 12, rngs=rngs), nnx.Linear(12, 6, rngs=rngs)])
        self.norm = nnx.BatchNorm(12, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.layers[1](self.drop(nnx.relu(self.norm(self.layers[0](x)))))


def tokens():
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, 8, size=(6, 8, 1))
    parts = zip(rng.integers(0, 30, size=(6, 8, 7)), np.arange(7) < lengths, strict=True)
    return [{"tokens": tokens, "real": real} for tokens, real in parts]


def padded(batch):
    return ~batch["real"]


def network(kind):
    """A function, its variables, batches, and what else calibration is told."""
    x = inputs()
    if kind == "mlp":
        model = Mlp()
        return model.apply, drawn(model, x[0]), x, {"classes": "logits"}
    if kind == "bfloat16":
        model = Mlp(jnp.bfloat16)
        return jax.jit(model.apply), drawn(model, x[0]), [*x, x[0, :5]], {}
    if kind == "cnn":
        model, x = Cnn(), inputs(shape=(12, 11, 3))
        return model.apply, drawn(model, x[0]), x, {}
    if kind == "encoder":
        model, batches = Encoder(), tokens()
        return model.apply, drawn(model, batches[0]), batches, {"padding": padded}
    if kind == "nnx":
        module = Module()
        module.eval()
        return (lambda module, x: module(x)), module, x, {}
    assert kind == "tree"
    rng = np.random.default_rng(0)
    tree = {"a": rng.normal(size=(12, 10)), "b": [rng.normal(size=10), rng.normal(size=(10, 4))]}

    def apply(tree, x):
        return {"y": jnp.tanh(x @ tree["a"] + tree["b"][0]) @ tree["b"][1]}

    return apply, tree, x, {}


def relative_error(apply, variables, levels, batches, told):
    """How far a network's outputs are from the original's."""
    lost = size = 0.0
    for batch in batches:
        one, other = (
            np.asarray(*jax.tree.leaves(apply(v, batch)), np.float64) for v in (variables, levels)
        )
        if "padding" in told:
            one, other = one[~told["padding"](batch)], other[~told["padding"](batch)]
        lost, size = lost + np.square(one - other).sum(), size + np.square(one).sum()
    return np.sqrt(lost / size)


@pytest.mark.parametrize("kind", ["mlp", "bfloat16", "cnn", "encoder", "nnx", "tree"])
def test_every_level_is_read_back_as_it_was_measured(kind, tmp_path):
    apply, variables, batches, told = network(kind)
    original = {name: np.array(array) for name, array in tensors_of(variables).items()}
    report = calibrate(apply, variables, batches, tmp_path / "net", sparsities=LEVELS, **told)
    held = [batches[at] for at in spread(range(len(batches)), Fraction(1, 8))]
    apply = jax.jit(apply) if kind != "nnx" else nnx.jit(apply)
    with elsa.open(tmp_path / "net") as file:
        every = sum(file.tensor(name).size for name in file.nested)
        assert [level.nonzero for level in file.levels] == [round(every / 4), round(every / 2)]
        assert sorted(file.nested) == sorted(report.nested)
        recorded = [*(level.metrics for level in file.levels), file.profile.dense_metrics]
        before = None
        for level, metrics in zip((1, 2, "dense"), recorded, strict=True):
            tensors = file.load(level)
            found = relative_error(apply, variables, restore(variables, tensors), held, told)
            # bfloat16: values are rounded where equations end, not where compiled functions do.
            tolerance = 0.05 if kind == "bfloat16" else 1e-4
            assert metrics["relative_error"] == pytest.approx(found, rel=tolerance)
            for name in file.nested:
                kept = tensors[name] != 0
                assert before is None or kept[before[name]].all()
            before = {name: tensors[name] != 0 for name in file.nested}
            for name, array in tensors.items():
                assert (array.dtype, array.shape) == (original[name].dtype, original[name].shape)
                if name not in (*file.nested, *file.per_level):
                    assert np.array_equal(array, original[name])
    errors = [metrics["relative_error"] for metrics in recorded]
    assert errors == sorted(errors, reverse=True)
    assert all(np.array_equal(tensors_of(variables)[n], array) for n, array in original.items())


def test_each_level_has_its_own_batch_norm(tmp_path):
    """A mean and a scale, a depthwise kernel, and a bias where no norm follows."""
    apply, variables, batches, _ = network("cnn")
    calibrate(apply, variables, batches, tmp_path / "net", sparsities=LEVELS)
    with elsa.open(tmp_path / "net") as file:
        assert sorted(file.per_level) == [
            *("BatchNorm_0/mean", "BatchNorm_0/scale", "BatchNorm_1/mean", "BatchNorm_1/scale"),
            *("Conv_1/bias", "Conv_1/kernel", "Dense_0/bias"),
        ]
        assert sorted(file.nested) == ["Conv_0/kernel", "Conv_2/kernel", "Dense_0/kernel"]
        for name in file.per_level:
            one, two, dense = (file.tensor(name, level) for level in (1, 2, "dense"))
            assert not np.array_equal(one, two)
            if name in ("Conv_1/kernel", "BatchNorm_0/scale", "BatchNorm_1/scale"):
                assert np.array_equal(dense, tensors_of(variables)[name])


def test_patterns_lie_along_the_inputs(tmp_path):
    x = inputs(shape=(6, 6, 8))

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.relu(nn.Conv(8, (3, 3), feature_group_count=2)(x)).mean((1, 2))
            return nn.Dense(5, name="uneven")(nn.Dense(6)(x))

    model = Net()
    report = calibrate(
        model.apply, drawn(model, x[0]), x, tmp_path / "net", sparsities=["1:4", "2:4"]
    )
    assert "uneven/kernel" in report.shared
    assert report.shared["uneven/kernel"] == "6 inputs, no multiple of 4"
    with elsa.open(tmp_path / "net") as file:
        assert sorted(file.nested) == ["Conv_0/kernel", "Dense_0/kernel"]
        for level in (1, 2):
            for name in file.nested:
                kept = file.tensor(name, level) != 0  # (…, inputs, outputs)
                groups = np.moveaxis(kept, -2, -1).reshape(-1, 4)
                assert (groups.sum(-1) == level).all()


def test_a_linear_network_is_near_the_best_for_its_masks(tmp_path):
    x = inputs(16, 32)
    rng = np.random.default_rng(3)
    variables = {"w": rng.normal(size=(12, 6)).astype(np.float32), "b": np.zeros(6, np.float32)}

    def apply(variables, x):
        return x @ variables["w"] + variables["b"]

    calibrate(apply, variables, x, tmp_path / "net", sparsities=LEVELS, favour="sparse")
    fitted = [at for at in range(16) if at not in spread(range(16), Fraction(1, 8))]
    x = x[fitted].reshape(-1, 12).astype(np.float64)
    y = apply(variables, x)
    with elsa.open(tmp_path / "net") as file:
        for level, limit in ((1, 1.3), (2, 2.5)):
            found = apply(file.load(level), x)
            best = found.copy()
            kept = file.tensor("w", level) != 0
            for row in range(6):  # least squares over what the level keeps
                columns = np.column_stack([x[:, kept[:, row]], np.ones(len(x))])
                best[:, row] = columns @ np.linalg.lstsq(columns, y[:, row], rcond=None)[0]
            lost, least = (np.square(y - other).sum() for other in (found, best))
            assert least <= lost < limit * least + 1e-3 * np.square(y).sum()
            np.testing.assert_allclose(found.mean(0), y.mean(0), atol=1e-5)


def test_levels_beat_magnitudes(tmp_path):
    apply, variables, batches, told = network("mlp")
    calibrate(apply, variables, batches, tmp_path / "net", sparsities=LEVELS, **told)
    tensors = {name: np.asarray(array) for name, array in tensors_of(variables).items()}
    with elsa.open(tmp_path / "net") as file:
        nested = list(file.nested)
    elsa.pack(tensors, tmp_path / "magnitudes", sparsities=LEVELS, include=nested)
    new = inputs(seed=9)
    for level, least in ((1, 1.5), (2, 1.5)):
        errors = []
        for name in ("net", "magnitudes"):
            with elsa.open(tmp_path / name) as file:
                sparse = restore(variables, file.load(level))
            errors.append(relative_error(apply, variables, sparse, new, told))
        assert least * errors[0] < errors[1]


def test_exact_keeps_the_dense_network_but_for_the_counters(tmp_path):
    apply, variables, batches, told = network("cnn")
    calibrate(
        apply, variables, batches, tmp_path / "net", sparsities=LEVELS, keep_dense="exact", **told
    )
    with elsa.open(tmp_path / "net") as file:
        found, bits = file.load("dense"), file.bits
        for name, array in tensors_of(variables).items():
            words, own = found[name].view(np.uint32), np.asarray(array).view(np.uint32)
            if name in file.nested:  # the nearest number with the counter
                assert (np.abs(words.astype(np.int64) - own) <= 1 << bits - 1).all()
            else:
                assert np.array_equal(words, own)


def test_the_same_samples_give_the_same_bytes(tmp_path):
    apply, variables, batches, told = network("cnn")
    given = {"sparsities": LEVELS, **told}
    calibrate(apply, variables, batches, tmp_path / "net", threads=1, **given)
    expected = (tmp_path / "net").read_bytes()
    for other in ({"threads": 2}, {"max_memory": 1000}):
        stream = io.BytesIO()
        calibrate(apply, variables, iter(batches), stream, **given, **other)
        assert stream.getvalue() == expected


def test_activations_go_to_a_file_beyond_the_limit(tmp_path, monkeypatch):
    apply, variables, batches, told = network("mlp")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    calibrate(apply, variables, batches, tmp_path / "net", sparsities=LEVELS, **told)
    given = {"sparsities": LEVELS, "max_memory": 1, **told}
    with pytest.raises(FileNotFoundError):
        calibrate(apply, variables, batches, tmp_path / "other", **given)


@pytest.mark.parametrize("after", [1, 4, 6])
@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_an_interruption_leaves_nothing(after, error, tmp_path):
    apply, variables, batches, told = network("mlp")
    calls = []

    def interrupt(done, total):
        calls.append(done)
        if len(calls) == after:
            raise error

    given = {"sparsities": LEVELS, "progress": interrupt, **told}
    with pytest.raises(error):
        calibrate(apply, variables, batches, tmp_path / "net", max_memory=1000, **given)
    assert list(tmp_path.iterdir()) == []


# --- Refusals ------------------------------------------------------------------------------------


def fails(variables, x):
    raise RuntimeError("no\nsuch thing")


def constant(variables, x):
    return variables["params"]["Dense_0"]["kernel"].sum() + 0 * x


def nan(where):
    x = inputs()
    x[where] = np.nan
    return x


def inf():
    x = inputs()
    x[7, 3] = np.inf
    return x


@pytest.mark.parametrize(
    ("changed", "error", "problem"),
    [
        ({"batches": []}, BadData, "no batches: calibration needs samples"),
        ({"batches": inputs(1)}, elsa.ElsaError, "16 samples in 1 batches: expected at least 4"),
        ({"samples": 3}, elsa.ElsaError, "expected at least 4 in 2"),
        ({"batches": {"x": inputs()}}, BadData, "found one batch, expected several"),
        ({"batches": [1.0, 2.0]}, BadData, r"batch 0: found \(\); expected samples along"),
        ({"batches": [inputs()[0], (inputs()[0], np.ones(3))]}, BadData, r"batch 1: found \(16,"),
        ({"batches": nan((5, 3))}, BadData, "^batch 5: sample 3 holds NaN$"),
        ({"batches": inf()}, BadData, "^batch 7: the outputs hold NaN or infinity$"),
        ({"batches": inputs(shape=(11,))}, BadRecipe, r"fails for batch 0: .*\(12, 20\)"),
        ({"batches": [inputs()[0], inputs(shape=(3, 11))[0]]}, BadRecipe, "fails for batch 1"),
        ({"apply": fails}, BadRecipe, r"^apply\(variables, batch\) fails for batch 0: no$"),
        ({"apply": constant}, BadRecipe, "no layer can be nested: 'Dense_0/kernel': goes into red"),
        ({"exclude": "*"}, BadRecipe, "no layer can be nested: 'Dense_0/kernel': excluded"),
        ({"include": "Dense_0/bias"}, BadRecipe, "no layer can be nested.*: not included"),
        ({"include": "Dense_7/*"}, elsa.NoSuchTensor, r"no tensor matches 'Dense_7/\*'"),
        ({"exclude": ["Dense_0/*", "x"]}, elsa.NoSuchTensor, "no tensor matches 'x'"),
        ({"classes": "logit"}, BadRecipe, "classes 'logit': expected 'logits' or"),
        (
            {"padding": lambda x: np.ones(3, bool)},
            BadData,
            r"padding\(batch 0\): found bool \(3,\)",
        ),
        ({"padding": lambda x: np.ones(16)}, BadData, r"found float64 \(16,\); expected booleans"),
        ({"variables": {"w": jax.random.key(0)}}, TrainError, "'w' is a random key"),
        ({"variables": {"a/b": np.ones(1), "a": {"b": np.ones(1)}}}, TrainError, "both called"),
        ({"sparsities": [50, 75]}, ValueError, "50"),
        ({"sparsities": ["1:7"]}, BadRecipe, "'Dense_0/kernel': 12 inputs, no multiple of 7"),
        ({"threads": 0}, ValueError, "threads 0, expected a whole number from 1"),
    ],
)
def test_refusals_are_one_line_before_any_work(changed, error, problem, tmp_path):
    apply, variables, batches, _ = network("mlp")
    given = {"apply": apply, "variables": variables, "batches": batches, "sparsities": LEVELS}
    given |= changed
    calls = []
    with pytest.raises(error, match=problem) as raised:
        calibrate(**given, out=tmp_path / "net", progress=lambda *done: calls.append(done))
    assert "\n" not in str(raised.value)
    assert calls == []
    assert list(tmp_path.iterdir()) == []


def test_networks_in_training_are_refused():
    model, x = Cnn(), inputs(shape=(12, 11, 3))
    variables = drawn(model, x[0])

    def train(variables, x):
        return model.apply(variables, x, train=True, mutable=["batch_stats"])[0]

    with pytest.raises(BadRecipe, match="apply uses no running averages of batch norm"):
        calibrate(train, variables, x, io.BytesIO(), sparsities=LEVELS)
    module = Module()
    for problem in ("no running averages", "draws random numbers"):
        with pytest.raises(BadRecipe, match=problem):
            calibrate(lambda m, x: m(x), module, inputs(), io.BytesIO(), sparsities=LEVELS)
        module.norm.use_running_average = True


def test_files_that_exist_stay(tmp_path):
    apply, variables, batches, _ = network("mlp")
    (tmp_path / "net").write_bytes(b"mine")
    with pytest.raises(elsa.OutputExists):
        calibrate(apply, variables, batches, tmp_path / "net", sparsities=LEVELS)
    assert (tmp_path / "net").read_bytes() == b"mine"
    calibrate(apply, variables, batches, tmp_path / "net", sparsities=LEVELS, force=True)
    elsa.verify(tmp_path / "net")
