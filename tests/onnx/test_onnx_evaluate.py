"""Metrics of every level on samples, in ONNX Runtime."""

import json
import shutil
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import onnx_models as m
import pytest
from click.testing import CliRunner
from elsa_converters.onnx import InvalidData, evaluate, session
from internals import _bench as bench_module
from internals import _onnx_evaluate as evaluate_module
from internals import bench
from onnx import TensorProto, helper

import elsa_format
from elsa_format import ElsaError, Incomplete, Metric

LEVELS = [1, 2, 3, "dense"]
COUNT = 70
"""Samples: two runs and a part of one."""


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("net")
    return m.packed(m.save(m.mlp(), folder / "m.onnx"), folder)


@pytest.fixture
def data() -> dict[str, Any]:
    rng = np.random.default_rng(3)
    return {
        "x": rng.standard_normal((COUNT, 16)).astype(np.float32),
        "labels": rng.integers(0, 8, COUNT),
    }


def outputs_of(net: tuple[Path, Path], x: Any) -> dict[Any, Any]:
    return {n: session(*net, level=n).run(None, {"x": x})[0].astype(float) for n in LEVELS}


def test_accuracy_is_that_of_each_sample(net: Any, data: Any) -> None:
    files = [path.read_bytes() for path in net]
    found = evaluate(*net, data)
    assert list(found) == LEVELS
    for level, outputs in outputs_of(net, data["x"]).items():
        order = np.argsort(-outputs, axis=1)
        right = order[:, 0] == data["labels"]
        among = (order[:, :5] == data["labels"][:, None]).any(1)
        for name, values in (("accuracy", right), ("top5", among)):
            metric = found[level][name]
            assert metric.value == pytest.approx(values.mean())
            assert metric.error == pytest.approx(values.std(ddof=1) / COUNT**0.5)
            assert (metric.better, metric.samples) == ("higher", COUNT)
    assert [path.read_bytes() for path in net] == files


def test_targets(net: Any, data: Any) -> None:
    targets = m.weights(COUNT, 8, seed=5)
    found = evaluate(*net, {"x": data["x"], "targets": targets}, batch=7)
    for level, outputs in outputs_of(net, data["x"]).items():
        errors = np.square(outputs - targets).mean(1)
        lengths = np.linalg.norm(outputs, axis=1) * np.linalg.norm(targets, axis=1)
        cosine = ((outputs * targets).sum(1) / lengths).mean()
        assert found[level]["mse"].value == pytest.approx(errors.mean())
        assert found[level]["mse"].better == "lower"
        assert found[level]["cosine"].value == pytest.approx(cosine)


@pytest.mark.parametrize("together", [True, False])
def test_without_labels_the_agreement_with_the_dense_network(
    net: Any, data: Any, together: bool
) -> None:
    del data["labels"]
    found = evaluate(*net, data, together=together)
    outputs = outputs_of(net, data["x"])
    dense = outputs["dense"].argmax(1)
    for level in LEVELS:
        same = (outputs[level].argmax(1) == dense).mean()
        assert found[level]["agreement"].value == pytest.approx(same)
        assert found[level]["agreement"].samples == COUNT
    assert found["dense"]["mse"] == Metric(0.0, "lower", COUNT, 0.0)


def test_level_by_level_is_the_same_as_all_at_once(net: Any, data: Any) -> None:
    calls: list[tuple[int, int]] = []
    together = evaluate(*net, data, together=True)
    assert evaluate(*net, data, together=False, progress=lambda *c: calls.append(c)) == together
    assert calls[-1] == (4 * COUNT, 4 * COUNT)


def test_a_graph_with_a_fixed_number_of_samples(tmp_path: Path, net: Any, data: Any) -> None:
    """The last run is filled up, which does not count."""
    model = m.mlp()
    model.graph.input[0].CopyFrom(m.value("x", [32, 16]))
    model.graph.output[0].CopyFrom(m.value("y", [32, 8]))
    fixed = m.packed(m.save(model, tmp_path / "m.onnx"), tmp_path)
    assert evaluate(*fixed, data) == evaluate(*net, data)


