"""elsa-export as a user runs it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import onnx
import onnx_models as m
import pytest
from click.testing import CliRunner
from elsa_converters import onnx as converter
from internals import _export as export_module
from internals import _writer as model_writer
from internals import bench, export, import_line, main

import elsa_format


def test_one_level_and_all_levels(tmp_path: Path) -> None:
    elsa, template = m.packed(m.save(m.mlp(), tmp_path / "m.onnx"), tmp_path)
    for name, options in {
        "two.onnx": ["--sparsity", "80"],
        "small.onnx": ["--level", "2", "--sparse"],
        "levels.onnx": ["--all-levels"],
        "input.onnx": ["--all-levels", "--level-input"],
    }.items():
        arguments = [str(elsa), "--onnx", str(template), *options, "-o", str(tmp_path / name)]
        result = CliRunner().invoke(export, arguments)
        assert result.exit_code == 0, result.output
        onnx.checker.check_model(tmp_path / name)
    feeds = {"x": m.weights(2, 16)}
    expected = m.run(converter.session(elsa, template, level=2), feeds)
    m.assert_same(m.run(tmp_path / "two.onnx", feeds), expected)
    m.assert_same(m.run(tmp_path / "small.onnx", feeds), expected)


@pytest.mark.parametrize("value", ["80", "80%", "0.8", "1:5", "100", "1", "1.0", "-5", "nan"])
def test_sparsities_are_those_of_all_commands(tmp_path: Path, value: str) -> None:
    """The densest of 95, 80 and 50 % with as many zeros, from Python and from the command."""
    elsa, template = m.packed(m.save(m.mlp(), tmp_path / "m.onnx"), tmp_path)
    out = tmp_path / "out.onnx"
    arguments = [str(elsa), "--onnx", str(template), f"--sparsity={value}", "--json"]
    result = CliRunner().invoke(export, [*arguments, "-o", str(out)])
    if "8" in value or ":" in value:
        assert json.loads(result.stdout)["level"] == 2
        assert converter.export(elsa, template, out, sparsity=value, force=True) == 2
        return
    assert result.exit_code == 2
    with pytest.raises(elsa_format.InfeasibleLevels, match="sparsity"):
        converter.export(elsa, template, out, sparsity=value)
    assert not out.exists()


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Model directories: an ELSA file, shards, a delivery file, its beginning; and a template."""
    elsa, template = m.packed(m.save(m.mlp(), tmp_path / "m.onnx"), tmp_path)
    for folder in ("file", "shards"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text("{}")
    (tmp_path / "file" / "model.safetensors").write_bytes(elsa.read_bytes())
    index = tmp_path / "shards" / "model.safetensors.index.json"
    elsa_format.extract(elsa, index, level=3, keep_levels=True, max_shard_size=3000)
    elsa_format.ship(tmp_path / "file", tmp_path / "ship")
    elsa_format.ship(tmp_path / "shards", tmp_path / "shards-ship")
    elsa_format.fetch(tmp_path / "ship", tmp_path / "begun", level=1)
    return tmp_path, template


def test_model_directories(folders: tuple[Path, Path]) -> None:
    """As every other command takes them, whatever their weights are stored as."""
    tmp_path, template = folders
    feeds = {"x": m.weights(2, 16)}
    expected = m.run(converter.session(tmp_path / "file", template, level=1), feeds)
    for folder in ("file", "shards", "ship", "shards-ship", "begun"):
        out = tmp_path / f"{folder}.onnx"
        words = [str(tmp_path / folder), "--onnx", str(template), "--level", "1", "-o", str(out)]
        result = CliRunner().invoke(export, words)
        assert result.exit_code == 0, result.output
        m.assert_same(m.run(out, feeds), expected)


def test_all_levels_of_a_model_directory(folders: tuple[Path, Path]) -> None:
    """The graph points into the directory; what is coded cannot be pointed into."""
    tmp_path, template = folders
    feeds = {"x": m.weights(2, 16)}
    for folder, code in {"file": 0, "shards": 0, "ship": 2, "shards-ship": 2}.items():
        out = tmp_path / f"{folder}.onnx"
        words = [str(tmp_path / folder), "--onnx", str(template), "--all-levels", "-o", str(out)]
        result = CliRunner().invoke(export, words)
        assert result.exit_code == code, result.output
        assert out.exists() == (code == 0)
        if code:
            assert "elsa-extract --restore" in result.output
            continue
        for level in (1, 3):
            expected = m.run(converter.session(tmp_path / "file", template, level=level), feeds)
            m.assert_same(m.run(converter.all_levels_session(out, level=level), feeds), expected)


@pytest.mark.parametrize(
    ("folder", "levels"),
    [("file", [1, 2, 3, "dense"]), ("begun", [1])],
)
def test_measure_a_model_directory(
    folders: tuple[Path, Path], folder: str, levels: list[int | str]
) -> None:
    """Of the beginning of a delivery file the levels that are there."""
    tmp_path, template = folders
    words = [str(tmp_path / folder), "--onnx", str(template), "--seconds=0", "--json", "-q"]
    result = CliRunner().invoke(bench, words)
    assert result.exit_code == 0, result.output
    assert [row["level"] for row in json.loads(result.stdout)] == levels
    words = [*words[:3], "--max-latency", "10s", "-o", str(tmp_path / "quick.onnx")]
    result = CliRunner().invoke(export, words)
    assert result.exit_code == 0, result.output
    assert f"level {levels[-1]}" in result.output


def test_from_a_pipe_to_a_pipe(tmp_path: Path) -> None:
    elsa, template = m.packed(m.save(m.mlp(), tmp_path / "m.onnx"), tmp_path)
    program = f"{import_line('_start')}; _start.export()"
    arguments = ["-", "--onnx", str(template), "--level", "1", "-o", "-"]
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        input=elsa.read_bytes(),
        capture_output=True,
        check=True,
    )
    converter.export(elsa, template, tmp_path / "one.onnx", level=1)
    assert done.stdout == (tmp_path / "one.onnx").read_bytes()


