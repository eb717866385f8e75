"""Graphs of small networks as exporters write them, for measurements and tests."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

Arrays = Mapping[str, NDArray[Any]]


class Graph:
    """Nodes one after the other, and the constants they need."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, NDArray[Any]] = {}

    def const(self, name: str, value: Any, dtype: Any = np.float32) -> str:
        """A constant, by its name."""
        self.constants[name] = np.array(value, dtype, order="C")
        return name

    def ints(self, *values: int) -> str:
        """A list of integers, as shapes and axes are given."""
        return self.const("i" + "_".join(map(str, values)), values, np.int64)

    def node(self, op: str, *inputs: str, out: str = "", **attributes: Any) -> str:
        """An operator; gives its output's name."""
        out = out or f"t{len(self.nodes)}"
        self.nodes.append(
            helper.make_node(op, inputs, [out], f"{op}_{len(self.nodes)}", **attributes)
        )
        return out

    def model(
        self, inputs: Sequence[Any], outputs: Sequence[Any], opset: int = 17
    ) -> onnx.ModelProto:
        """The model; inputs and outputs are (name, type, shape)."""
        made = [
            [helper.make_tensor_value_info(*each) for each in some] for some in (inputs, outputs)
        ]
        values = [numpy_helper.from_array(array, name) for name, array in self.constants.items()]
        graph = helper.make_graph(self.nodes, "net", *made, values)
        opsets = [helper.make_opsetid("", opset)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
        onnx.checker.check_model(model)
        return model


def bert(weights: Arrays, heads: int, *, labels: bool = False) -> onnx.ModelProto:
    """An encoder by the names of its checkpoint; with `labels` a classifier of the first token."""
    g = Graph()
    hidden = weights["embeddings.word_embeddings.weight"].shape[1]
    layers = len({name.split(".")[2] for name in weights if name.startswith("encoder.layer.")})

    def weight(name: str, *, transposed: bool = False) -> str:
        return g.const(name, weights[name].T if transposed else weights[name])

    def linear(x: str, name: str) -> str:
        product = g.node("MatMul", x, weight(f"{name}.weight", transposed=True))
        return g.node("Add", weight(f"{name}.bias"), product)

    def norm(x: str, name: str) -> str:
        scale, bias = weight(f"{name}.weight"), weight(f"{name}.bias")
        return g.node("LayerNormalization", x, scale, bias, axis=-1, epsilon=1e-12)

    words = g.node("Gather", weight("embeddings.word_embeddings.weight"), "input_ids")
    types = g.node("Gather", weight("embeddings.token_type_embeddings.weight"), "token_type_ids")
    length = g.node("Shape", "input_ids", start=1, end=2)
    places = weight("embeddings.position_embeddings.weight")
    places = g.node("Slice", places, g.ints(0), length, g.ints(0))
    x = norm(g.node("Add", g.node("Add", words, types), places), "embeddings.LayerNorm")
    mask = g.node("Cast", "attention_mask", to=TensorProto.FLOAT)
    mask = g.node("Sub", g.const("one", 1), mask)
    mask = g.node("Mul", mask, g.const("low", -1e9))
    mask = g.node("Unsqueeze", mask, g.ints(1, 2))
    width = hidden // heads
    for i in range(layers):
        layer = f"encoder.layer.{i}"
        kinds = ("query", "key", "value")
        q, k, v = (
            g.node(
                "Reshape", linear(x, f"{layer}.attention.self.{kind}"), g.ints(0, 0, heads, width)
            )
            for kind in kinds
        )
        q, v = (g.node("Transpose", each, perm=[0, 2, 1, 3]) for each in (q, v))
        k = g.node("Transpose", k, perm=[0, 2, 3, 1])
        scores = g.node("Div", g.node("MatMul", q, k), g.const("root", width**0.5))
        scores = g.node("Softmax", g.node("Add", scores, mask), axis=-1)
        seen = g.node("Transpose", g.node("MatMul", scores, v), perm=[0, 2, 1, 3])
        seen = g.node("Reshape", seen, g.ints(0, 0, hidden))
        seen = g.node("Add", linear(seen, f"{layer}.attention.output.dense"), x)
        x = norm(seen, f"{layer}.attention.output.LayerNorm")
        wide = linear(x, f"{layer}.intermediate.dense")
        wide = gelu(g, wide)
        wide = g.node("Add", linear(wide, f"{layer}.output.dense"), x)
        x = norm(wide, f"{layer}.output.LayerNorm")
    ids = [(name, TensorProto.INT64, ["batch", "sequence"]) for name in IDS]
    if not labels:
        g.node("Identity", x, out="last_hidden_state")
        return g.model(
            ids, [("last_hidden_state", TensorProto.FLOAT, ["batch", "sequence", hidden])]
        )
    first = g.node("Gather", x, g.const("zero", 0, np.int64), axis=1)
    pooled = g.node(
        "Tanh", g.node("Gemm", first, *(weight(f"pooler.dense.{p}") for p in PARTS), transB=1)
    )
    parts = (weight(f"classifier.{part}") for part in PARTS)
    g.node("Gemm", pooled, *parts, out="logits", transB=1)
    return g.model(ids, [("logits", TensorProto.FLOAT, ["batch", "labels"])])


IDS = ("input_ids", "attention_mask", "token_type_ids")
PARTS = ("weight", "bias")


def gelu(g: Graph, x: str) -> str:
    """The activation as five nodes."""
    e = g.node("Erf", g.node("Div", x, g.const("root2", 2**0.5)))
    e = g.node("Mul", x, g.node("Add", e, g.const("one", 1)))
    return g.node("Mul", e, g.const("half", 0.5))


def random_bert(
    seed: int = 0,
    *,
    hidden: int = 64,
    layers: int = 2,
    words: int = 200,
    places: int = 64,
    labels: int = 0,
) -> dict[str, NDArray[Any]]:
    """Weights of a small encoder that is not trained."""
    rng = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (words, hidden),
        "embeddings.token_type_embeddings.weight": (2, hidden),
        "embeddings.position_embeddings.weight": (places, hidden),
        "embeddings.LayerNorm.weight": (hidden,),
        "embeddings.LayerNorm.bias": (hidden,),
    }
    dense = {f"attention.self.{kind}": (hidden, hidden) for kind in ("query", "key", "value")}
    dense |= {"attention.output.dense": (hidden, hidden)}
    dense |= {"intermediate.dense": (4 * hidden, hidden), "output.dense": (hidden, 4 * hidden)}
    for i in range(layers):
        for name, shape in dense.items():
            shapes[f"encoder.layer.{i}.{name}.weight"] = shape
            shapes[f"encoder.layer.{i}.{name}.bias"] = shape[:1]
        for name in ("attention.output.LayerNorm", "output.LayerNorm"):
            shapes[f"encoder.layer.{i}.{name}.weight"] = (hidden,)
            shapes[f"encoder.layer.{i}.{name}.bias"] = (hidden,)
    if labels:
        shapes |= {"pooler.dense.weight": (hidden, hidden), "pooler.dense.bias": (hidden,)}
        shapes |= {"classifier.weight": (labels, hidden), "classifier.bias": (labels,)}

    def values(name: str, shape: tuple[int, ...]) -> NDArray[Any]:
        scale = shape[-1] ** -0.5 if len(shape) > 1 and "embeddings" not in name else 1.0
        made = rng.standard_normal(shape) * scale
        return (made * 0.1 + 1 if "LayerNorm.weight" in name else made).astype(np.float32)

    return {name: values(name, shape) for name, shape in shapes.items()}