def test_the_first_samples(net: Any, data: Any) -> None:
    first = {name: array[:10] for name, array in data.items()}
    assert evaluate(*net, data, limit=10) == evaluate(*net, first)
    assert evaluate(*net, data, limit=10**9) == evaluate(*net, data)
    alone = evaluate(*net, data, limit=1)[1]["accuracy"]
    assert (alone.samples, alone.error) == (1, None)


def test_positions_count_as_parts_of_a_sample(tmp_path: Path) -> None:
    """As in text recognition: a class for each place."""
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    main = m.graph(
        nodes,
        [m.value("x", ["n", 3, 16])],
        [m.value("y", ["n", 3, 8])],
        [m.tensor("w", m.weights(16, 8))],
    )
    net = m.packed(m.save(m.model(main), tmp_path / "m.onnx"), tmp_path)
    x, labels = m.weights(9, 3, 16, seed=1), np.random.default_rng(2).integers(0, 8, (9, 3))
    found = evaluate(*net, {"x": x, "labels": labels})
    right = session(*net, level=2).run(None, {"x": x})[0].argmax(-1) == labels
    assert found[2]["accuracy"].value == pytest.approx(right.mean())
    assert found[2]["accuracy"].error == pytest.approx(right.mean(1).std(ddof=1) / 3)


def test_equal_outputs_are_no_hit_by_chance(tmp_path: Path) -> None:
    """A level that is zero everywhere says class 0, and is not right about everything."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("Mul", ["h", "zero"], ["y"]),
    ]
    given = [m.tensor("w", m.weights(16, 8)), m.tensor("zero", np.zeros(1, np.float32))]
    main = m.graph(nodes, [m.value("x", ["n", 16])], [m.value("y", ["n", 8])], given)
    net = m.packed(m.save(m.model(main), tmp_path / "m.onnx"), tmp_path)
    found = evaluate(*net, {"x": m.weights(8, 16), "labels": np.arange(8)})["dense"]
    assert (found["accuracy"].value, found["top5"].value) == (1 / 8, 5 / 8)


def test_a_function_of_ones_own(net: Any, data: Any) -> None:
    data["weight"] = np.arange(COUNT)

    def score(outputs: Any, arrays: Any) -> Any:
        return {"loss": outputs["y"][:, 0] * arrays["weight"], "mine": (arrays["labels"], "higher")}

    found = evaluate(*net, data, function=score)
    for level, outputs in outputs_of(net, data["x"]).items():
        expected = (outputs[:, 0] * data["weight"]).mean()
        assert found[level]["loss"].value == pytest.approx(expected, rel=1e-5)
        assert found[level]["mine"].value == pytest.approx(data["labels"].mean())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": None}, "no array 'x'; the graph's inputs are 'x'"),
        ({"y": np.ones(COUNT)}, "array 'y' is no input of the graph"),
        ({"x": np.ones((COUNT, 16))}, r"'x' is float64, the graph takes float32; .*astype"),
        ({"x": np.ones((COUNT, 15), np.float32)}, r"shape \[70, 15\], the graph takes \[n, 16\]"),
        ({"x": np.ones((COUNT, 16, 1), np.float32)}, r"\[70, 16, 1\], the graph takes \[n, 16\]"),
        ({"labels": np.zeros(3, int)}, "'labels' holds 3 samples, 'x' 70"),
        ({"labels": np.array(3)}, "'labels' holds no samples"),
        ({"labels": np.full(COUNT, 8)}, r"label 8 of sample 0, expected 0\.\.7"),
        ({"labels": np.full(COUNT, -1)}, "label -1 of sample 0, expected"),
        ({"labels": np.ones(COUNT)}, "labels are float64, expected integers"),
        ({"targets": np.ones((COUNT, 8))}, "labels and targets"),
        ({"labels": None, "targets": np.full((COUNT, 8), np.nan)}, "targets hold NaN"),
        ({"labels": np.zeros((COUNT, 2), int)}, r"shape \[32, 8\], expected \[32, 2, classes\]"),
        ({"labels": None, "targets": np.ones((COUNT, 9))}, r"\[32, 8\], expected \[32, 9\]"),
        ({"x": np.ones((0, 16), np.float32), "labels": np.zeros(0, int)}, "holds no samples"),
        ({"x": np.full((COUNT, 16), np.nan, np.float32)}, "the output of sample 0 holds NaN"),
    ],
)
def test_what_does_not_fit_is_refused(net: Any, data: Any, change: Any, words: str) -> None:
    data = {name: array for name, array in (data | change).items() if array is not None}
    runs: list[int] = []
    with pytest.raises(InvalidData, match=words) as error:
        evaluate(*net, data, progress=lambda done, total: runs.append(done))
    assert "\n" not in str(error.value)
    assert len(runs) <= 1


def test_a_number_for_each_sample(tmp_path: Path) -> None:
    """There is no highest of one."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("ReduceSum", ["h", "last"], ["y"], keepdims=0),
    ]
    given = [m.tensor("w", m.weights(16, 8)), m.tensor("last", np.array([1]))]
    main = m.graph(nodes, [m.value("x", ["n", 16])], [m.value("y", ["n"])], given)
    net = m.packed(m.save(m.model(main), tmp_path / "m.onnx"), tmp_path)
    x = m.weights(9, 16)
    found = evaluate(*net, {"x": x})
    assert list(found["dense"]) == ["mse", "cosine"]
    outputs = {n: session(*net, level=n).run(None, {"x": x})[0].astype(float) for n in (1, "dense")}
    expected = np.square(outputs[1] - outputs["dense"]).mean()
    assert found[1]["mse"].value == pytest.approx(expected)
    with pytest.raises(InvalidData, match=r"shape \[9\], expected \[9, classes\]"):
        evaluate(*net, {"x": x, "labels": np.zeros(9, int)})


