"""Batch norm folded into convolutions."""

from pathlib import Path

import numpy as np
import onnx
import onnx_models as m
import pytest
from elsa_converters.onnx import export
from onnx import helper


@pytest.mark.parametrize("level", ["dense", 1, 3])
@pytest.mark.parametrize("sparse", [False, True])
def test_folding_keeps_the_function_and_the_zeros(
    tmp_path: Path, level: int | str, sparse: bool
) -> None:
    proto = m.conv_bn()
    template = m.save(proto, tmp_path / "net.onnx")
    elsa = m.write_with_statistics(tmp_path / "net.safetensors", proto)
    plain, folded = tmp_path / "plain.onnx", tmp_path / "folded.onnx"
    export(elsa, template, plain, level=level)
    export(elsa, template, folded, level=level, fold=True, sparse=sparse)
    onnx.checker.check_model(folded)
    ops = [node.op_type for node in onnx.load(folded).graph.node]
    assert ops == ["Conv", "Relu", "ConvTranspose", "GlobalAveragePool"]
    feeds = {"x": m.weights(2, 3, 8, 8)}
    m.assert_near(m.run(folded, feeds), m.run(plain, feeds), 1e-5)
    before, after = m.initializers(plain), m.initializers(folded)
    for name in ("c1.w", "c2.w"):
        np.testing.assert_array_equal(before[name] == 0, after[name] == 0)
        assert not np.signbit(after[name][after[name] == 0]).any()


def test_a_convolution_with_other_readers_is_left_alone(tmp_path: Path) -> None:
    proto = m.conv_bn()
    proto.graph.output.append(m.value("c1", ["n", 8, 8, 8]))
    proto.graph.node.append(helper.make_node("Identity", ["c2.w"], ["copy"]))
    proto.graph.output.append(m.value("copy", [8, 6, 2, 2]))
    template = m.save(proto, tmp_path / "net.onnx")
    elsa = m.write_with_statistics(tmp_path / "net.safetensors", proto)
    export(elsa, template, tmp_path / "plain.onnx", level=1)
    export(elsa, template, tmp_path / "folded.onnx", level=1, fold=True)
    feeds = {"x": m.weights(2, 3, 8, 8)}
    m.assert_same(m.run(tmp_path / "folded.onnx", feeds), m.run(tmp_path / "plain.onnx", feeds))