def test_help_needs_no_onnx() -> None:
    program = f"import sys; {import_line('_export_command')}; print('onnx' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"


def test_large_models_get_external_data_by_themselves(tmp_path: Path, monkeypatch) -> None:
    elsa, template = m.packed(m.save(m.mlp(), tmp_path / "m.onnx"), tmp_path)
    monkeypatch.setattr(export_module, "LARGEST_FILE", 3000)
    monkeypatch.setattr(model_writer, "LARGEST_FILE", 3000)
    converter.export(elsa, template, tmp_path / "out.onnx", level=3)
    assert (tmp_path / "out.onnx.data").stat().st_size >= 16 * 40 * 4
    onnx.checker.check_model(tmp_path / "out.onnx")
    converter.export(elsa, template, tmp_path / "small.onnx", level=1, sparse=True)
    assert not (tmp_path / "small.onnx.data").exists()


def test_models_above_2_gb_are_read(tmp_path: Path) -> None:
    """A hole in a file stands for the data, so the test takes no disk."""
    rows = 1 << 19
    size = rows * 1100 * 4
    assert size > 2**31
    with (tmp_path / "big.bin").open("wb") as file:
        file.truncate(size)
    w = onnx.TensorProto(name="w", data_type=1, dims=[rows, 1100])
    w.data_location = onnx.TensorProto.EXTERNAL
    w.external_data.add(key="location", value="big.bin")
    main = m.graph(
        [onnx.helper.make_node("Gather", ["w", "i"], ["y"])],
        [m.value("i", [], 7)],
        [m.value("y", [1100])],
        [w],
    )
    path = tmp_path / "m.onnx"
    path.write_bytes(m.model(main).SerializeToString())
    checkpoint = converter.OnnxCheckpoint(path)
    assert checkpoint.tensors["w"].nbytes == size
    assert checkpoint.nestable("w")
    assert next(checkpoint.blocks("w", 1 << 20)).size == 1 << 20


def test_a_template_that_cannot_point_into_the_file_is_refused_before_packing(
    tmp_path: Path,
) -> None:
    (tmp_path / "elsewhere").mkdir()
    model, packed = m.save(m.mlp(), tmp_path / "m.onnx"), tmp_path / "net.safetensors"
    template = tmp_path / "elsewhere" / "net.onnx"
    with pytest.raises(elsa_format.FormatError):
        elsa_format.pack(model, packed, sparsities=[50], template=template)
    assert not packed.exists()


def test_models_name_files_in_utf_8(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    elsa, template = m.packed(m.save(m.mlp(), tmp_path / "m.onnx"), tmp_path)
    strange = b"\xff".decode(errors="surrogateescape")
    os.link(elsa, f"net{strange}")
    before = set(os.listdir())
    one = ("export", str(elsa), "--onnx", str(template), "-l", "1", "-o", f"{strange}.onnx")
    levels = ("export", f"net{strange}", "--onnx", str(template), "--all-levels", "-o", "l.onnx")
    pack = ("pack", "m.onnx", "--sparsities", "9", "-o", strange, "--template", "t.onnx")
    for words, code in ((one, 0), ((*one, "--external-data", "-f"), 2), (levels, 2), (pack, 2)):
        done = CliRunner().invoke(main, words)
        assert done.exit_code == code, done.output
        assert done.stderr.count("\n") == 1
    assert set(os.listdir()) - before == {f"{strange}.onnx"}


def test_a_level_by_its_name(tmp_path: Path) -> None:
    elsa, template = m.packed(m.save(m.mlp(), tmp_path / "m.onnx"), tmp_path)
    with elsa_format.open(elsa) as file:
        names = [level.name for level in file.levels]
    feeds = {"x": m.weights(2, 16)}
    expected = m.run(converter.session(elsa, template, level=2), feeds)
    session = converter.session(elsa, template, level=names[1])
    assert session.level == 2
    m.assert_same(m.run(session, feeds), expected)
    assert converter.export(elsa, template, tmp_path / "two.onnx", level=names[1]) == 2
    converter.export_all_levels(elsa, template, tmp_path / "levels.onnx")
    for level in (2, names[1], "2"):
        found = converter.all_levels_session(tmp_path / "levels.onnx", level=level)
        m.assert_same(m.run(found, feeds), expected)
    for level in (9, "nothing", True):
        with pytest.raises(elsa_format.NoSuchLevel, match=names[1]):
            converter.all_levels_session(tmp_path / "levels.onnx", level=level)
    with pytest.raises(converter.InvalidOnnx, match="not a graph of all levels"):
        converter.all_levels_session(tmp_path / "two.onnx", level=1)