@pytest.mark.parametrize("labelled", [True, False])
def test_where_memory_is_short_few_sessions_are_there_at_once(
    net: Any, data: Any, labelled: bool, monkeypatch: Any
) -> None:
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    most = []

    def count(*arguments: Any, **options: Any) -> Any:
        made = session(*arguments, **options)
        alive.add(made)
        most.append(len(alive))
        return made

    monkeypatch.setattr(evaluate_module, "session", count)
    data = data if labelled else {"x": data["x"]}
    expected = evaluate(*net, data)
    assert max(most) == 4
    most.clear()
    alive.clear()
    monkeypatch.setattr(evaluate_module, "available_memory", lambda: 0)
    assert evaluate(*net, data) == expected
    assert max(most) == (1 if labelled else 2)


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (None, "no metrics were returned"),
        ({}, "no metrics were returned"),
        ({"loss": 1.0}, r"metric 'loss' has shape \[\], expected one number for each of 32"),
        ({"loss": np.ones(31)}, r"metric 'loss' has shape \[31\]"),
        ({"loss": np.full(32, np.nan)}, "metric 'loss' is nan for sample 0"),
        ({"mine": np.ones(32)}, "metric 'mine' needs a direction"),
    ],
)
def test_what_a_function_must_return(net: Any, data: Any, returned: Any, words: str) -> None:
    with pytest.raises(ElsaError, match=words):
        evaluate(*net, data, function=lambda outputs, arrays: returned)
    with pytest.raises(InvalidData, match="ZeroDivisionError: division by zero"):
        evaluate(*net, data, function=lambda outputs, arrays: 1 / 0)


def test_the_beginning_of_a_delivery_file(net: Any, data: Any, tmp_path: Path) -> None:
    ship, begun = tmp_path / "ship.safetensors", tmp_path / "begun.safetensors"
    elsa_format.ship(net[0], ship)
    with elsa_format.open(ship) as file:
        begun.write_bytes(ship.read_bytes()[: file.downloads[2]])
    every = evaluate(*net, data)
    assert evaluate(begun, net[1], data) == {n: every[n] for n in (1, 2)}
    del data["labels"]
    with pytest.raises(Incomplete, match="no labels, and the dense network to compare with is not"):
        evaluate(begun, net[1], data)


