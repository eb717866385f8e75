"""A template must be of the file's network: names, shapes, dtypes and shared values."""

from pathlib import Path

import numpy as np
import onnx
import onnx_models as m
import pytest
from elsa_converters.onnx import (
    OnnxCheckpoint,
    TemplateMismatch,
    export,
    export_all_levels,
    session,
    write_template,
)
from elsa_converters.onnx._fold import fold_batch_norm
from onnx import ModelProto, TensorProto, numpy_helper

import elsa_format


def folded(proto: ModelProto, *, keep_names: bool = True) -> ModelProto:
    """What torch's exporter makes of a model: batch norm gone, the weights' names kept."""
    arrays = {t.name: numpy_helper.to_array(t) for t in proto.graph.initializer}
    result = ModelProto()
    result.CopyFrom(proto)
    del result.graph.initializer[:]
    assert fold_batch_norm(result, arrays) == 2
    result.graph.initializer.extend(m.tensor(name, array) for name, array in arrays.items())
    return result


def test_batch_norm_folded_into_the_template_is_refused(tmp_path: Path) -> None:
    proto = m.conv_bn()
    elsa = m.write_with_statistics(tmp_path / "net.safetensors", proto)
    template = m.save(folded(proto), tmp_path / "folded.onnx")
    for call in (export, export_all_levels):
        options = {"level": 1} if call is export else {}
        with pytest.raises(TemplateMismatch, match=r"nothing") as caught:
            call(elsa, template, tmp_path / "out.onnx", **options)
        assert {row[0] for row in caught.value.rows} >= {"n1.mean", "n1.var", "n2.mean", "n2.var"}
    with pytest.raises(TemplateMismatch):
        session(elsa, template, level=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folded.onnx", "net.safetensors"]


def test_changed_values_under_the_same_names_are_refused(tmp_path: Path) -> None:
    """Even if all names are there: the kernel of a folded convolution is another one."""
    proto = m.conv_bn()
    elsa = m.write_with_statistics(tmp_path / "net.safetensors", proto)
    changed = {t.name: t for t in folded(proto).graph.initializer}
    for t in proto.graph.initializer:
        if t.name in changed:
            t.CopyFrom(changed[t.name])
    template = m.save(proto, tmp_path / "changed.onnx")
    for call in (export, export_all_levels):
        options = {"level": 1} if call is export else {}
        with pytest.raises(TemplateMismatch, match="values differ") as caught:
            call(elsa, template, tmp_path / "out.onnx", **options)
        assert {row[0] for row in caught.value.rows} == {"c1.w", "c2.w"}
    assert not (tmp_path / "out.onnx").exists()


def test_a_shared_value_that_differs_in_one_bit_is_refused(tmp_path: Path) -> None:
    proto = m.mlp()
    elsa, _ = m.packed(m.save(proto, tmp_path / "m.onnx"), tmp_path)
    bias = next(t for t in proto.graph.initializer if t.name == "b1")
    raw = bytearray(bias.raw_data)
    raw[8] ^= 1
    bias.raw_data = bytes(raw)
    template = m.save(proto, tmp_path / "bit.onnx")
    with pytest.raises(TemplateMismatch, match=r"'b1'.* at 2, 1 values differ"):
        export(elsa, template, tmp_path / "out.onnx", level=1)


def test_the_original_model_is_a_template(tmp_path: Path) -> None:
    source = m.save(m.mlp(), tmp_path / "m.onnx")
    elsa, template = m.packed(source, tmp_path)
    export(elsa, source, tmp_path / "a.onnx", level=2)
    export(elsa, template, tmp_path / "b.onnx", level=2)
    assert (tmp_path / "a.onnx").read_bytes() == (tmp_path / "b.onnx").read_bytes()


def test_a_template_works_without_the_file_beside_it(tmp_path: Path) -> None:
    elsa, template = m.packed(m.save(m.mlp(), tmp_path / "m.onnx"), tmp_path)
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    template.rename(moved / "t.onnx")
    export(elsa, moved / "t.onnx", tmp_path / "out.onnx", level=1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.CopyFrom(m.tensor("b1", m.weights(41))),
            r"F32 \[41\], the ELSA file F32 \[40\]",
        ),
        (
            lambda t: t.CopyFrom(m.tensor("b1", m.weights(40, dtype=np.float64))),
            r"F64 \[40\], the ELSA file F32",
        ),
        (lambda t: setattr(t, "name", "other"), r"'b1': the template has nothing"),
        (
            lambda t: t.CopyFrom(
                TensorProto(name="b1", data_type=22, dims=[40], raw_data=bytes(20))
            ),
            r"'b1': INT4 cannot be stored",
        ),
    ],
)
def test_other_shapes_dtypes_and_names_are_refused(tmp_path, change, message) -> None:
    proto = m.mlp()
    elsa, _ = m.packed(m.save(proto, tmp_path / "m.onnx"), tmp_path)
    for t in proto.graph.initializer:
        if t.name == "b1":
            change(t)
    for node in proto.graph.node:  # so that a renamed one is still read
        for index, name in enumerate(node.input):
            if name == "b1" and "other" in {t.name for t in proto.graph.initializer}:
                node.input[index] = "other"
    template = tmp_path / "changed.onnx"
    template.write_bytes(proto.SerializeToString())
    with pytest.raises(elsa_format.FormatError, match=message):
        export(elsa, template, tmp_path / "out.onnx", level=1)
    assert not (tmp_path / "out.onnx").exists()


