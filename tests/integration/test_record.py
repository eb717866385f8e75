"""Metrics that are recorded in files, shards, directories and stores: the weights stay."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from internals import find_command

import elsa_format as elsa

ROOT = Path(__file__).parents[2]
RECORDED: Any = {
    1: {"accuracy": elsa.Metric(0.8, "higher", 1000, 0.01), "__proto__": 1.5},
    "80%": {"accuracy": elsa.Metric(0.9, "higher", 1000)},
    "dense": {"loss": np.float32(0.5), "a=b\u202e": 3},
}
INFO = {
    "accuracy": elsa.MetricInfo("higher", 1000, "elsa-format 0.3.0"),
    "loss": elsa.MetricInfo("lower", None, "elsa-format 0.3.0"),  # everybody knows its direction
}


def check(source: Any) -> None:
    """All that `RECORDED` says is there, and the file is valid."""
    profile = elsa.open(source).profile
    assert profile.levels[0].metrics == {"accuracy": 0.8, "__proto__": 1.5}
    assert [level.errors for level in profile.levels] == [{"accuracy": 0.01}, {}, {}]
    assert profile.levels[2].metrics == {"accuracy": 0.9}
    assert profile.dense_metrics == {"loss": 0.5, "a=b\u202e": 3}
    assert profile.metrics == INFO
    assert elsa.verify(source).digests == 3


def data_of(path: Path) -> bytes:
    raw = path.read_bytes()
    return raw[8 + int.from_bytes(raw[:8], "little") :]


def record(source: Any, out: Any = None, **options: Any) -> None:
    elsa.record(source, out, RECORDED, recorded="elsa-format 0.3.0", **options)


def test_a_file_is_as_if_it_had_been_written_so(tmp_path: Path) -> None:
    """ELSA-R-107: byte for byte, so the room that the header has is as it should be, too."""
    words = np.arange(3000, dtype="<u4") % 4 | 0x3F800000
    tensors = {"w": words.view(np.float32), "b": np.ones(5, np.float32)}
    written, recorded = tmp_path / "written.safetensors", tmp_path / "recorded.safetensors"
    metadata = {"format": "pt", "é": "\x1f"}
    fields: Any = {"nested": ["w"], "metadata": metadata, "force": True}
    plain = [elsa.LevelSpec(name, target=0.5) for name in "abc"]
    for length in range(0, 300, 37):
        metadata["pad"] = "x" * length
        elsa.write(recorded, tensors, levels=plain, **fields)
        elsa.record(
            recorded, None, {2: {"x": elsa.Metric(0.25, "lower", 5, 0.5)}, "dense": {"y": 1}}
        )
        level = elsa.LevelSpec("b", target=0.5, metrics={"x": 0.25}, errors={"x": 0.5})
        elsa.write(
            written,
            tensors,
            levels=[plain[0], level, plain[2]],
            dense_metrics={"y": 1},
            metrics={"x": elsa.MetricInfo("lower", 5)},
            **fields,
        )
        assert recorded.read_bytes() == written.read_bytes()


def test_in_place_and_elsewhere(packed: Path, tmp_path: Path) -> None:
    before, out = packed.read_bytes(), tmp_path / "out.safetensors"
    record(packed, out)
    check(out)
    assert packed.read_bytes() == before
    with pytest.raises(elsa.OutputExists):
        record(packed, out)
    stream = io.BytesIO()
    record(io.BytesIO(before), stream)
    assert stream.getvalue() == out.read_bytes()
    if os.name == "posix":
        packed.chmod(0o640)
    record(packed)
    assert packed.read_bytes() == out.read_bytes()
    assert data_of(packed) == before[-len(data_of(packed)) :]
    if os.name == "posix":
        assert packed.stat().st_mode & 0o777 == 0o640
    assert sorted(os.listdir(tmp_path)) == ["net.safetensors", "out.safetensors"]
    identity = packed.stat().st_ino
    record(packed, packed, force=True)  # says nothing new
    assert packed.stat().st_ino == identity


def test_keys_that_are_not_known_stay(tmp_path: Path) -> None:
    """ELSA-R-107."""
    path = tmp_path / "net.safetensors"
    path.write_bytes((ROOT / "spec/vectors/valid/unknown_keys.safetensors").read_bytes())

    def profile() -> dict[str, Any]:
        raw = path.read_bytes()
        header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
        return json.loads(header["__metadata__"]["elsa"])

    before, data = profile(), data_of(path)
    elsa.record(path, None, {1: {"accuracy": 0.5}})
    before["levels"][0]["metrics"]["accuracy"] = 0.5
    before["metrics"] = {"accuracy": {"better": "higher"}}
    before["header"] = profile()["header"]
    assert profile() == before
    assert data_of(path) == data
    elsa.verify(path)


@pytest.fixture
def index(network: dict[str, np.ndarray], tmp_path: Path) -> Path:
    path = tmp_path / "net" / "model.safetensors.index.json"
    path.parent.mkdir()
    elsa.pack(network, path, sparsities=[95, 90, 80], max_shard_size=1200)
    return path


def test_shards_get_new_names(index: Path) -> None:
    def shards() -> dict[str, bytes]:
        return {path.name: data_of(path) for path in sorted(index.parent.glob("*.safetensors"))}

    old = shards()
    record(index)
    check(index)
    new = shards()
    assert len(new) == len(old) > 1
    assert not new.keys() & old.keys()
    assert list(new.values()) == list(old.values())
    elsa.record(index, None, {1: {"accuracy": 0.7}})
    assert len(shards()) == len(old)
    assert elsa.open(index).levels[0].errors == {}  # the error was that of another value
    out = index.parent.parent / "other.safetensors.index.json"
    record(index.parent, out)
    check(out)


def test_a_model_directory(network: dict[str, np.ndarray], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    elsa.pack(network, folder / "model.safetensors", sparsities=[95, 90, 80])
    (folder / "config.json").write_text("{}")
    record(folder, tmp_path / "known")
    check(tmp_path / "known")
    assert (tmp_path / "known" / "config.json").read_text() == "{}"
    record(folder)
    check(folder)
    assert sorted(os.listdir(folder)) == ["config.json", "model.safetensors"]


def test_a_store(packed: Path, index: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    store = fsspec.filesystem("memory")
    store.store.clear()
    store.pipe("/net.safetensors", packed.read_bytes())
    record("memory://net.safetensors")
    check("memory://net.safetensors")
    for path in index.parent.iterdir():
        store.pipe(f"/sharded/{path.name}", path.read_bytes())
    count = len(store.ls("/sharded", detail=False))
    record("memory://sharded/model.safetensors.index.json")
    check("memory://sharded/model.safetensors.index.json")
    assert len(store.ls("/sharded", detail=False)) == count


def test_what_has_no_metrics_of_its_own(packed: Path, index: Path, tmp_path: Path) -> None:
    ship, level = tmp_path / "net.ship.safetensors", tmp_path / "level.safetensors"
    elsa.ship(packed, ship)
    elsa.extract(packed, level, level=1, layout="csr")
    shard = next(index.parent.glob("*.safetensors"))
    for path, message in (
        (ship, "is a delivery file; record in its ELSA file, then run elsa-ship again"),
        (level, "is a level file; record in the ELSA file it is from"),
        (shard, "is a shard; name the index of all shards"),
    ):
        before = path.read_bytes()
        with pytest.raises(elsa.InvalidOption, match=message):
            elsa.record(path, None, {1: {"accuracy": 0.5}})
        assert path.read_bytes() == before
    with pytest.raises(elsa.NotElsa):
        elsa.record(ROOT / "spec/vectors/invalid/NotElsa/no_profile.safetensors", level, RECORDED)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (float("nan"), "metric 'x': nan is not a finite number"),
        (10**400, "metric 'x': it is not a finite number"),
        (True, "finite number"),
        ("0.5", "finite number"),
        (elsa.Metric(1, "higher", error=-0.5), "error of metric 'x': -0.5 is not a finite number"),
        (elsa.Metric(1, "higher", error=float("inf")), "error of metric 'x': inf"),
        (elsa.Metric(1, "larger"), "better 'larger', expected one of 'higher', 'lower'"),
        (elsa.Metric(1, "lower", samples=-1), "samples -1, expected"),
        (elsa.Metric(1, "lower", samples=10**400), "samples 1000"),
    ],
)
def test_what_is_no_metric(packed: Path, value: Any, message: str) -> None:
    before = packed.read_bytes()
    with pytest.raises(ValueError, match=message):
        elsa.record(packed, None, {1: {"x": value}})
    assert packed.read_bytes() == before


def test_names_and_levels_that_cannot_be_recorded(packed: Path) -> None:
    for wrong in ({1: {"\ud800": 1}}, {1: {3: 1}}, {1: {}}, {9: {"x": 1}}, {}):
        with pytest.raises(elsa.ElsaError):
            elsa.record(packed, None, wrong)
    both = {1: {"x": elsa.Metric(1, "lower")}, 2: {"x": elsa.Metric(1, "higher")}}
    with pytest.raises(elsa.InvalidOption, match="higher and lower cannot both be better"):
        elsa.record(packed, None, both)


def test_samples_are_those_of_all_levels(packed: Path) -> None:
    record(packed)
    elsa.record(packed, None, {2: {"accuracy": elsa.Metric(0.85, "higher", 50)}})
    assert elsa.open(packed).profile.metrics["accuracy"] == elsa.MetricInfo("higher")


@pytest.mark.parametrize("change", ["replace", "modify"])
@pytest.mark.parametrize("sharded", [False, True])
def test_a_file_that_changes_in_between(
    packed: Path, index: Path, change: str, sharded: bool
) -> None:
    source = index if sharded else packed

    def meddle(done: int, total: int) -> None:
        nonlocal meddled
        if meddled:
            return
        meddled = True
        if change == "replace":
            elsa.record(source, None, {2: {"loss": 1.5}})
        else:
            path = next(index.parent.glob("*.safetensors")) if sharded else packed
            os.utime(path, ns=(0, 0))

    meddled = False
    with pytest.raises(elsa.InputChanged, match="run again"):
        record(source, progress=meddle)
    assert elsa.open(source).levels[1].metrics == ({"loss": 1.5} if change == "replace" else {})
    elsa.verify(source)


KILLED = """
import sys, elsa_format
source, value = sys.argv[1:]
while True:
    value = str(int(value) + 1)
    elsa_format.record(source, None, {1: {"x": float(value)}, "dense": {"x": float(value)}})
    print(flush=True)
