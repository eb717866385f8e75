"""A calibrated network goes into a file, by `pack` and by the command, and comes out as solved."""

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calibrate import mlp
from calibrate.perceptron import Perceptron, Steps
from click.testing import CliRunner
from elsa_converters.calibrate import Weights
from internals import ArrayCheckpoint, Sweep, _calibrated_pack, main
from safetensors.numpy import save_file
from terminal import on_a_terminal

import elsa_format as elsa
from elsa_format.plugins import Calibration, CalibrationOptions, SolvedTensor

LEVELS = [75, 50]
TESTS = Path(__file__).parents[1]


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A network of a kind whose calibration another package has registered."""
    rng = np.random.default_rng(1)
    causes = rng.standard_normal((192, 6)) @ np.random.default_rng(0).standard_normal((6, 20))
    inputs = (causes + 0.3 * rng.standard_normal(causes.shape)).astype(np.float32)
    mlp.register(tmp_path)
    mlp.save(tmp_path / "net.mlp", [20, 32, 24, 10], inputs)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{TESTS}")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "net.mlp"


def packed(source: Path, name: str = "out.safetensors", **fields: Any) -> Path:
    out = source.with_name(name)
    given = {"sparsities": LEVELS, "calibrate": source.with_name("samples.npy"), **fields}
    elsa.pack(source, out, **given)
    return out


def networks(source: Path) -> list[dict[str, Weights]]:
    """The weights of all layers in each network, as solved."""
    model = mlp.model_of(source, source.with_name("samples.npy"))
    sweep = Sweep(model, [Fraction(level, 100) for level in LEVELS])
    solved = {one.layer.name: one.solution for one in sweep.run()}
    return [
        {name: solution.networks[network] for name, solution in solved.items()}
        for network in range(len(LEVELS) + 1)
    ]


def as_stored(model: Perceptron, weights: dict[str, Weights]) -> dict[str, bytes]:
    """The bits of what a network has to be read back as."""
    found = {"steps": np.arange(3).tobytes()}
    for (layer,) in model.stages:
        own = weights[layer.name]
        found[layer.name] = own.weight[0].tobytes()
        found |= {name: array.tobytes() for name, array in model.varying(layer, own).items()}
    return found


def test_every_level_is_read_back_as_solved(source: Path) -> None:
    model, out = mlp.model_of(source, source.with_name("samples.npy")), packed(source)
    elsa.ship(out, source.with_name("ship.safetensors"))
    for level, weights in zip((1, 2, "dense"), networks(source), strict=True):
        expected = as_stored(model, weights)
        for file in ("out.safetensors", "ship.safetensors"):
            with elsa.open(source.with_name(file)) as network:
                read = network.load(level)
            assert {name: array.tobytes() for name, array in read.items()} == expected
    elsa.verify(out)


def test_the_metrics_are_those_of_the_levels(source: Path) -> None:
    """They are of samples that were held back, and of the weights that the file has."""
    out = packed(source)
    model = mlp.model_of(source, source.with_name("samples.npy"))
    held = Sweep(model, [Fraction(1, 2)]).held
    x = np.concatenate([model.parts[at] for at in held])
    walk = Steps(model, [x])
    ((reference,),) = walk.outputs()
    with elsa.open(out) as file:
        profile = file.profile
        assert {name: info.samples for name, info in profile.metrics.items()} == {
            "relative_error": x.shape[0],
            "agreement": x.shape[0],
        }
        assert [profile.metrics[name].better for name in sorted(profile.metrics)] == [
            "higher",
            "lower",
        ]
        told = [*(level.metrics for level in file.levels), profile.dense_metrics]
        for level, metrics in zip((1, 2, "dense"), told, strict=True):
            y = x
            for at in range(len(model.stages)):
                y = y @ file.tensor(f"w{at}", level).T * file.tensor(f"w{at}.scale", level)
                y = y + file.tensor(f"w{at}.bias", level)
                y = np.maximum(y, 0) if at < len(model.stages) - 1 else y
            error = np.linalg.norm(y - reference) / np.linalg.norm(reference)
            assert metrics["relative_error"] == pytest.approx(error, rel=1e-4)
            assert metrics["agreement"] == np.mean(y.argmax(-1) == reference.argmax(-1))
    assert told[0]["relative_error"] > told[1]["relative_error"] > told[2]["relative_error"] > 0


def test_the_same_samples_give_the_same_bytes(source: Path) -> None:
    out = packed(source, threads=1).read_bytes()
    assert packed(source, "again.safetensors", threads=2).read_bytes() == out
    stream = io.BytesIO()
    elsa.pack(source, stream, sparsities=LEVELS, calibrate=np.load("samples.npy"))
    assert stream.getvalue() == out


def test_shards_have_the_same_levels(source: Path) -> None:
    out = packed(source)
    index = packed(source, "net.safetensors.index.json", max_shard_size=4000)
    assert len(list(source.parent.glob("net-*.safetensors"))) > 1
    with elsa.open(out) as one, elsa.open(index) as shards:
        assert [level.metrics for level in one.levels] == [level.metrics for level in shards.levels]
        assert [level.digest for level in one.levels] == [level.digest for level in shards.levels]


def test_what_exact_keeps(source: Path) -> None:
    """The dense network is the original, but for counters."""
    with np.load(source) as arrays:
        original = {name: arrays[name] for name in arrays}
    with elsa.open(packed(source, keep_dense="exact")) as file:
        found = file.load("dense")
    for name, array in original.items():
        assert np.allclose(found[name], array, rtol=1e-6)
    with elsa.open(packed(source, "bounded.safetensors")) as file:
        assert not np.allclose(file.tensor("w1", "dense"), original["w1"], rtol=1e-3)


# --- The command --------------------------------------------------------------------------------

WORDS = ["pack", "net.mlp", "--sparsities", "75,50", "--calibrate", "samples.npy"]
WORDS += ["-o", "o.safetensors"]


def run(*words: str) -> Any:
    return CliRunner().invoke(main, words, prog_name="elsa")


def test_the_command_shows_what_levels_are_worth(source: Path) -> None:
    done = run(*WORDS, "--json", "--all-classes", "--max-memory", "1MB", "--favour", "dense")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    with elsa.open("o.safetensors") as file:
        assert told["dense"]["metrics"] == file.profile.dense_metrics
        levels = [level["metrics"] for level in told["levels"]]
        assert levels == [level.metrics for level in file.levels]
    done = run(*WORDS, "-f")
    head, *rows = done.stderr.splitlines()[:4]
    assert head.split() == [
        *("level", "name", "download", "sparsity", "kept", "agreement", "relative_error")
    ]
    assert [row.split()[0] for row in rows] == ["1", "2", "dense"]
    assert "one-shot" not in done.stderr


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="no terminals")
def test_the_table_fits_a_terminal(source: Path) -> None:
    lines = on_a_terminal(*WORDS)
    (head,) = [line for line in lines if line.endswith("relative_error")]
    assert max(map(len, lines)) <= 80
    assert "agreement" in head


def test_classes_that_samples_lack_are_named(source: Path) -> None:
    model = mlp.model_of(source, source.with_name("samples.npy"))
    ((outputs,),) = Steps(model, [np.concatenate(model.parts)]).outputs()
    chosen = outputs.argmax(-1)
    few = np.concatenate(model.parts)[np.isin(chosen, np.unique(chosen)[:2])]
    missing = sorted(set(range(10)) - {int(c) for c in np.unique(chosen)[:2]})
    out = source.with_name("few.safetensors")
    report = elsa.pack(source, out, sparsities=LEVELS, calibrate=few)
    (note,) = [note for note in report.notes if "classes" in note]
    assert f"8 of 10 classes ({', '.join(map(str, missing))})" in note
    assert "--all-classes" in note
    report = elsa.pack(source, out, sparsities=LEVELS, calibrate=few, all_classes=True, force=True)
    assert not any("--all-classes" in note for note in report.notes)


def test_a_dense_network_that_moved_is_told(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_calibrated_pack, "MOVED", 0.01)
    for keep, moves in (("bounded", True), ("exact", False)):
        out = source.with_name(f"{keep}.safetensors")
        fields = {"calibrate": source.with_name("samples.npy"), "keep_dense": keep}
        report = elsa.pack(source, out, sparsities=[90], **fields)
        error = report.profile.dense_metrics["relative_error"]
        told = [note for note in report.notes if "dense network" in note]
        assert (error > 0.01) == moves == bool(told)
        assert not told or f"differ by {error:.0%}" in told[0]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("--scope auto", "--scope auto needs --calibrate"),
        ("--samples 9", "--samples needs --calibrate"),
        ("--length 9", "--length needs --calibrate"),
        ("--keep-dense exact", "--keep-dense needs --calibrate"),
        ("--favour sparse", "--favour needs --calibrate"),
        ("--all-classes", "--all-classes needs --calibrate"),
        ("--max-memory 1GB", "--max-memory needs --calibrate"),
        ("--threads 2", "--threads needs --calibrate"),
        ("--calibrate samples.npy --axis 0", "--calibrate excludes --axis"),
        ("--calibrate samples.npy --rounding overwrite", "--calibrate excludes --rounding"),
        ("--calibrate samples.npy --template net.onnx", "has no graph"),
        ("--calibrate samples.npy --samples 3", "expected at least 4 in 2"),
        ("--calibrate samples.npy --exclude layer9", "no tensor matches 'layer9'"),
        ("--calibrate nothing.npy", "nothing.npy: No such file or directory"),
        ("--calibrate samples.npy --keep-dense never", "'never' is not one of"),
        ("--calibrate samples.npy --samples 0", "0 is not in the range"),
        ("--calibrate samples.npy --max-memory 0", "'0' is less than a byte"),
    ],
)
def test_refusals_are_one_line_before_any_work(source: Path, words: str, problem: str) -> None:
    before = sorted(source.parent.iterdir())
    done = run("pack", "net.mlp", "--sparsities", "75,50", "-o", "o.safetensors", *words.split())
    line = done.stderr.splitlines()[-1]
    assert (done.exit_code, done.stdout) in [(code, "") for code in (1, 2, 3)]
    assert line.lower().startswith("error: "), done.stderr
    assert problem in line
    assert sorted(source.parent.iterdir()) == before


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"sparsities": None, "levels": "x", "calibrate": "s"}, "calibrate=… needs sparsities=…"),
        ({"sparsities": None, "counters": "x", "calibrate": "s"}, "calibrate=… needs sparsities=…"),
        ({"keep_dense": "never", "calibrate": "s"}, "keep_dense 'never', expected one of"),
        ({"favour": 3, "calibrate": "s"}, "favour 3, expected one of"),
        ({"threads": 0, "calibrate": "s"}, "threads 0, expected a whole number from 1"),
        ({"max_memory": 1.5, "calibrate": "s"}, "max_memory 1.5, expected a whole number"),
    ],
)
def test_options_are_checked_by_name(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises((ValueError, TypeError), match=problem):
        elsa.PackOptions(**{"sparsities": LEVELS, **fields})


def test_what_cannot_be_run_is_refused(source: Path) -> None:
    np.savez(source.with_name("net.npz"), w=np.ones((4, 4), np.float32))
    for path in ("net.npz", "https://example.org/net.onnx", {"w": np.ones((4, 4), np.float32)}):
        with pytest.raises(elsa.InvalidOption, match=r"calibrate=… needs the ONNX model"):
            elsa.pack(path, "o.safetensors", sparsities=LEVELS, calibrate="samples.npy")


def test_a_missing_extra_is_named(source: Path) -> None:
    source.rename("net.lost")
    with pytest.raises(elsa.MissingExtra, match=r"net\.lost: calibrating \.lost needs"):
        elsa.pack("net.lost", "o.safetensors", sparsities=LEVELS, calibrate="samples.npy")


def test_the_extra_of_model_directories_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "elsa_converters.transformers", None)
    (tmp_path / "model").mkdir()
    save_file({"w": np.ones((4, 4), np.float32)}, tmp_path / "model" / "model.safetensors")
    problem = r"calibrating model directories needs .*; run: pip install .*\[transformers\]"
    with pytest.raises(elsa.MissingExtra, match=problem):
        elsa.pack(tmp_path / "model", tmp_path / "out", sparsities=LEVELS, calibrate="text.txt")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_one_shot_levels_name_the_option(source: Path) -> None:
    note = "usually need calibration above about 30 to 50%"
    arrays = {"w": np.random.default_rng(0).standard_normal((20, 20)).astype(np.float32)}
    (sparse,) = elsa.pack(arrays, io.BytesIO(), sparsities=[50]).notes
    assert note in sparse
    assert sparse.endswith("pack its ONNX model or model directory with --calibrate")
    assert elsa.pack(arrays, io.BytesIO(), sparsities=[30]).notes == ()


# --- When it fails -------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [1, 3, 5])
def test_an_interruption_leaves_nothing(source: Path, after: int) -> None:
    before = sorted(source.parent.iterdir())
    Steps.opened = Steps.closed = mlp.MlpCheckpoint.closed = 0
    calls = []

    def interrupt(done: int, total: int) -> None:
        calls.append(done)
        if len(calls) == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        packed(source, progress=interrupt)
    assert sorted(source.parent.iterdir()) == before
    assert Steps.opened == Steps.closed > 0
    assert mlp.MlpCheckpoint.closed == 1


def test_a_kill_leaves_nothing(source: Path) -> None:
    before = sorted(source.parent.iterdir())
    program = (
        "import os, elsa_format\n"
        "elsa_format.pack('net.mlp', 'o.safetensors', sparsities=[75, 50], "
        "calibrate='samples.npy', progress=lambda done, total: done < total / 2 or os.abort())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert done.returncode == -signal.SIGABRT, done.stderr
    assert sorted(source.parent.iterdir()) == before


class Given(Calibration):
    """A calibration that gives what a test says."""

    path = "<given>"
    levels = (Fraction(1, 2),)
    nested, per_level = ["w"], ["b"]

    def __init__(self, *solved: tuple[str, int, Any]) -> None:
        rng = np.random.default_rng(0)
        self.arrays = {
            "w": rng.standard_normal((8, 5)).astype(np.float32),
            "b": rng.standard_normal(5).astype(np.float32),
        }
        self.tensors = ArrayCheckpoint(self.arrays).tensors
        self.solved = solved

    def blocks(self, name: str, size: int) -> Iterator[Any]:
        yield self.arrays[name].reshape(-1).view(np.uint8)

    def solve(self, progress: Any) -> Iterator[SolvedTensor]:
        for name, level, array in self.solved:
            yield SolvedTensor(name, level, np.asarray(array, np.float32))


WEIGHT = elsa.embed_counters(np.ones((8, 5), np.float32), np.eye(8, 5, dtype=np.uint8), 1)
BIAS = np.arange(5.0)


@pytest.mark.parametrize(
    ("solved", "problem"),
    [
        ([], "tensor 'w' was not solved"),
        ([("w", 0, WEIGHT), ("w", 0, WEIGHT)], "tensor 'w' of level 0 has no place"),
        ([("w", 1, WEIGHT)], "tensor 'w' of level 1 has no place"),
        ([("b", 2, BIAS)], "tensor 'b' of level 2 has no place"),
        ([("b", -1, BIAS)], "tensor 'b' of level -1 has no place"),
        ([("c", 0, BIAS)], "tensor 'c' of level 0 has no place"),
        ([("b", 1, BIAS[:4])], r"tensor 'b': shape \[4\], expected \[5\]"),
        ([("w", 0, WEIGHT * np.inf)], "weight 0 is inf"),
    ],
)
def test_what_a_package_gives_wrongly_is_refused(solved: Any, problem: str, tmp_path: Path) -> None:
    with pytest.raises(elsa.FormatError, match=problem):
        elsa.pack(Given(*solved), tmp_path / "o.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_tensors_that_are_not_given_are_copied(tmp_path: Path) -> None:
    given = Given(("w", 0, WEIGHT), ("b", 1, BIAS))
    elsa.pack(given, tmp_path / "o.safetensors", names="half")
    with elsa.open(tmp_path / "o.safetensors") as file:
        assert file.levels[0].name == "half"
        assert np.array_equal(file.tensor("b", 1), BIAS)
        assert np.array_equal(file.tensor("b", "dense"), given.arrays["b"])
        assert file.levels[0].nonzero == 5


def test_a_calibration_has_its_own_options(tmp_path: Path) -> None:
    for fields in ({"sparsities": 90}, {"threads": 2}, {"options": elsa.PackOptions(sparsities=9)}):
        with pytest.raises(elsa.ConflictingOptions, match="has options of its own"):
            elsa.pack(Given(("w", 0, WEIGHT)), tmp_path / "o.safetensors", **fields)


def test_metrics_of_any_length_have_room(tmp_path: Path) -> None:
    """The header is as long as it was when nobody knew them."""
    from elsa_format import MetricInfo

    values = [
        5e-324,
        -2.2250738585072014e-308,
        -1.2345678901234567e-06,
        0.0,
        1e300,
        -1234567.890625,
    ]
    for number, value in enumerate(values):
        given = Given(("w", 0, WEIGHT))
        given.metrics = {f"m{n}": MetricInfo("lower") for n in range(99)}
        given.measured = [dict.fromkeys(given.metrics, value)] * 2
        out = tmp_path / f"{number}.safetensors"
        elsa.pack(given, out)
        with elsa.open(out) as file:
            assert set(file.levels[0].metrics.values()) == {value}
            assert set(file.profile.dense_metrics.values()) == {value}


def test_what_is_left_out() -> None:
    """By patterns, and by what the tensors of a model directory are."""
    tensors = ArrayCheckpoint({n: np.ones((2, 3), np.float32) for n in ("a", "head", "b")}).tensors
    levels = [Fraction(1, 2)]
    named = CalibrationOptions(levels=levels, include=("a", "head"), exclude=("a",))
    assert named.left_out(tensors) == {"a": "excluded", "b": "not included"}
    usual = CalibrationOptions(levels=levels)
    assert usual.left_out(tensors) == {}
    assert usual.left_out(tensors, Path()) == {"head": "output head"}
    assert CalibrationOptions(levels=levels, nest_all=True).left_out(tensors, Path()) == {}