def test_the_table_names_every_difference(tmp_path: Path) -> None:
    elsa, _ = m.packed(m.save(m.mlp(), tmp_path / "m.onnx"), tmp_path)
    template = m.save(m.conv_bn(), tmp_path / "other.onnx")
    with pytest.raises(TemplateMismatch) as caught:
        export(elsa, template, tmp_path / "out.onnx", level=1)
    lines = caught.value.table().splitlines()
    assert len(lines) == 4
    assert lines[1].split() == ["w1", "nothing", "F32", "[16,", "40]"]


def test_integers_the_graph_does_not_use_may_be_missing(tmp_path: Path) -> None:
    proto = m.mlp()
    arrays = {t.name: numpy_helper.to_array(t) for t in proto.graph.initializer}
    arrays["steps"] = np.array([7])
    elsa = tmp_path / "net.safetensors"
    elsa_format.pack(arrays, elsa, sparsities=[90])
    template = m.save(proto, tmp_path / "net.onnx")
    export(elsa, template, tmp_path / "out.onnx", level=1)
    assert "steps" not in m.initializers(tmp_path / "out.onnx")


def test_a_template_stands_beside_or_above_its_file(tmp_path: Path) -> None:
    source = m.save(m.mlp(), tmp_path / "m.onnx")
    (tmp_path / "data").mkdir()
    (tmp_path / "other").mkdir()
    elsa = tmp_path / "data" / "net.safetensors"
    checkpoint = OnnxCheckpoint(source)
    elsa_format.pack(checkpoint, elsa, sparsities=[90])
    write_template(checkpoint.model, tmp_path / "net.onnx", elsa)
    onnx.checker.check_model(tmp_path / "net.onnx")
    m.run(tmp_path / "net.onnx", {"x": m.weights(2, 16)})
    with pytest.raises(elsa_format.UnsafePath):
        checkpoint.write_template(tmp_path / "other" / "net.onnx", elsa)


def test_a_template_cannot_be_packed(tmp_path: Path) -> None:
    _, template = m.packed(m.save(m.mlp(), tmp_path / "m.onnx"), tmp_path)
    with pytest.raises(elsa_format.AlreadyPacked, match="is a template"):
        OnnxCheckpoint(template)


def test_a_tensor_that_the_graph_does_not_read_is_no_difference(tmp_path: Path) -> None:
    proto = m.mlp()
    proto.graph.initializer.append(m.tensor("spare", m.weights(3, 3)))
    arrays = {t.name: numpy_helper.to_array(t) for t in proto.graph.initializer}
    elsa = tmp_path / "net.safetensors"
    elsa_format.pack(arrays, elsa, sparsities=[90])
    template = m.save(proto, tmp_path / "net.onnx")
    export(elsa, template, tmp_path / "out.onnx", level=1)
    onnx.checker.check_model(tmp_path / "out.onnx")