"""


@pytest.mark.skipif(os.name != "posix", reason="no SIGKILL")
@pytest.mark.parametrize("sharded", [False, True])
def test_kill_leaves_a_file_as_before_or_after(packed: Path, index: Path, sharded: bool) -> None:
    """Of shards the index names some that are there and fit it, whenever the process is killed."""
    source, last = index if sharded else packed, 0.0
    rng = np.random.default_rng(5)
    for _ in range(6):
        command = [sys.executable, "-c", KILLED, str(source), str(int(last))]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(rng.uniform(0.01, 0.08))
            process.send_signal(signal.SIGKILL)
        with elsa.open(source) as file:
            found = file.levels[0].metrics.get("x", 0.0)
            assert file.profile.dense_metrics.get("x", 0.0) == found >= last
            last = found
        assert elsa.verify(source).digests == 3
    assert last > 0


def test_command(packed: Path, tmp_path: Path) -> None:
    def run(*words: object) -> Any:
        return CliRunner().invoke(find_command("record"), [*map(str, words)])

    done = run(packed, "--level", 2, "accuracy=0.93", "my=metric=1e-3", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["metrics"] == {"accuracy": 0.93, "my=metric": 0.001}
    out = tmp_path / "out.safetensors"
    options = ["--better", "lower", "--samples", 7, "--recorded", "a script", "-o", out]
    done = run(packed, "-l", "dense", "loss=2", *options)
    assert "out.safetensors: dense: loss 2" in done.stderr, done.output
    profile = elsa.open(out).profile
    assert profile.levels[1].metrics == {"accuracy": 0.93, "my=metric": 0.001}
    assert profile.metrics["loss"] == elsa.MetricInfo("lower", 7, "a script")
    assert profile.metrics["accuracy"].better == "higher"
    for words in (["loss=nan"], ["loss"], [], ["a=1", "a=2"], ["a=1", "--better", "more"]):
        assert run(packed, "-l", 1, *words).exit_code == 2
    assert run(packed, "a=1").exit_code == 2


@pytest.mark.parametrize("sharded", [False, True])
def test_a_delivery_file_that_is_older(
    packed: Path, index: Path, tmp_path: Path, sharded: bool
) -> None:
    """It is told without reading its data, and of the beginning of one, too."""
    source = index if sharded else packed
    ship = tmp_path / ("net.ship.safetensors.index.json" if sharded else "net.ship.safetensors")
    part = tmp_path / "part" / ship.name
    part.parent.mkdir()
    elsa.ship(source, ship)
    elsa.fetch(ship, part, level=1)
    for path in (ship, part):
        assert elsa.verify(path, original=source) == elsa.verify(path)
    record(source)
    for path in (ship, part):
        with pytest.raises(elsa.OutdatedDelivery, match="its header differs; run elsa-ship again"):
            elsa.verify(path, original=source)
    elsa.ship(source, ship, force=True)
    elsa.verify(ship, original=source)
    check(ship)


def test_verify_command_says_what_is_older(packed: Path, tmp_path: Path) -> None:
    ship, command = tmp_path / "net.ship.safetensors", find_command("verify")
    elsa.ship(packed, ship)
    assert CliRunner().invoke(command, [str(ship), "--source", str(packed)]).exit_code == 0
    record(packed)
    done = CliRunner().invoke(command, [str(ship), "--source", str(packed)])
    assert (done.exit_code, done.stderr.count("\n")) == (3, 1)
    done = CliRunner().invoke(command, [str(packed), "--source", str(packed)])
    assert done.exit_code == 2
    assert done.stderr.endswith("is not a delivery file; --source is for those\n")


def test_shards_are_not_recorded_into_one_file(tmp_path: Path) -> None:
    dense = {f"w{i}": np.ones((8, 8), np.float32) * (i + 1) for i in range(3)}
    index, out = tmp_path / "m.safetensors.index.json", tmp_path / "out.safetensors"
    elsa.pack(dense, index, sparsities=[50], max_shard_size=300)
    with pytest.raises(elsa.InvalidOption, match="an index is recorded to an index"):
        elsa.record(index, out, {1: {"accuracy": 0.5}})
    assert not out.exists()


def test_who_records_hears_that_weights_have_moved(packed: Path) -> None:
    told = []
    for words in (["accuracy=0.5"], ["accuracy=0.6"], ["f" * 300 + "=0.5"]):
        with elsa.open(packed) as file:
            before = file.file_size - file.data_size
        done = CliRunner().invoke(find_command("record"), [str(packed), "-l", "1", *words])
        with elsa.open(packed) as file:
            moved = file.file_size - file.data_size != before
        told.append(moved)
        assert ("warning: its weights begin elsewhere now" in done.stderr) == moved, done.output
    assert told[1:] == [False, True]
