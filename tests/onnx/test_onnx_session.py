"""Sessions from memory."""

import io
import os
from pathlib import Path

import numpy as np
import onnx_models as m
import onnxruntime
import pytest
from elsa_converters.onnx import export, session

import elsa_format


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


def test_a_session_from_the_first_bytes_of_a_delivery_file(tmp_path: Path) -> None:
    net, template = m.packed(m.save(m.mlp(), tmp_path / "m.onnx"), tmp_path)
    delivered = tmp_path / "net.ship.safetensors"
    elsa_format.ship(net, delivered)
    with elsa_format.open_delivery(delivered) as delivery:
        os.truncate(delivered, delivery.downloads[1])
    whole = session(net, template, level=1)
    shapes = {i.name: [n if isinstance(n, int) else 3 for n in i.shape] for i in whole.get_inputs()}
    feeds = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    found = session(delivered, template, level=1).run(None, feeds)
    assert [y.tobytes() for y in found] == [y.tobytes() for y in whole.run(None, feeds)]
