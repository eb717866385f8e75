"""Bad input: one clear line, exit code 3, nothing left behind."""

import contextlib
import errno
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_models as m
import pytest
from click.testing import CliRunner
from elsa_converters.onnx import InvalidExternalData, InvalidOnnx, OnnxCheckpoint, UnsupportedOnnx
from elsa_converters.onnx import export as onnx_export
from internals import export
from onnx import TensorProto, helper

import elsa_format
from elsa_format import CountMismatch, FormatError, UnsafePath


def external(proto: onnx.ModelProto, path: Path, **entries: Any) -> Path:
    """The model with the data of w1 said to be elsewhere."""
    t = next(t for t in proto.graph.initializer if t.name == "w1")
    t.ClearField("raw_data")
    t.data_location = TensorProto.EXTERNAL
    for key, text in entries.items():
        t.external_data.add(key=key, value=str(text))
    path.write_bytes(proto.SerializeToString())
    return path


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not an ONNX model",
        b'{"a": 1}' * 1000,
        bytes(5000),
        bytes(range(256)) * 20,
        b"\x3a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x7f" + bytes(2000),
    ],
)
def test_not_an_onnx_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m.onnx").write_bytes(content)
    with pytest.raises(InvalidOnnx, match=r"m\.onnx"):
        OnnxCheckpoint(tmp_path / "m.onnx")


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    whole = m.mlp().SerializeToString()
    path = tmp_path / "m.onnx"
    for length in range(0, len(whole), 37):
        path.write_bytes(whole[:length])
        with pytest.raises(FormatError):
            OnnxCheckpoint(path)


def test_random_damage_gives_a_format_error_or_a_model(tmp_path: Path) -> None:
    rng = random.Random(0)
    whole = m.conv_bn().SerializeToString()
    path = tmp_path / "m.onnx"
    for _ in range(1000):
        damaged = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        path.write_bytes(damaged)
        with contextlib.suppress(FormatError):
            checkpoint = OnnxCheckpoint(path)
            for name in checkpoint.tensors:
                for _block in checkpoint.blocks(name, 1 << 20):
                    pass


@pytest.mark.parametrize("location", ["circle", "circle/x", "way", "pipe", "folder", "n" * 5000])
@pytest.mark.parametrize("elements", [15, 0])
def test_external_data_that_is_no_file(tmp_path: Path, location: str, elements: int) -> None:
    """A pipe would be waited for, even to read nothing from it."""
    (tmp_path / "circle").symlink_to("other")
    (tmp_path / "other").symlink_to("circle")
    (tmp_path / "way").symlink_to("circle")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    proto = m.mlp()
    if not elements:
        w1 = next(t for t in proto.graph.initializer if t.name == "w1")
        w1.dims[0] = 0
    path = external(proto, tmp_path / "m.onnx", location=location)
    with pytest.raises(InvalidExternalData, match="is missing") as caught:
        OnnxCheckpoint(path)
    assert len(str(caught.value)) < 1100


def test_a_template_whose_place_is_a_circle(tmp_path: Path) -> None:
    """Noticed before anything is packed."""
    model = m.save(m.mlp(), tmp_path / "m.onnx")
    (tmp_path / "t.onnx").symlink_to("t.onnx")
    with pytest.raises(OSError, match=r"t\.onnx") as caught:
        elsa_format.pack(
            model, tmp_path / "net.safetensors", sparsities=[50], template=tmp_path / "t.onnx"
        )
    assert caught.value.errno == errno.ELOOP
    assert sorted(os.listdir(tmp_path)) == ["m.onnx", "t.onnx"]


@pytest.mark.parametrize(
    ("entries", "error", "message"),
    [
        ({"location": "gone.bin"}, InvalidExternalData, "'gone.bin' is missing"),
        ({}, InvalidExternalData, "without a location"),
        ({"location": "short.bin\0"}, InvalidExternalData, "without a location"),
        ({"location": "../m.bin"}, UnsafePath, "outside"),
        ({"location": "/etc/passwd"}, UnsafePath, "outside"),
        ({"location": "link.bin"}, UnsafePath, "outside"),
        ({"location": "short.bin"}, InvalidExternalData, "has 100 bytes from 0, .*expected 2560"),
        ({"location": "long.bin", "offset": 2000}, InvalidExternalData, "1000 bytes from 2000"),
        ({"location": "long.bin", "length": 2559}, InvalidExternalData, "2559 declared"),
        ({"location": "long.bin", "offset": -1}, InvalidExternalData, "not a number"),
        ({"location": "long.bin", "offset": "1e3"}, InvalidExternalData, "not a number"),
        ({"location": "long.bin", "offset": 10**18}, InvalidExternalData, "has 0 bytes"),
    ],
)
def test_external_data(tmp_path: Path, entries: Any, error: type, message: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "m.bin").write_bytes(bytes(3000))
    (folder / "short.bin").write_bytes(bytes(100))
    (folder / "long.bin").write_bytes(bytes(3000))
    (folder / "link.bin").symlink_to(tmp_path / "m.bin")
    path = external(m.mlp(), folder / "m.onnx", **entries)
    with pytest.raises(error, match=message):
        OnnxCheckpoint(path)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda t: setattr(t, "data_type", 99), UnsupportedOnnx),
        (lambda t: setattr(t, "data_type", 0), UnsupportedOnnx),
        (lambda t: t.dims.append(-1), InvalidOnnx),
        (lambda t: t.dims.append(2), InvalidOnnx),
        (lambda t: setattr(t, "raw_data", b"123"), InvalidOnnx),
        (lambda t: setattr(t, "name", "w2"), InvalidOnnx),
    ],
)
def test_tensors_that_contradict_themselves(tmp_path: Path, change: Any, error: type) -> None:
    proto = m.mlp()
    change(proto.graph.initializer[0])
    proto.graph.node[0].input[1] = proto.graph.initializer[0].name
    path = tmp_path / "m.onnx"
    path.write_bytes(proto.SerializeToString())
    with pytest.raises(error):
        OnnxCheckpoint(path)


