"""elsa-export --web: a directory that a page loads, and elsa-fetch."""

import json
import urllib.parse
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_models as m
import onnxruntime
import pytest
from click.testing import CliRunner
from elsa_converters import onnx as converter
from internals import export

import elsa_format

FILES = ["config.json", "elsa-files.json", "model.ship.safetensors", "onnx/model.onnx"]


def files(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def run_web(folder: Path, level: Any, feeds: Any) -> list[Any]:
    """What a page does: the graph, and each tensor of the level as a file of its own."""
    options = onnxruntime.SessionOptions()
    with elsa_format.open(folder / "model.ship.safetensors") as file:
        tensors = file.load(level)
    names = ["elsa." + urllib.parse.quote(name, safe="!'()*-._~") for name in tensors]
    data = [np.ascontiguousarray(array).tobytes() for array in tensors.values()]
    sizes = [len(one) for one in data]
    options.add_external_initializers_from_files_in_memory(names, data, sizes)
    graph = (folder / "onnx" / "model.onnx").read_bytes()
    session = onnxruntime.InferenceSession(graph, options)
    return list(session.run(None, feeds))


def test_every_level_has_the_bits_of_python(tmp_path: Path) -> None:
    elsa, template = m.packed(m.save(m.mlp(), tmp_path / "m.onnx"), tmp_path)
    out = tmp_path / "www" / "net"
    arguments = [str(elsa), "--onnx", str(template), "--web", "-o", str(out)]
    result = CliRunner().invoke(export, arguments)
    assert result.exit_code == 0, result.output
    assert "all levels" in result.output
    assert files(out) == FILES
    feeds = {"x": m.weights(2, 16)}
    for level in (1, 2, 3, "dense"):
        expected = converter.session(elsa, template, level=level).run(None, feeds)
        for found, wanted in zip(run_web(out, level, feeds), expected, strict=True):
            assert found.tobytes() == wanted.tobytes()
    config = json.loads((out / "config.json").read_text())
    assert config["transformers.js_config"] == {"dtype": "fp32"}
    assert CliRunner().invoke(export, arguments).exit_code == 1  # it exists
    assert CliRunner().invoke(export, [*arguments, "--force"]).exit_code == 0
    assert files(out) == FILES


def test_a_model_directory_keeps_its_side_files(tmp_path: Path) -> None:
    elsa, _ = m.packed(m.save(m.mlp(), tmp_path / "m.onnx"), tmp_path)
    source, out = tmp_path / "net", tmp_path / "web"
    (source / "onnx").mkdir(parents=True)
    elsa.rename(source / "model.safetensors")
    (source / "config.json").write_text('{"model_type": "bert", "layer_norm_eps": 1e-12}')
    (source / "tokenizer.json").write_text("{}")
    (tmp_path / "m.onnx").rename(source / "onnx" / "model.onnx")
    converter.export_web(source, source / "onnx" / "model.onnx", out)
    assert files(out) == sorted([*FILES, "tokenizer.json"])
    config = json.loads((out / "config.json").read_text())
    assert config["model_type"] == "bert"
    assert config["layer_norm_eps"] == 1e-12
    assert config["transformers.js_config"] == {"dtype": "fp32"}
    phone = tmp_path / "phone"
    assert elsa_format.fetch(out, phone, level=1).level == 1
    assert files(phone) == files(out)
    assert (phone / "onnx" / "model.onnx").read_bytes() == (out / FILES[-1]).read_bytes()
    graph = onnx.load(out / FILES[-1], load_external_data=False).graph
    places = {t.name: t.external_data[0].value for t in graph.initializer if t.data_location}
    with elsa_format.open(source / "model.safetensors") as file:
        assert places == {n: f"elsa.{urllib.parse.quote(n, safe='')}" for n in file.tensors}


@pytest.mark.parametrize("options", [["--level", "1"], ["--all-levels"], ["--sparse"], ["--fast"]])
def test_options_that_do_not_belong_to_it(tmp_path: Path, options: list[str]) -> None:
    elsa, template = m.packed(m.save(m.mlp(), tmp_path / "m.onnx"), tmp_path)
    arguments = [str(elsa), "--onnx", str(template), "--web", "-o", str(tmp_path / "www")]
    assert CliRunner().invoke(export, [*arguments, *options]).exit_code == 2
    assert not (tmp_path / "www").exists()


def test_a_template_of_other_weights_leaves_nothing(tmp_path: Path) -> None:
    elsa, _ = m.packed(m.save(m.mlp(), tmp_path / "m.onnx"), tmp_path)
    other = m.save(m.mlp(), tmp_path / "other.onnx")
    model = onnx.load(other)
    model.graph.initializer[0].raw_data = (
        bytes(len(model.graph.initializer[0].raw_data))[:-1] + b"?"
    )
    onnx.save(model, other)
    with pytest.raises(elsa_format.ElsaError):
        converter.export_web(elsa, other, tmp_path / "www")
    assert not (tmp_path / "www").exists()
    source = tmp_path / "net"
    source.mkdir()
    (source / "config.json").write_text("[1]")
    elsa.rename(source / "model.safetensors")
    with pytest.raises(elsa_format.ElsaError, match="JSON object"):
        converter.export_web(source, m.save(m.mlp(), other), tmp_path / "www")
