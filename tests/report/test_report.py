"""The page as bytes: what is embedded, how it is escaped, what is read, how it is written."""

import base64
import html.parser
import io
import json
import os
import re
import subprocess
import sys
import tracemalloc
import zlib
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner
from conftest import HOSTILE
from internals import DTYPES, _survey
from internals import inspect_command as command

import elsa_format as elsa
from elsa_report import render, write_report


class Page(html.parser.HTMLParser):
    """What a browser would make of the page: its elements and the embedded document."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}
        self._open = ""
        self.feed(content)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.tags.append((tag, attributes))
        self._open = attributes.get("id") or tag

    def handle_data(self, data: str) -> None:
        self.texts[self._open] = self.texts.get(self._open, "") + data

    def handle_endtag(self, tag: str) -> None:
        self._open = ""

    @property
    def document(self) -> Any:
        return json.loads(self.texts["data"])


def report(source: Any, **options: Any) -> Page:
    """The report of a source."""
    sink = io.BytesIO()
    write_report(source, sink, **options)
    return Page(sink.getvalue().decode())


def unpack(text: str, dtype: str) -> np.ndarray:
    """What the page's script reads."""
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype)


def spoil_data(path: Path) -> None:
    """Change the last byte, which no header shows."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_the_page_says_what_the_library_says(rich: Path) -> None:
    document = report(rich).document
    with elsa.open(rich) as file:
        assert document["file"]["size"] == file.file_size == rich.stat().st_size
        assert document["file"]["weights"] == file.nested_weights
        assert document["file"]["bits"] == file.bits
        for t, (shown, level) in enumerate(zip(document["levels"], file.levels, strict=True), 1):
            assert (shown["name"], shown["kept"]) == (level.name, level.nonzero)
            assert shown["metrics"] == level.metrics
            assert shown["sizes"] == [file.size(t, x) for x in ("dense", "bitmask", "csr")]
        assert {x["name"]: tuple(x["kept"]) for x in document["layers"]} == dict(file.nested)
        assert document["dense"]["metrics"] == {"accuracy": 0.96}
    assert [other[:2] for other in document["others"]] == [
        ["step", "shared"],
        ["dense/bias", "shared"],
        ["bn/mean", "per-level"],
    ]
    assert document["metadata"] == [["format", "pt", 2]]


def test_a_metric_has_its_error_and_direction_and_what_was_measured_goes_first(rich: Path) -> None:
    elsa.record(rich, None, {1: {"loss": elsa.Metric(2.0, "lower", 10, 0.5)}})
    recorded = report(rich).document
    assert recorded["levels"][0]["errors"]["loss"] == 0.5
    assert recorded["better"] == {"loss": "lower"}
    assert len(recorded["estimates"]) == len(recorded["levels"]) + 1
    metrics = {
        "loss": {"value": 1.5, "better": "lower", "samples": 10, "error": None},
        "__proto__": {"value": 3.0, "better": "higher", "samples": 10, "error": 0.1},
    }
    document = report(rich, measured=[{"level": 1, "metrics": metrics}]).document
    first = document["levels"][0]
    assert (first["metrics"]["loss"], first["metrics"]["__proto__"]) == (1.5, 3.0)
    assert first["errors"] == {"__proto__": 0.1}
    assert document["better"] == {"loss": "lower", "__proto__": "higher"}


def test_names_cannot_leave_the_embedded_document(make_network: Callable[..., Path]) -> None:
    path = make_network(names=HOSTILE, hostile=True)
    plain, hostile = report(make_network()), report(path)
    assert [tag for tag, _ in hostile.tags] == [tag for tag, _ in plain.tags]
    assert {layer["name"] for layer in hostile.document["layers"]} == set(HOSTILE)
    raw = hostile.texts["data"]
    assert not set(raw) & set("<>&\u2028\u2029")


def test_a_hostile_file_name_stays_text(make_network: Callable[..., Path], tmp_path: Path) -> None:
    path = tmp_path / "<b onclick=x>&%%SCRIPT%%\udcff.safetensors"
    os.link(make_network(), path)
    page = report(path)
    assert not [tag for tag, _ in page.tags if tag == "b"]
    assert page.texts["file-name"] == "<b onclick=x>&%%SCRIPT%%\ufffd.safetensors"


def test_nothing_is_loaded_and_only_the_own_script_may_run(rich: Path) -> None:
    page = report(rich)
    for tag, attributes in page.tags:
        assert not attributes.get("src"), tag
        assert (attributes.get("href") or "#").startswith(("#", "data:,")), tag
    policies = [a["content"] for _, a in page.tags if a.get("http-equiv")]
    assert len(policies) == 1
    assert "default-src 'none'" in policies[0]
    assert "unsafe" not in policies[0]


def test_the_header_suffices(rich: Path) -> None:
    spoil_data(rich)
    assert report(rich).document["full"] is None
    with pytest.raises(elsa.ChecksumMismatch):
        report(rich, full=True)


def test_a_stream_that_is_cut_is_refused_as_its_path_is(rich: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(rich.read_bytes()[:-1])
    for source in (cut, io.BytesIO(cut.read_bytes())):
        with pytest.raises(elsa.Truncated):
            report(source)


def test_a_header_suffices_from_a_pipe(rich: Path) -> None:
    class Pipe(io.BytesIO):
        def seekable(self) -> bool:
            return False

    stream = Pipe(rich.read_bytes())
    assert len(report(stream).document["levels"]) == 3
    assert stream.tell() < rich.stat().st_size
    stream.seek(0)
    assert report(stream, full=True).document["full"]["pictures"]


def test_pictures_hold_the_counters(rich: Path) -> None:
    document = report(rich, full=True).document
    with elsa.open(rich) as file:
        for at, layer in enumerate(document["layers"]):
            picture = document["full"]["pictures"][str(at)]
            counters = elsa.read_counters(file.tensor(layer["name"]), file.bits)
            assert (unpack(picture["cells"], "u1") == counters.reshape(-1)).all()
            assert (picture["height"], picture["width"]) == (picture["rows"], picture["cols"])


def test_a_large_picture_keeps_every_share(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    # 2:4, which a picture made of every fourth weight would show as all or nothing.
    counters = np.tile(np.array([0, 1, 0, 2]), (2000, 500))
    weights = rng.standard_normal(counters.shape).astype(np.float32)
    path = tmp_path / "net.safetensors"
    tensors = {"w": elsa.embed_counters(weights, counters, bits=2)}
    specs = [elsa.LevelSpec("1:4"), elsa.LevelSpec("2:4")]
    elsa.write(path, tensors, levels=specs, nested=["w"], bits=2)
    picture = report(path, full=True).document["full"]["pictures"]["0"]
    cells = unpack(picture["cells"], "u1").reshape(512, 512)
    shares = np.bincount(cells.reshape(-1), minlength=3) / cells.size
    assert shares == pytest.approx([0.5, 0.25, 0.25], abs=0.01)


def test_pictures_stay_within_the_budget(
    make_network: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_network(40, shape=(64, 60))
    everything = report(path, full=True).document
    size = sum(len(p["cells"]) * 3 / 4 for p in everything["full"]["pictures"].values())
    assert len(everything["full"]["pictures"]) == 40
    monkeypatch.setattr(_survey, "BUDGET", int(size) // 2)
    document = report(path, full=True).document
    shown = {int(at) for at in document["full"]["pictures"]}
    assert 10 <= len(shown) < 30
    assert sum(len(p["cells"]) * 3 / 4 for p in document["full"]["pictures"].values()) < size / 2
    sizes = [layer["weights"] for layer in document["layers"]]
    assert min(sizes[i] for i in shown) >= max(sizes[i] for i in range(40) if i not in shown)


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    weights = np.full((600, 520), 1.5, np.float32)
    counters = (np.arange(weights.size) % 3).reshape(weights.shape)
    layer = elsa.embed_counters(weights, counters, bits=2)
    path, names = tmp_path / "net.safetensors", [f"layer{i}" for i in range(16)]
    specs = [elsa.LevelSpec("a"), elsa.LevelSpec("b")]
    elsa.write(path, dict.fromkeys(names, layer), levels=specs, nested=names, digests=False)
    tracemalloc.start()
    try:
        write_report(path, tmp_path / "report.html", full=True)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 32 << 20


@pytest.mark.parametrize("name", ["F32", "BF16", "F16", "F64"])
def test_magnitudes_are_binned_as_logarithms_say(name: str) -> None:
    types = {"F32": np.float32, "BF16": ml_dtypes.bfloat16, "F16": np.float16, "F64": np.float64}
    rng = np.random.default_rng(4)
    weights = (rng.standard_normal(5000) * 10 ** rng.uniform(-4, 1, 5000)).astype(types[name])
    weights[:3] = 0
    dtype = DTYPES[name]
    counters = rng.integers(0, 4, 5000).astype(np.uint8)
    found = _survey.count_magnitudes(weights.view(dtype.words), counters, dtype, 2)
    with np.errstate(divide="ignore"):
        exact = np.log2(np.abs(weights.astype(np.float64))) * _survey.PER_OCTAVE
    bins = np.clip(np.floor(exact - _survey.SMALLEST * _survey.PER_OCTAVE), 0, None).astype(int)
    expected = np.zeros_like(found)
    np.add.at(expected, (counters, bins), 1)
    # A bin's edge is irrational: a weight next to it may fall on either side.
    assert np.abs(found - expected).sum() <= 4 if name != "BF16" else True
    assert found.sum() == 5000
    assert (found.sum(1) == np.bincount(counters, minlength=4)).all()


def test_histograms_count_every_weight(rich: Path) -> None:
    document = report(rich, full=True).document
    magnitudes = document["full"]["magnitudes"]
    whole = unpack(magnitudes["network"], "<f8").reshape(4, magnitudes["bins"])
    kept = [level["kept"] for level in document["levels"]]
    assert whole.sum(1)[1:].cumsum().tolist() == kept
    assert whole.sum() == document["file"]["weights"]


def test_a_shard_is_described_by_its_own_counts(rich: Path, tmp_path: Path) -> None:
    content = rich.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    profile = json.loads(header["__metadata__"]["elsa"])
    own = [level["nonzero"] for level in profile["levels"]]
    for level in profile["levels"]:
        level["nonzero"] += 1000
    profile["shard"] = {"number": 1, "of": 2}
    del profile["header"]
    header["__metadata__"]["elsa"] = json.dumps(profile)
    body = json.dumps(header).encode()
    shard = tmp_path / "shard.safetensors"
    shard.write_bytes(len(body).to_bytes(8, "little") + body + content[8 + length :])
    document = report(shard).document
    assert document["file"]["shard"] == [1, 2]
    assert [level["kept"] for level in document["levels"]] == own


@pytest.mark.parametrize("full", [[], ["--full"]])
def test_the_printed_json_makes_the_same_page(rich: Path, tmp_path: Path, full: list[str]) -> None:
    shipped = tmp_path / "net.ship.safetensors"
    elsa.ship(rich, shipped)
    for path in (rich, shipped):
        printed = CliRunner().invoke(command, [str(path), "--json", *full]).stdout
        page = CliRunner().invoke(command, [str(path), "--html", "-", *full]).stdout_bytes
        assert render(json.loads(printed)) == page
        assert ("full" in json.loads(printed)) == bool(full)


@pytest.mark.parametrize("kind", ["--html=-", "--json"])
def test_a_level_file_has_nothing_more_to_read(rich: Path, tmp_path: Path, kind: str) -> None:
    level = tmp_path / "level.safetensors"
    elsa.extract(rich, level, level=1)
    result = CliRunner().invoke(command, [str(level), kind, "--full"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"error: {level}: is a level file; --full is for an ELSA file\n"


@pytest.mark.parametrize("left", ["nothing", "entry point"])
def test_where_the_report_is_not_installed_one_line_says_so(
    rich: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: str
) -> None:
    entry = metadata.EntryPoint("html", "elsa_report:write_report", "elsa.reports")
    found = [entry] if left == "entry point" else []
    monkeypatch.setattr(metadata, "entry_points", lambda **wanted: found)
    monkeypatch.setitem(sys.modules, "elsa_report", None)
    page = tmp_path / "report.html"
    result = CliRunner().invoke(command, [str(rich), "--html", str(page)])
    assert result.exit_code == 1
    assert re.fullmatch(
        r"error: an HTML report needs elsa_report; run: pip install --force-reinstall .+\n",
        result.stderr,
    )
    assert not page.exists()
    assert CliRunner().invoke(command, [str(rich), "--json", "--full"]).exit_code == 0


def test_the_former_name_works_with_a_warning() -> None:
    with pytest.warns(DeprecationWarning, match="is elsa_report.write_report now") as warned:
        from elsa_format.report import write_report as former
    assert former is write_report
    assert warned[0].filename == __file__


def test_the_command_writes_the_page_and_one_line(rich: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    result = CliRunner().invoke(command, [str(rich), "--html", str(page), "--full"])
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr.startswith(f"{page}: ")
    assert result.stderr.count("\n") == 1
    assert Page(page.read_text()).document["full"]


def test_an_existing_page_is_replaced_only_by_force(rich: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text("mine")
    arguments = [str(rich), "--html", str(page)]
    refused = CliRunner().invoke(command, arguments)
    assert refused.exit_code == 1
    assert page.read_text() == "mine"
    assert CliRunner().invoke(command, [*arguments, "--force"]).exit_code == 0
    assert page.read_text().startswith("<!doctype html>")


def test_a_failure_leaves_no_page_behind(rich: Path, tmp_path: Path) -> None:
    spoil_data(rich)
    folder = tmp_path / "out"
    folder.mkdir()
    arguments = [str(rich), "--html", str(folder / "report.html"), "--full"]
    assert CliRunner().invoke(command, arguments).exit_code == 3
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("extra", [["--full"], ["--force"], ["--html", "x.html", "--json"]])
def test_options_that_make_no_sense_together(rich: Path, extra: list[str]) -> None:
    assert CliRunner().invoke(command, [str(rich), *extra]).exit_code == 2


def test_the_page_cannot_replace_the_file_it_describes(rich: Path) -> None:
    content = rich.read_bytes()
    result = CliRunner().invoke(command, [str(rich), "--html", str(rich), "--force"])
    assert result.exit_code == 2
    assert rich.read_bytes() == content


def test_the_page_goes_to_stdout_too(rich: Path) -> None:
    result = CliRunner().invoke(command, [str(rich), "--html", "-"])
    assert result.stdout.startswith("<!doctype html>")
    assert result.stderr == ""


def test_a_report_needs_no_heavy_imports() -> None:
    script = "import sys, elsa_report; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout.split()
    assert not {"matplotlib", "pandas", "jinja2", "jax", "onnx", "scipy"} & set(loaded)