def random_decoder(
    seed: int = 0, *, hidden: int = 64, layers: int = 2, words: int = 200
) -> dict[str, NDArray[Any]]:
    """Weights of a small decoder that is not trained."""
    rng = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {"wte": (words, hidden), "wpe": (64, hidden)}
    for i in range(layers):
        shapes |= {f"h.{i}.attn": (hidden, 3 * hidden), f"h.{i}.proj": (hidden, hidden)}
        shapes |= {f"h.{i}.fc": (hidden, 4 * hidden), f"h.{i}.out": (4 * hidden, hidden)}
    return {
        name: (rng.standard_normal(s) * s[0] ** -0.5).astype(np.float32)
        for name, s in shapes.items()
    }


def decoder(weights: Arrays, heads: int) -> onnx.ModelProto:
    """A decoder with a cache of keys and values, as text generation asks for one."""
    g = Graph()
    hidden = weights["wte"].shape[1]
    layers = (len(weights) - 2) // 4
    scale = g.const("scale", np.ones(hidden))
    x = g.node("Gather", g.const("wte", weights["wte"]), "input_ids")
    x = g.node("Add", x, g.node("Gather", g.const("wpe", weights["wpe"]), "position_ids"))
    # What a token may see: those before it, of which the cache holds some.
    length = g.node("Shape", "input_ids", start=1, end=2)
    every = g.node("Shape", "attention_mask", start=1, end=2)
    one, zero = g.const("n1", 1, np.int64), g.const("n0", 0, np.int64)
    last, width = g.node("Squeeze", every), g.node("Squeeze", length)
    columns = g.node("Range", zero, last, one)
    rows = g.node("Unsqueeze", g.node("Range", g.node("Sub", last, width), last, one), g.ints(1))
    hides = g.node("Cast", g.node("Greater", columns, rows), to=TensorProto.FLOAT)
    hides = g.node("Mul", hides, g.const("low", -1e9))
    outputs: list[tuple[str, int, list[str | int]]] = []
    inputs: list[tuple[str, int, list[str | int]]] = [
        ("input_ids", TensorProto.INT64, ["batch_size", "sequence_length"]),
        ("attention_mask", TensorProto.INT64, ["batch_size", "total_sequence_length"]),
        ("position_ids", TensorProto.INT64, ["batch_size", "sequence_length"]),
    ]
    split = g.ints(0, 0, heads, hidden // heads)
    for i in range(layers):
        normed = g.node("LayerNormalization", x, scale, axis=-1)
        both = g.node("MatMul", normed, g.const(f"h.{i}.attn", weights[f"h.{i}.attn"]))
        parts = [f"h.{i}.{part}" for part in "qkv"]
        g.nodes.append(helper.make_node("Split", [both, g.ints(*[hidden] * 3)], parts, axis=-1))
        q, k, v = (
            g.node("Transpose", g.node("Reshape", p, split), perm=[0, 2, 1, 3]) for p in parts
        )
        past = [f"past_key_values.{i}.{kind}" for kind in ("key", "value")]
        now = [f"present.{i}.{kind}" for kind in ("key", "value")]
        shape: list[str | int] = ["batch_size", heads, "past_sequence_length", hidden // heads]
        inputs += [(name, TensorProto.FLOAT, shape) for name in past]
        outputs += [
            (name, TensorProto.FLOAT, [*shape[:2], "total_sequence_length", shape[3]])
            for name in now
        ]
        k, v = (
            g.node("Concat", a, b, out=c, axis=2) for a, b, c in zip(past, (k, v), now, strict=True)
        )
        scores = g.node("MatMul", q, g.node("Transpose", k, perm=[0, 1, 3, 2]))
        scores = g.node(
            "Add", g.node("Mul", scores, g.const("root", (hidden // heads) ** -0.5)), hides
        )
        seen = g.node("MatMul", g.node("Softmax", scores, axis=-1), v)
        seen = g.node("Reshape", g.node("Transpose", seen, perm=[0, 2, 1, 3]), g.ints(0, 0, hidden))
        x = g.node("Add", x, g.node("MatMul", seen, g.const(f"h.{i}.proj", weights[f"h.{i}.proj"])))
        wide = g.node("LayerNormalization", x, scale, axis=-1)
        wide = gelu(g, g.node("MatMul", wide, g.const(f"h.{i}.fc", weights[f"h.{i}.fc"])))
        x = g.node("Add", x, g.node("MatMul", wide, g.const(f"h.{i}.out", weights[f"h.{i}.out"])))
    x = g.node("LayerNormalization", x, scale, axis=-1)
    g.node("MatMul", x, g.node("Transpose", "wte", perm=[1, 0]), out="logits")
    logits: list[str | int] = ["batch_size", "sequence_length", len(weights["wte"])]
    return g.model(inputs, [("logits", TensorProto.FLOAT, logits), *outputs])


def mobile(seed: int = 0, *, width: int = 16, labels: int = 5) -> onnx.ModelProto:
    """A small convolutional network: full, pointwise and depthwise kernels, gates, a head."""
    rng = np.random.default_rng(seed)
    g = Graph()

    def values(name: str, *shape: int, about: float = 0.0, scale: float | None = None) -> str:
        scale = (2 / np.prod(shape[1:])) ** 0.5 if scale is None else scale
        return g.const(name, rng.standard_normal(shape) * scale + about)

    def conv(
        x: str, name: str, shape: tuple[int, ...], *, act: str = "", group: int = 1, stride: int = 1
    ) -> str:
        pad, size = shape[2] // 2, shape[2]
        w = values(f"{name}.weight", *shape)
        options = {"pads": [pad] * 4, "strides": [stride] * 2, "kernel_shape": [size] * 2}
        x = g.node("Conv", x, w, group=group, **options)
        n = shape[0]
        stats = [
            values(f"{name}.scale", n, about=1, scale=0.1),
            values(f"{name}.bias", n, scale=0.1),
        ]
        stats += [values(f"{name}.mean", n, scale=0.1), g.const(f"{name}.var", 0.5 + rng.random(n))]
        x = g.node("BatchNormalization", x, *stats)
        return g.node(act, x) if act else x

    def block(x: str, name: str, inputs: int, outputs: int, stride: int = 1) -> str:
        wide = 2 * inputs
        y = conv(x, f"{name}.expand", (wide, inputs, 1, 1), act="HardSwish")
        y = conv(y, f"{name}.depth", (wide, 1, 3, 3), act="Relu", group=wide, stride=stride)
        gate = g.node("GlobalAveragePool", y)
        gate = g.node("Conv", gate, values(f"{name}.squeeze", wide // 4, wide, 1, 1))
        gate = g.node("Conv", g.node("Relu", gate), values(f"{name}.excite", wide, wide // 4, 1, 1))
        y = g.node("Mul", y, g.node("HardSigmoid", gate, alpha=1 / 6, beta=0.5))
        y = conv(y, f"{name}.project", (outputs, wide, 1, 1))
        return g.node("Add", x, y) if inputs == outputs and stride == 1 else y

    x = conv("pixel_values", "stem", (width, 3, 3, 3), act="HardSwish", stride=2)
    x = block(x, "one", width, width)
    x = block(x, "two", width, 2 * width, stride=2)
    x = conv(x, "mix", (2 * width, 2 * width, 3, 3), act="Relu")
    x = g.node("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2])
    x = g.node("Flatten", g.node("GlobalAveragePool", x))
    bias = values("head.bias", labels, scale=0.1)
    g.node("Gemm", x, values("head.weight", labels, 2 * width), bias, out="logits", transB=1)
    size: list[str | int] = ["batch", 3, "height", "width"]
    inputs = [("pixel_values", TensorProto.FLOAT, size)]
    return g.model(inputs, [("logits", TensorProto.FLOAT, ["batch", labels])])