def test_an_opset_before_9_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(m.mlp(opset=8, ir_version=3).SerializeToString())
    with pytest.raises(UnsupportedOnnx, match="opset 8"):
        OnnxCheckpoint(path)


def test_sparse_indices_out_of_range(tmp_path: Path) -> None:
    for indices in (np.array([3, 16]), np.array([-1, 3]), np.array([[0, 4], [1, 1]])):
        sparse = helper.make_sparse_tensor(
            m.tensor("w", np.ones(2, np.float32)), m.tensor("", indices), [4, 4]
        )
        main = m.graph(
            [helper.make_node("MatMul", ["x", "w"], ["y"])],
            [m.value("x", [4, 4])],
            [m.value("y", [4, 4])],
        )
        main.sparse_initializer.append(sparse)
        path = tmp_path / "m.onnx"
        path.write_bytes(m.model(main).SerializeToString())
        with pytest.raises(InvalidOnnx, match="outside the shape"):
            OnnxCheckpoint(path)


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(export, [str(argument) for argument in arguments])


def assert_refused(result: Any, folder: Path, before: set[str], code: int = 3) -> None:
    assert result.exit_code == code, result.output
    assert isinstance(result.exception, SystemExit)
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert {p.name for p in folder.iterdir()} == before


def test_the_command_leaves_nothing_behind(tmp_path: Path) -> None:
    elsa, template = m.packed(m.save(m.mlp(), tmp_path / "m.onnx"), tmp_path)
    other = m.save(m.conv_bn(), tmp_path / "other.onnx")
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(elsa.read_bytes()[:-100])
    broken = tmp_path / "broken.safetensors"
    content = bytearray(elsa.read_bytes())
    content[-50] ^= 1
    broken.write_bytes(content)
    before = {p.name for p in tmp_path.iterdir()}
    out = tmp_path / "out.onnx"
    for extra in ([], ["--sparse"], ["--external-data"], ["--fold-batch-norm"]):
        for file, graph in ((elsa, other), (elsa, elsa), (cut, template), (broken, template)):
            result = run(file, "--onnx", graph, "--level", 1, "-o", out, *extra)
            assert_refused(result, tmp_path, before)
    assert_refused(run(elsa, "--onnx", other, "--all-levels", "-o", out), tmp_path, before)
    result = run(elsa, "--onnx", template, "--level", 9, "-o", out)
    assert_refused(result, tmp_path, before, 2)
    result = run(tmp_path / "gone", "--onnx", template, "--level", 1, "-o", out)
    assert_refused(result, tmp_path, before, 1)


def test_an_output_is_replaced_only_by_force(tmp_path: Path) -> None:
    elsa, template = m.packed(m.save(m.mlp(), tmp_path / "m.onnx"), tmp_path)
    for extra in (["--level", 1], ["--level", 1, "--external-data"], ["--all-levels"]):
        out = tmp_path / "out.onnx"
        out.write_bytes(b"mine")
        before = {p.name for p in tmp_path.iterdir()}
        assert_refused(run(elsa, "--onnx", template, "-o", out, *extra), tmp_path, before, 1)
        assert out.read_bytes() == b"mine"
        assert run(elsa, "--onnx", template, "-o", out, "--force", *extra).exit_code == 0
        onnx.checker.check_model(out)
        (tmp_path / "out.onnx.data").unlink(missing_ok=True)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--level", 1, "--sparsity", 90],
        ["--level", 1, "--all-levels"],
        ["--all-levels", "--sparse"],
        ["--level", 1, "--level-input"],
        ["--level", "first"],
    ],
)
def test_contradicting_options_are_a_usage_error(tmp_path: Path, arguments: list[Any]) -> None:
    elsa, template = m.packed(m.save(m.mlp(), tmp_path / "m.onnx"), tmp_path)
    result = run(elsa, "--onnx", template, "-o", tmp_path / "out.onnx", *arguments)
    assert result.exit_code == 2
    assert not (tmp_path / "out.onnx").exists()


@pytest.mark.parametrize("options", [{}, {"fold": True}, {"sparse": True}])
def test_changed_counters_are_noticed_without_checksums(tmp_path: Path, options: Any) -> None:
    elsa, template = m.packed(m.save(m.mlp(), tmp_path / "m.onnx"), tmp_path)
    with elsa_format.open(elsa) as file:
        name = min(file.nested)
        info, start = file.tensors[name], file.file_size - file.data_size
    damaged = bytearray(elsa.read_bytes())
    words = np.frombuffer(damaged, np.uint32, info.elements, start + info.start)
    words &= ~np.uint32(3)
    elsa.write_bytes(damaged)
    out = tmp_path / "out.onnx"
    with pytest.raises(CountMismatch, match=name):
        onnx_export(elsa, template, out, level=1, verify=False, **options)
    assert not out.exists()
