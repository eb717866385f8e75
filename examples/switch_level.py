"""Switch the sparsity of a running ONNX Runtime session.

pip install '.[onnx]'
python examples/switch_level.py
"""

import tempfile
from pathlib import Path

import numpy as np
from elsa_converters import onnx
from onnx import TensorProto, helper, numpy_helper, save

import elsa_format

rng = np.random.default_rng(0)
folder = Path(tempfile.mkdtemp())

# Any ONNX model will do; this one is a single layer.
weights = rng.standard_normal((512, 512)).astype(np.float32)
graph = helper.make_graph(
    [helper.make_node("MatMul", ["x", "weights"], ["y"])],
    "layer",
    [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 512])],
    [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 512])],
    [numpy_helper.from_array(weights, "weights")],
)
save(
    helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10),
    folder / "model.onnx",
)

# Pack it; the template is the graph, with its weights in the ELSA file.
elsa_format.pack(
    folder / "model.onnx",
    folder / "net.safetensors",
    sparsities=[95, 90, 80],
    template=folder / "net.onnx",
)

# Run it. The battery runs low: switch to a sparser level. Nothing is written to disk.
x = rng.standard_normal((1, 512)).astype(np.float32)
session = onnx.session(folder / "net.safetensors", folder / "net.onnx", level="dense")
(dense,) = session.run(None, {"x": x})
for level in (3, 2, 1):
    session.use_level(level)
    (y,) = session.run(None, {"x": x})
    similarity = float((y @ dense.T).item() / np.linalg.norm(y) / np.linalg.norm(dense))
    print(f"level {session.level}: cosine similarity to the dense output {similarity:.3f}")