def test_the_command(net: Any, data: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    for what in ("session_memory", "find_library"):  # which takes seconds to measure
        monkeypatch.setattr(bench_module, what, lambda *arguments: None)
    np.savez("val.npz", **data)
    words = [str(net[0]), "--onnx", str(net[1]), "--seconds=0", "--threads=1", "-q"]
    result = CliRunner().invoke(bench, [*words, "--data", "val.npz", "--json"])
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)
    for row, found in zip(rows, evaluate(*net, data).values(), strict=True):
        assert {name: Metric(**metric) for name, metric in row["metrics"].items()} == found
        assert row["quality"] == found["accuracy"].value
    result = CliRunner().invoke(bench, [*words, "--data", "val.npz", "--limit=9"])
    assert result.exit_code == 0, result.output
    assert "± is the standard error of 9 samples." in result.output
    assert result.output.split()[4:6] == ["accuracy", "top5"]
    Path("scores_here.py").write_text(
        "def loss(outputs, arrays): return {'loss': arrays['labels']}"
    )
    result = CliRunner().invoke(
        bench, [*words, "--data", "val.npz", "--evaluate", "scores_here:loss", "--json"]
    )
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)
    assert rows[0]["quality"] == pytest.approx(data["labels"].mean())
    fastest = min(rows, key=lambda row: row["dense_seconds"])
    assert [row["level"] for row in rows if row["best"]] == [fastest["level"]]


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--data", "none.npz"], 1, "none.npz: No such file"),
        (["--data", "text.npz"], 3, "text.npz: is not a numpy archive"),
        (["--data", "one.npy"], 3, "one.npy: is one array"),
        (["--data", "cut.npz"], 3, "cut.npz: is not a numpy archive"),
        (["--data", "val.npz", "--limit", "0"], 2, "0 is not in the range"),
        (["--limit", "1"], 2, "--limit goes with --data or --text"),
        (["--no-time"], 2, "--no-time goes with --data"),
        (["--evaluate", "json:loads"], 2, "--evaluate goes with --data"),
        (["--data", "val.npz", "--evaluate", "nothing"], 2, "not a module and a function"),
        (["--data", "val.npz", "--evaluate", "no_such_module:f"], 2, "no_such_module"),
        (["--data", "val.npz", "--evaluate", "json:nothing"], 2, "has no function 'nothing'"),
        (["--data", "val.npz", "--dim", "no=2"], 2, "no input has an open axis called 'no'"),
        (["--text", "text.npz"], 2, "Give --onnx TEMPLATE, or --text"),
    ],
)
def test_wrong_usage(
    net: Any, data: Any, tmp_path: Path, monkeypatch: Any, options: Any, code: int, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    np.savez("val.npz", **data)
    Path("cut.npz").write_bytes(Path("val.npz").read_bytes()[:-30])
    Path("text.npz").write_text("no archive")
    np.save("one.npy", data["x"])
    result = CliRunner().invoke(bench, [str(net[0]), "--onnx", str(net[1]), *options])
    assert (result.exit_code, words in result.output) == (code, True), result.output
    assert result.output.lower().count("error: ") == 1


def test_the_dtype_and_shape_of_each_input_are_compared(tmp_path: Path) -> None:
    """Before weights are read: one that is an index, and one that takes any shape."""
    nodes = [helper.make_node("Gather", ["w", "i"], ["y"])]
    main = m.graph(
        nodes,
        [m.value("i", ["n"], TensorProto.INT64)],
        [m.value("y", ["n", 8])],
        [m.tensor("w", m.weights(16, 8))],
    )
    net = m.packed(m.save(m.model(main), tmp_path / "m.onnx"), tmp_path)
    with pytest.raises(InvalidData, match="'i' is int32, the graph takes int64"):
        evaluate(*net, {"i": np.zeros(4, np.int32)})
    assert evaluate(*net, {"i": np.arange(4)})["dense"]["agreement"].value == 1


def test_metrics_alone(net: Any, data: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(bench_module, "measure_levels", None)
    np.savez(tmp_path / "val.npz", **data)
    words = [str(net[0]), "--onnx", str(net[1]), "--data", str(tmp_path / "val.npz"), "--no-time"]
    result = CliRunner().invoke(bench, words)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["level", "sparsity", "accuracy", "top5"]
    assert [line.split()[0] for line in lines[1:5]] == ["1", "2", "3", "dense"]
    result = CliRunner().invoke(bench, [*words, "--json"])
    rows = json.loads(result.stdout)
    assert [row["name"] for row in rows] == ["95%", "80%", "50%", ""]
    found = [{n: Metric(**m) for n, m in row["metrics"].items()} for row in rows]
    assert found == list(evaluate(*net, data).values())


def bench_here(folder: Path, *options: str) -> Any:
    words = [str(folder / "net.safetensors"), "--onnx", str(folder / "net.onnx")]
    data = ["--data", str(folder / "val.npz"), "--no-time", "-q"]
    return CliRunner().invoke(bench, [*words, *data, *options])


def test_record(net: Any, data: Any, tmp_path: Path) -> None:
    """The file records all, its weights are the same, and the template points to them."""
    folder = tmp_path
    for path in net:
        shutil.copy(path, folder)
    x = {"x": data["x"]}
    before = m.run(folder / "net.onnx", x)
    np.savez(folder / "val.npz", **data)
    result = bench_here(folder, "--record")
    assert result.exit_code == 0, result.output
    with elsa_format.open(folder / "net.safetensors") as file, elsa_format.open(net[0]) as old:
        for level, found in evaluate(*net, data).items():
            about = file.levels[level - 1] if level != "dense" else None
            values = about.metrics if about else file.profile.dense_metrics
            errors = about.errors if about else file.profile.dense_errors
            assert values == {name: metric.value for name, metric in found.items()}
            assert errors == {name: metric.error for name, metric in found.items()}
            weights, expected = file.load(level), old.load(level)
            assert {n: a.tobytes() for n, a in weights.items()} == {
                n: a.tobytes() for n, a in expected.items()
            }
        info = file.profile.metrics["accuracy"]
        assert (info.better, info.samples) == ("higher", COUNT)
        assert info.recorded == f"elsa-bench {elsa_format.__version__}"
    elsa_format.verify(folder / "net.safetensors")
    m.assert_same(m.run(folder / "net.onnx", x), before)  # straight from ONNX Runtime


def test_nothing_is_recorded_in_a_file_that_changed(
    net: Any, data: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    for path in net:
        shutil.copy(path, tmp_path)
    np.savez(tmp_path / "val.npz", **data)
    elsa = tmp_path / "net.safetensors"

    def swap(*arguments: Any, **options: Any) -> Any:
        found = evaluate(*arguments, **options)
        with elsa_format.open(net[0]) as file:
            weights = file.load("dense")
        elsa_format.pack(weights, elsa, sparsities=[70], force=True)
        return found

    monkeypatch.setattr("elsa_converters.onnx.evaluate", swap)
    result = bench_here(tmp_path, "--record")
    assert result.exit_code == 1
    assert "changed while it was measured; measure it again" in result.output
    with elsa_format.open(elsa) as file:
        assert file.profile.dense_metrics == {}


def test_what_cannot_be_recorded_is_refused_first(
    net: Any, data: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr("elsa_converters.onnx.evaluate", None)
    np.savez(tmp_path / "val.npz", **data)
    shutil.copy(net[1], tmp_path)
    elsa_format.ship(net[0], tmp_path / "net.safetensors")
    result = bench_here(tmp_path, "--record")
    assert result.exit_code == 2
    assert "is a delivery file; record metrics in its ELSA file" in result.output
    result = CliRunner().invoke(bench, [str(net[0]), "--onnx", str(net[1]), "--record"])
    assert "--record goes with --data or --text" in result.output
