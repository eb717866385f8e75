"""Networks to run: shapes of known ones, weights that are random and mostly zero."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper, numpy_helper

Array = NDArray[np.float32]
Sizes = list[int | str]


@dataclass
class Network:
    """A graph under construction, its weights, and an input to run it with."""

    feeds: dict[str, Array]
    shapes: dict[str, Sizes]
    arrays: dict[str, Array] = field(default_factory=dict)
    nodes: list[Any] = field(default_factory=list)
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def add(self, kind: str, inputs: list[str], **attributes: Any) -> str:
        """Add a node; gives its output."""
        output = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [output], **attributes))
        return output

    def constant(self, array: NDArray[Any]) -> str:
        """Add a constant."""
        name = f"c{len(self.arrays)}"
        self.arrays[name] = array
        return name

    def weight(self, *shape: int, fan_in: int) -> str:
        """Add a weight of normal size."""
        name = f"w{len(self.arrays)}"
        self.arrays[name] = self.rng.standard_normal(shape, np.float32) * np.float32(
            np.sqrt(2 / fan_in)
        )
        return name

    def conv(self, x: str, channels: tuple[int, int], kernel: int = 1, stride: int = 1) -> str:
        """Add a convolution with a bias."""
        weight = self.weight(
            channels[1], channels[0], kernel, kernel, fan_in=channels[0] * kernel**2
        )
        bias = self.constant(np.zeros(channels[1], np.float32))
        pads = [kernel // 2] * 4
        return self.add("Conv", [x, weight, bias], strides=[stride] * 2, pads=pads)

    def linear(self, x: str, inputs: int, outputs: int) -> str:
        """Add a product with a bias."""
        bias = self.constant(np.zeros(outputs, np.float32))
        product = self.add("MatMul", [x, self.weight(inputs, outputs, fan_in=inputs)])
        return self.add("Add", [product, bias])

    def prune(self, sparsity: float, *, everywhere: bool = False) -> None:
        """Zero the smallest weights: of each tensor, or of all together."""
        names = [name for name in self.arrays if name.startswith("w")]
        groups = [names] if everywhere else [[name] for name in names]
        for group in groups:
            sizes = np.concatenate([np.abs(self.arrays[name]).ravel() for name in group])
            place = min(int(sparsity * sizes.size), sizes.size - 1)
            threshold = np.partition(sizes, place)[place]
            for name in group:
                small = np.abs(self.arrays[name]) < threshold
                self.arrays[name] = np.where(small, np.float32(0), self.arrays[name])

    def prune_pattern(self, n: int, m: int) -> None:
        """Keep the n largest of each m inputs of a product."""
        for name, array in self.arrays.items():
            if name.startswith("w"):
                groups = array.T.reshape(-1, m)
                sizes = np.abs(groups)
                least = np.partition(sizes, m - n, axis=1)[:, m - n, None]
                pruned = np.where(sizes >= least, groups, np.float32(0))
                self.arrays[name] = np.ascontiguousarray(pruned.reshape(array.T.shape).T)

    def graph(self) -> ModelProto:
        """The model without its weights, which are in `arrays`."""
        made = helper.make_graph(
            self.nodes,
            "network",
            [
                helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
                for name, shape in self.shapes.items()
            ],
            [helper.make_tensor_value_info(self.nodes[-1].output[0], TensorProto.FLOAT, None)],
        )
        return helper.make_model(made, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def with_weights(proto: ModelProto, arrays: dict[str, NDArray[Any]]) -> bytes:
    """A model's bytes, weights included."""
    full = ModelProto()
    full.CopyFrom(proto)
    full.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in arrays.items())
    content: bytes = full.SerializeToString()
    return content


def _network(*shape: int) -> Network:
    x = np.random.default_rng(1).standard_normal(shape, np.float32)
    return Network({"x": x}, {"x": ["n", *shape[1:]]})


def resnet50() -> Network:
    """ResNet-50 for one picture of 224 × 224, batch norm folded."""
    net = _network(1, 3, 224, 224)
    y = net.add("Relu", [net.conv("x", (3, 64), 7, 2)])
    y = net.add("MaxPool", [y], kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4)
    channels = 64
    for blocks, inner, first in ((3, 64, 1), (4, 128, 2), (6, 256, 2), (3, 512, 2)):
        for block in range(blocks):
            stride = 1 if block else first
            side = y if block else net.conv(y, (channels, 4 * inner), 1, stride)
            z = net.add("Relu", [net.conv(y, (channels, inner))])
            z = net.add("Relu", [net.conv(z, (inner, inner), 3, stride)])
            y = net.add("Relu", [net.add("Add", [net.conv(z, (inner, 4 * inner)), side])])
            channels = 4 * inner
    net.linear(net.add("Flatten", [net.add("GlobalAveragePool", [y])]), 2048, 1000)
    return net


def ffn(tokens: int) -> Network:
    """The two large products of a layer of a language model, 4096 to 11008 and back."""
    net = _network(tokens, 4096)
    net.linear(net.add("Relu", [net.linear("x", 4096, 11008)]), 11008, 4096)
    return net


def mlp(rows: int = 1) -> Network:
    """Four layers of 1024 × 1024: they stay in the cache."""
    net, y = _network(rows, 1024), "x"
    for _ in range(4):
        y = net.add("Relu", [net.linear(y, 1024, 1024)])
    return net


def bert(tokens: int = 128) -> Network:
    """Twelve layers of 768, with attention of 12 heads and 3072 inside, as BERT-base has."""
    net = _network(1, tokens, 768)
    net.shapes = {"x": [1, tokens, 768]}
    split = net.constant(np.array([1, tokens, 12, 64], np.int64))
    join = net.constant(np.array([1, tokens, 768], np.int64))
    eighth = net.constant(np.array(0.125, np.float32))
    one, zero = net.constant(np.ones(768, np.float32)), net.constant(np.zeros(768, np.float32))
    y = "x"
    for _ in range(12):
        heads = []
        for turned in ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3]):
            part = net.add("Reshape", [net.linear(y, 768, 768), split])
            heads.append(net.add("Transpose", [part], perm=turned))
        scores = net.add("Mul", [net.add("MatMul", heads[:2]), eighth])
        mixed = net.add("MatMul", [net.add("Softmax", [scores]), heads[2]])
        mixed = net.add("Reshape", [net.add("Transpose", [mixed], perm=[0, 2, 1, 3]), join])
        y = net.add("Add", [net.linear(mixed, 768, 768), y])
        y = net.add("LayerNormalization", [y, one, zero])
        inner = net.add("Gelu", [net.linear(y, 768, 3072)])
        y = net.add("Add", [net.linear(inner, 3072, 768), y])
        y = net.add("LayerNormalization", [y, one, zero])
    return net


NETWORKS: dict[str, Callable[[], Network]] = {
    "ResNet-50-shaped, 1 picture": resnet50,
    "FFN 4096-11008, 1 token": lambda: ffn(1),
    "FFN 4096-11008, 8 tokens": lambda: ffn(8),
    "FFN 4096-11008, 128 tokens": lambda: ffn(128),
    "MLP of 1024 × 1024, 1 row": mlp,
    "BERT-base-like, 128 tokens": bert,
}
