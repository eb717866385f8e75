"""A fast model runs in OpenVINO once its functions are inlined; for `make test-runtimes`."""

import numpy as np
import onnx
import pytest
from elsa_converters import onnx as converter
from onnx.inliner import inline_local_functions

openvino = pytest.importorskip("openvino")


@pytest.mark.parametrize("level", [1, 3])
def test_inlined_model(packed, tmp_path, level):
    """Convolution, products and all, as the dense level gives them."""
    converter.export(*packed, tmp_path / "fast.onnx", level=level, fast=0.5)
    inlined = inline_local_functions(onnx.load(tmp_path / "fast.onnx"))
    assert any(node.op_type == "ScatterElements" for node in inlined.graph.node)
    onnx.save(inlined, tmp_path / "inlined.onnx")
    # By itself it computes in bfloat16 where the processor can.
    settings = {"INFERENCE_PRECISION_HINT": "f32"}
    model = openvino.Core().compile_model(tmp_path / "inlined.onnx", "CPU", settings)
    x = np.random.default_rng(6).standard_normal((2, 8, 12, 12)).astype(np.float32)
    (found,) = model({"x": x}).values()
    (expected,) = converter.session(*packed, level=level).run(None, {"x": x})
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
