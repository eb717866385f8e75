"""Which layers calibration finds in the equations of a network, and the columns they multiply."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from internals import find_head, find_layers, tensors_of, trace
from jax import lax

CONVOLUTIONS = {
    "1-d": ((9,), (3,), {}),
    "same, strides": ((9, 8), (3, 2), {"strides": (2, 3)}),
    "valid": ((9, 8), (3, 2), {"padding": "VALID", "strides": (1, 2)}),
    "causal": ((9,), (3,), {"padding": "CAUSAL", "kernel_dilation": 2}),
    "circular": ((6, 5), (3, 3), {"padding": "CIRCULAR"}),
    "dilated": ((9, 8), (3, 3), {"kernel_dilation": (1, 2)}),
    "padded": ((5, 6), (3, 3), {"padding": ((2, 0), (1, 3))}),
    "spread": ((4, 5), (3, 3), {"input_dilation": (2, 1), "padding": ((1, 1), (0, 2))}),
    "grouped": ((6, 5), (3, 3), {"feature_group_count": 2}),
    "depthwise": ((6, 5), (3, 3), {"feature_group_count": 4}),
    "3-d": ((4, 5, 3), (2, 3, 2), {"strides": (1, 2, 1)}),
}


def drawn(model, x):
    """Variables of a model, drawn at once."""
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(model.init, jax.random.key(0), x)
    return jax.tree.map(lambda s: rng.normal(size=s.shape).astype(s.dtype), shapes)


def layers_of(apply, variables, batch):
    """The layers, why other tensors are left, the program, and the tensors as numpy arrays."""
    tensors = {name: np.asarray(array) for name, array in tensors_of(variables).items()}
    tree = jax.tree.structure(variables)

    def call(tensors, batch):
        return jax.tree.leaves(apply(jax.tree.unflatten(tree, [tensors[n] for n in names]), batch))

    names = list(tensors)
    program = trace(call, tensors, batch)
    found, left = find_layers(program, {name: array.dtype for name, array in tensors.items()})
    return found, left, program, tensors


def check_columns(apply, variables, x):
    """The weight, times all columns of the inputs, is what the network gives."""
    (one,), _, program, tensors = layers_of(apply, variables, x)
    first, _ = program.stretches(program.stages([one.product.equation]))
    made = first.run([tensors[name] for name in first.tensors], first.constants, [x])
    inputs = np.asarray(dict(zip(first.gives, made, strict=True))[one.product.inputs])
    weight = tensors[one.layer.name].reshape(-1)[one.order].astype(np.float64)
    assert weight.shape == one.layer.shape
    columns = one.product.columns(inputs, np.arange(np.prod(one.product.where)))
    y = np.einsum("grc,pgc->pgr", weight, columns).reshape(len(columns), -1)
    expected = np.asarray(jax.jit(apply)(variables, x))
    # Where an output is, and of which row: by place, then by row.
    order = np.argsort(one.product.rows().reshape(-1), kind="stable")
    expected = expected.reshape(-1)[order].reshape(y.shape[1], -1).T
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
    return one.layer


@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_columns_of_convolutions(kind):
    sizes, kernel, settings = CONVOLUTIONS[kind]
    x = np.random.default_rng(0).normal(size=(3, *sizes, 4)).astype(np.float32)
    model = nn.Conv(8, kernel, use_bias=False, **settings)
    layer = check_columns(model.apply, drawn(model, x), x)
    groups = settings.get("feature_group_count", 1)
    assert (layer.groups, layer.kernel) == (groups, np.prod(kernel))
    assert layer.nested == (groups < 4)


@pytest.mark.parametrize("turned", [False, True])
def test_columns_of_transposed_convolutions(turned):
    x = np.random.default_rng(0).normal(size=(3, 4, 5, 4)).astype(np.float32)
    strides = (2, 1)
    model = nn.ConvTranspose(8, (3, 3), strides, use_bias=False, transpose_kernel=turned)
    check_columns(model.apply, drawn(model, x), x)


@pytest.mark.parametrize(
    ("equation", "weight", "sizes"),
    [
        ("bi,io->bo", (5, 7), (3, 5)),
        ("bti,oi->bto", (7, 5), (3, 4, 5)),
        ("btd,dhk->bthk", (5, 2, 3), (3, 4, 5)),
        ("bthk,hkd->btd", (2, 3, 5), (3, 4, 2, 3)),
        ("bti,hio->btho", (2, 5, 7), (3, 4, 5)),
        ("ebi,eio->ebo", (4, 5, 7), (4, 3, 5)),
        ("ebi,eoi->ebo", (4, 7, 5), (4, 3, 5)),
    ],
)
def test_columns_of_products(equation, weight, sizes):
    rng = np.random.default_rng(0)
    x = rng.normal(size=sizes).astype(np.float32)
    variables = {"w": rng.normal(size=weight).astype(np.float32)}
    check_columns(lambda variables, x: jnp.einsum(equation, x, variables["w"]), variables, x)


class Net(nn.Module):
    """What can follow a layer."""

    @nn.compact
    def __call__(self, x):
        def norm(name):
            return nn.BatchNorm(use_running_average=True, name=name)

        x = norm("norm1")(nn.Conv(6, (3, 3), name="conv1")(x))
        x = nn.Conv(8, (1, 1), use_bias=False, name="conv2")(nn.relu(x))
        x = norm("norm2")(nn.max_pool(x, (2, 2), (2, 2), "SAME"))
        x = nn.Conv(8, (1, 1), use_bias=False, name="conv3")(nn.relu(x))
        x = norm("norm3")(nn.relu(x))
        x = nn.Dense(5, name="dense1")(x.mean((1, 2)))
        x = nn.Dense(5, use_bias=False, name="dense2")(nn.relu(x))
        return x * self.param("gamma", nn.initializers.ones, (5,))


def test_what_follows_a_layer_takes_biases_and_scales():
    x = np.zeros((2, 6, 6, 3), np.float32)
    model = Net()
    found, left, _, _ = layers_of(model.apply, drawn(model, x), x)
    parts = {
        one.layer.name.partition("/")[0]: (
            [part.name for part in one.offsets],
            one.scale and one.scale.name,
        )
        for one in found
    }
    assert parts == {
        "conv1": (["conv1/bias", "norm1/mean"], "norm1/scale"),
        "conv2": (["norm2/mean"], "norm2/scale"),  # a maximum is between
        "conv3": ([], None),  # a ReLU is
        "dense1": (["dense1/bias"], None),
        "dense2": ([], "gamma"),
    }
    assert left == {}


class Left(nn.Module):
    """What is no layer."""

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(11, 8, name="tied")
        x = embed(tokens) + nn.Embed(11, 8, name="alone")(tokens)
        x = x + self.param("places", nn.initializers.ones, (4, 8))
        self.param("unused", nn.initializers.ones, (4, 8))
        twice = nn.Dense(8, use_bias=False, name="twice")
        x = twice(nn.relu(twice(x)))
        x = nn.WeightNorm(nn.Dense(8), name="norm")(x)
        block = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        return embed.attend(block(name="loop")(x, None)[0])


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return nn.Dense(8, use_bias=False)(x), None


def test_what_is_no_layer_is_left_and_why():
    tokens = np.zeros((2, 4), np.int32)
    model = Left()
    found, left, _, _ = layers_of(model.apply, drawn(model, tokens), tokens)
    assert found == []
    assert {name.partition("/")[0]: why for name, why in left.items()} == {
        "tied": "used in 2 places",
        "alone": "looked up, not multiplied",
        "places": "goes into add, not into a matrix product",
        "unused": "not used",
        "twice": "used in 2 places",
        "Dense_0": "used in 3 places",  # its norm, too
        "loop": "used in a loop or branch (scan)",
    }


def test_functions_that_a_network_calls_are_looked_into():
    class Outer(nn.Module):
        @nn.compact
        def __call__(self, x):
            for wrap in (nn.remat, nn.jit, lambda block: block):
                x = nn.relu(wrap(Block)()(x, None)[0])
            return jax.checkpoint(lambda x: jax.nn.silu(x) + lax.stop_gradient(x))(x)

    x = np.zeros((2, 8), np.float32)
    model = Outer()
    found, left, _, _ = layers_of(jax.jit(model.apply), drawn(model, x), x)
    assert (len(found), left) == (3, {})


@pytest.mark.parametrize(
    ("after", "head"),
    [
        (lambda x: x, "head"),
        (lambda x: nn.softmax(x / 8), "head"),
        (lambda x: nn.log_softmax(x.reshape(-1, 1, 6)), "head"),
        (lambda x: x[:, :5], None),  # as many classes as the layer before has features
        (lambda x: x @ np.ones((6, 6)), None),
    ],
)
def test_the_head_of_a_classifier(after, head):
    rng = np.random.default_rng(0)
    variables = {"body": rng.normal(size=(4, 5)), "head": rng.normal(size=(5, 6))}

    def apply(variables, x):
        return after(nn.relu(x @ variables["body"]) @ variables["head"])

    found, _, program, _ = layers_of(apply, variables, rng.normal(size=(3, 4)))
    assert find_head(program, found) == head


def test_names_of_modules_are_those_of_written_files():
    class Two(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([nnx.Linear(3, 3, rngs=rngs) for _ in range(2)])
            self.norm = nnx.BatchNorm(3, rngs=rngs)
            self.drop = nnx.Dropout(0.5, rngs=rngs)

    assert sorted(tensors_of(Two(nnx.Rngs(0)))) == [
        *(f"layers/{at}/{kind}" for at in (0, 1) for kind in ("bias", "kernel")),
        *(f"norm/{kind}" for kind in ("bias", "mean", "scale", "var")),
    ]
    tree = {"params": {"w": np.ones(2)}, "batch_stats": {"m": np.ones(2)}, "step": np.ones(1)}
    assert sorted(tensors_of(tree)) == ["m", "step", "w"]
