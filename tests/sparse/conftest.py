"""A small network with levels, as a file and its template."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from elsa_converters.onnx import OnnxCheckpoint
from onnx import helper
from sparse_models import tensor

import elsa_format


class Packed(NamedTuple):
    """An ELSA file and its template."""

    elsa: Path
    template: Path


@pytest.fixture(scope="module")
def packed(tmp_path_factory) -> Packed:
    """A convolution with batch norm and two linear layers, at 95, 90 and 60 %."""
    folder, rng = tmp_path_factory.mktemp("packed"), np.random.default_rng(5)
    node = helper.make_node
    nodes = [
        node("Conv", ["x", "conv"], ["c"], pads=[1, 1, 1, 1]),
        node("BatchNormalization", ["c", "scale", "shift", "mean", "var"], ["n"]),
        node("Relu", ["n"], ["r"]),
        node("GlobalAveragePool", ["r"], ["g"]),
        node("Flatten", ["g"], ["f"]),
        node("Gemm", ["f", "hidden", "bias"], ["h"], transB=1),
        node("Relu", ["h"], ["a"]),
        node("MatMul", ["a", "head"], ["y"]),
    ]
    arrays = {
        "conv": rng.standard_normal((32, 8, 3, 3)),
        "scale": rng.uniform(0.5, 1.5, 32),
        "shift": rng.standard_normal(32),
        "mean": rng.standard_normal(32),
        "var": rng.uniform(0.5, 1.5, 32),
        "hidden": rng.standard_normal((256, 32)),
        "bias": rng.standard_normal(256),
        "head": rng.standard_normal((256, 10)),
    }
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", 1, ["n", 8, 12, 12])],
        [helper.make_tensor_value_info("y", 1, ["n", 10])],
        [tensor(name, array.astype(np.float32)) for name, array in arrays.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    made = Packed(folder / "net.safetensors", folder / "net.onnx")
    with OnnxCheckpoint(path) as checkpoint:
        elsa_format.pack(checkpoint, made.elsa, sparsities=[95, 90, 60], scope="uniform")
        checkpoint.write_template(made.template, made.elsa)
    return made
