"""A template must be of the file's network: names, shapes, dtypes and shared values."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_models as m
import pytest
from click.testing import CliRunner
from elsa_converters.onnx import (
    OnnxCheckpoint,
    TemplateMismatch,
    export,
    export_all_levels,
    session,
    write_template,
)
from internals import bench, fold_batch_norm
from internals import export as cli_export
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


def _kinds(folder: Path, elsa: Path, level: int) -> list[Path]:
    """A level in every kind of file that holds it: level files, delivery files, their shards."""
    found = []
    for layout in ("dense", "bitmask", "csr"):
        for name in (f"{layout}.safetensors", f"{layout}.safetensors.index.json"):
            size = 3000 if name.endswith("json") else None
            elsa_format.extract(
                elsa, folder / name, level=level, layout=layout, max_shard_size=size
            )
            found.append(folder / name)
    index = folder / "net.safetensors.index.json"
    elsa_format.extract(elsa, index, level=3, keep_levels=True, max_shard_size=3000)
    for source, name in ((elsa, "ship.safetensors"), (index, "ship.safetensors.index.json")):
        elsa_format.ship(source, folder / name)
        fetched = folder / "fetched" / name
        fetched.parent.mkdir(exist_ok=True)
        elsa_format.fetch(folder / name, fetched, level=level)
        found += [folder / name, fetched]
    return found


@pytest.mark.parametrize(
    ("proto", "statistics"),
    [(m.mlp(), False), (m.mlp(dtype=np.float16), False), (m.conv_bn(), True)],
    ids=["float32", "float16", "statistics"],
)
def test_the_original_model_is_a_template_of_any_file_of_a_level(tmp_path, proto, statistics):
    source = m.save(proto, tmp_path / "m.onnx")
    if statistics:
        elsa = m.write_with_statistics(tmp_path / "net.safetensors", proto)
    else:
        elsa, _ = m.packed(source, tmp_path)
    wrong = ModelProto()
    wrong.CopyFrom(proto)
    for t in wrong.graph.initializer:
        if len(t.dims) > 1:
            array = numpy_helper.to_array(t)
            t.CopyFrom(m.tensor(t.name, np.ascontiguousarray(array[::-1])))
    other = m.save(wrong, tmp_path / "wrong.onnx")
    export(elsa, source, tmp_path / "expected.onnx", level=2)
    expected = m.initializers(tmp_path / "expected.onnx")
    for number, path in enumerate(_kinds(tmp_path, elsa, 2)):
        out = tmp_path / f"{number}.onnx"
        export(path, source, out, level=2)
        found = m.initializers(out)
        assert {name: array.tobytes() for name, array in found.items()} == {
            name: array.tobytes() for name, array in expected.items()
        }, path.name
        with pytest.raises(TemplateMismatch, match="values differ") as caught:
            export(path, other, tmp_path / "out.onnx", level=2)
        assert len(caught.value.rows) == 2
        assert not (tmp_path / "out.onnx").exists()


def test_the_original_model_is_a_template_where_the_dense_network_is_a_level(tmp_path) -> None:
    source = m.save(m.mlp(), tmp_path / "m.onnx")
    elsa, _ = m.packed(source, tmp_path)
    kept = tmp_path / "kept.safetensors"
    elsa_format.extract(elsa, kept, level=2, keep_levels=True)
    export(elsa, source, tmp_path / "expected.onnx", level=2)
    export(kept, source, tmp_path / "out.onnx", level="dense")
    export_all_levels(kept, source, tmp_path / "all.onnx")
    found, expected = (
        {name: array.tobytes() for name, array in m.initializers(tmp_path / name).items()}
        for name in ("out.onnx", "expected.onnx")
    )
    assert found == expected


def test_what_a_template_says_of_itself_is_not_passed_on(tmp_path: Path) -> None:
    """An exported level serves as template; what is made with it is not that level."""
    elsa, template = m.packed(m.save(m.mlp(), tmp_path / "m.onnx"), tmp_path)
    level, every = tmp_path / "level.onnx", tmp_path / "all.onnx"
    export(elsa, template, level, level=3)
    proto = onnx.load(level)
    proto.metadata_props.add(key="elsa_levels", value="old")
    m.save(proto, level)
    export_all_levels(elsa, level, every)
    told = [(entry.key, entry.value) for entry in onnx.load(every).metadata_props]
    assert [key for key, _ in told] == ["elsa_levels"]
    assert "old" not in told[0][1]
    export(elsa, level, tmp_path / "dense.onnx", level="dense")
    assert not onnx.load(tmp_path / "dense.onnx").metadata_props


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


@pytest.mark.parametrize(
    ("command", "options", "most"),
    [(cli_export, ["-l1", "-o", "out.onnx"], 11), (bench, ["-q"], 0)],
)
def test_commands_show_the_first_differences(
    command: Any, options: list[str], most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error, which says how many there are, stays on the screen."""
    monkeypatch.chdir(tmp_path)
    layers = {f"layer{n}.weight": m.weights(4, 4) for n in range(120)}
    elsa_format.pack(layers, "net.safetensors", sparsities=[50])
    m.save(m.mlp(), tmp_path / "m.onnx")
    result = CliRunner().invoke(command, ["net.safetensors", "--onnx", "m.onnx", *options])
    assert result.exit_code == 3
    lines = result.output.splitlines()
    assert len(lines) == most + 1
    assert lines[-1].startswith("error: m.onnx: tensor ")
    assert lines[-1].endswith(" (and 119 more)")


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


@pytest.mark.parametrize("kind", ["delivery", "bitmask", "csr"])
def test_what_does_not_hold_tensors_as_they_are_cannot_be_pointed_into(tmp_path, kind) -> None:
    elsa, _ = m.packed(m.save(m.mlp(), tmp_path / "m.onnx"), tmp_path)
    coded = tmp_path / "coded.safetensors"
    if kind == "delivery":
        elsa_format.ship(elsa, coded)
    else:
        elsa_format.extract(elsa, coded, level=1, layout=kind)
    checkpoint = OnnxCheckpoint(tmp_path / "m.onnx")
    with pytest.raises(elsa_format.InvalidOption, match="elsa-extract"):
        checkpoint.write_template(tmp_path / "coded.onnx", coded)
    assert not (tmp_path / "coded.onnx").exists()


def test_a_template_of_a_model_directory_points_to_its_file(tmp_path: Path) -> None:
    elsa, template = m.packed(m.save(m.mlp(), tmp_path / "m.onnx"), tmp_path)
    expected = m.run(template, {"x": m.weights(2, 16)})
    folder = tmp_path / "model"
    folder.mkdir()
    elsa.rename(folder / "model.safetensors")
    OnnxCheckpoint(tmp_path / "m.onnx").write_template(tmp_path / "t.onnx", folder)
    m.assert_same(m.run(tmp_path / "t.onnx", {"x": m.weights(2, 16)}), expected)


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
