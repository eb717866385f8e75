"""Sessions from memory."""

import io
from pathlib import Path

import onnx_models as m
import onnxruntime
import pytest
from elsa_converters.onnx import export, session


def test_switching_the_level_is_one_call(tmp_path: Path) -> None:
    elsa, template = m.packed(m.save(m.mlp(), tmp_path / "m.onnx"), tmp_path)
    feeds = {"x": m.weights(3, 16)}
    net = session(elsa, template, level=1, intra_op_num_threads=1)
    assert isinstance(net, onnxruntime.InferenceSession)
    for level in (3, 1, "dense"):
        net.use_level(level)
        export(elsa, template, tmp_path / f"{level}.onnx", level=level)
        m.assert_same(m.run(net, feeds), m.run(tmp_path / f"{level}.onnx", feeds))
        assert net.level == level


def test_the_files_may_be_gone_once_it_exists(tmp_path: Path) -> None:
    elsa, template = m.packed(m.save(m.mlp(), tmp_path / "m.onnx"), tmp_path)
    feeds = {"x": m.weights(3, 16)}
    net = session(
        elsa,
        template,
        level=2,
        graph_optimization_level=onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL,
    )
    before = m.run(net, feeds)
    elsa.write_bytes(bytes(elsa.stat().st_size))
    template.unlink()
    filler = [m.weights(64, 64, seed=s) for s in range(100)]  # takes freed memory, if any is
    m.assert_same(m.run(net, feeds), before)
    assert len(filler) == 100


def test_options_reach_the_runtime(tmp_path: Path) -> None:
    elsa, template = m.packed(m.save(m.mlp(), tmp_path / "m.onnx"), tmp_path)
    providers = ["CPUExecutionProvider"]
    net = session(elsa, template, level=1, intra_op_num_threads=2, providers=providers)
    assert net.get_session_options().intra_op_num_threads == 2
    assert net.get_providers() == providers
    own = onnxruntime.SessionOptions()
    own.inter_op_num_threads = 3
    net = session(elsa, template, level=1, sess_options=own)
    assert net.get_session_options().inter_op_num_threads == 3
    with pytest.raises(ValueError, match="by name"):
        net.use_level(2)


def test_a_stream_gives_one_level(tmp_path: Path) -> None:
    elsa, template = m.packed(m.save(m.mlp(), tmp_path / "m.onnx"), tmp_path)
    with elsa.open("rb") as stream:
        net = session(stream, template, level=2)
    m.assert_same(
        m.run(net, {"x": m.weights(3, 16)}),
        m.run(session(elsa, template, level=2), {"x": m.weights(3, 16)}),
    )
    with pytest.raises(io.UnsupportedOperation):
        net.use_level(1)
