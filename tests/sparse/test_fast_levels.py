"""Levels that run faster: as a file, in a session, chosen by time, measured."""

import json
import re
import subprocess
import sys
import warnings

import numpy as np
import onnx
import onnxruntime
import pytest
from click.testing import CliRunner
from elsa_converters import onnx as converter
from elsa_converters import sparse as sparse_room
from internals import _bench as bench_module
from internals import _fast as pick
from internals import _latency as latency
from internals import _measure as timing
from internals import _session as session
from internals import bench, export, import_line, mark_best
from internals import show_bench as show
from onnx.inliner import inline_local_functions
from onnx.reference import ReferenceEvaluator
from sparse_models import library, needs_library

import elsa_format
from elsa_format import ElsaError, InvalidOption, NoSuchLevel

X = {"x": np.random.default_rng(6).standard_normal((2, 8, 12, 12)).astype(np.float32)}


def run(model, *, sparse=False):
    """The output of a model file."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    if sparse:
        options.register_custom_ops_library(converter.sparse_ops_library())
    return onnxruntime.InferenceSession(str(model), options).run(None, X)[0]


def operators(model):
    """The sparse operators of a model file, in order."""
    return [n.op_type for n in onnx.load(model).graph.node if n.domain == "elsa"]


def same(found, expected):
    """Equal to rounding."""
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """What is fastest does not matter here."""
    monkeypatch.setattr(timing, "SECONDS", 0)


@pytest.fixture
def no_library(monkeypatch):
    """As on a machine without a compiler."""
    for module in (sparse_room, session, timing, bench_module, pick):
        monkeypatch.setattr(module, "find_library", lambda: None)


@pytest.mark.parametrize("level", [1, 2, 3, "dense"])
def test_export_runs_everywhere(packed, tmp_path, level):
    """With the operators, without them, in onnx's evaluator, and inlined."""
    dense, fast = tmp_path / "dense.onnx", tmp_path / "fast.onnx"
    converter.export(*packed, dense, level=level)
    converter.export(*packed, fast, level=level, fast=0.5)
    onnx.checker.check_model(fast, full_check=True)
    expected = run(dense)
    same(run(fast), expected)
    same(ReferenceEvaluator(str(fast)).run(None, X)[0], expected)
    inlined = tmp_path / "inlined.onnx"
    onnx.save(inline_local_functions(onnx.load(fast)), inlined)
    same(run(inlined), expected)
    if library() is not None:
        same(run(fast, sparse=True), expected)
    names = ["SparseConvRelu", "SparseMatMulRelu", "SparseMatMul"]
    assert operators(fast) == ([] if level == "dense" else names)


def test_smaller_than_sparse_initializers(packed, tmp_path):
    """6 bytes a weight against 12."""
    sizes = {}
    for name, options in {"sparse": {"sparse": True}, "fast": {"fast": 0.5}}.items():
        path = tmp_path / f"{name}.onnx"
        converter.export(*packed, path, level=2, **options)
        model = onnx.load(path)
        del model.functions[:]  # a few kilobytes, whatever the network
        sizes[name] = len(model.SerializeToString())
    assert sizes["fast"] < 0.75 * sizes["sparse"]


def test_values_are_the_level_bits(packed, tmp_path):
    """Where no batch norm is folded in."""
    import elsa_format

    converter.export(*packed, tmp_path / "fast.onnx", level=2, fast=0.5)
    stored = {t.name: t for t in onnx.load(tmp_path / "fast.onnx").graph.initializer}
    hidden = elsa_format.open(packed.elsa).tensor("hidden", 2)
    values = np.frombuffer(stored["hidden.values"].raw_data, np.float32)
    # A row that is all zeros has one of them stored.
    assert values[values != 0].tobytes() == hidden[hidden != 0].tobytes()


def test_threshold(packed, tmp_path):
    """Level 3 has 60 % zeros."""
    for least, count in {0.5: 3, 0.7: 0, 0.0: 3, "55%": 3, 70: 0, "2:4": 3}.items():
        counted = []
        converter.export(
            *packed,
            tmp_path / "fast.onnx",
            level=3,
            fast=least,
            force=True,
            chosen=lambda some, of, seen=counted: seen.append((some, of)),
        )
        assert len(operators(tmp_path / "fast.onnx")) == count
        assert counted == [(count, 3)]


@pytest.mark.parametrize("fast", [100, 1, 1.0, -0.1, "many", None, float("nan")])
def test_wrong_threshold(packed, tmp_path, fast):
    """Refused before anything is written."""
    with pytest.raises(InvalidOption, match="expected True, False"):
        converter.export(*packed, tmp_path / "fast.onnx", level=3, fast=fast)
    with pytest.raises(InvalidOption, match="expected True, False"):
        converter.session(*packed, level=3, fast=fast)
    assert not list(tmp_path.iterdir())


@needs_library
def test_measured_choice(packed, tmp_path, monkeypatch):
    """The fastest of the sets that were timed; dense where none is faster."""
    seen = []

    def times(order):
        def give(sessions, feeds, seconds=0):
            seen.append(len(sessions))
            return order[: len(sessions)]

        monkeypatch.setattr(pick, "shortest_times", give)
        converter.export(*packed, tmp_path / "fast.onnx", level=2, fast=True, threads=1, force=True)
        return len(operators(tmp_path / "fast.onnx"))

    assert times([1.0, 0.5, 0.7]) == 3
    assert times([1.0, 0.99, 0.985]) == 0
    assert times([1.0, 2.0, 2.0]) == 0
    assert set(seen) == {2}  # 90 % everywhere: every threshold gives the same layers


@needs_library
def test_true_is_measured_everywhere(packed, tmp_path, monkeypatch):
    """By sessions as by exports, with the same threads and sizes; a sparsity is not measured."""
    seen = []

    def choose(proto, arrays, layers, *, precision, threads, sizes, where):
        seen.append((threads, sizes))
        return layers[:1]

    monkeypatch.setattr(pick, "fastest_layers", choose)
    feeds = {"sizes": {"n": 4}}
    net = converter.session(*packed, level=2, fast=True, intra_op_num_threads=1, **feeds)
    net.use_level(1)
    converter.export(*packed, tmp_path / "a.onnx", level=2, fast=True, threads=1, **feeds)
    monkeypatch.setattr(latency, "shortest_times", lambda *args: [0.0])
    converter.level_within(*packed, 1.0, fast=True, threads=1, **feeds)
    assert seen == [(1, {"n": 4})] * 4
    assert len(operators(tmp_path / "a.onnx")) == 1
    converter.session(*packed, level=2, fast=0.7)
    assert len(seen) == 4


@needs_library
def test_sets_of_layers(monkeypatch):
    """Each threshold that makes a difference is timed once."""
    from internals import Layer

    def layer(sparsity):
        return Layer(False, frozenset(), "x", "w", (0, 1), (1, 1), "y", sparsity)

    layers = [layer(s) for s in (0.1, 0.4, 0.6, 0.8, 0.95)]
    monkeypatch.setattr(pick, "new_session", lambda *args, **options: object())
    monkeypatch.setattr(pick, "use_sparse", lambda proto, arrays, some: (proto, arrays))
    monkeypatch.setattr(pick, "example_inputs", lambda *args: {})
    monkeypatch.setattr(pick, "shortest_times", lambda *args: [9, 4, 3, 2, 5])
    assert pick.fastest_layers(None, {}, layers) == layers[3:]
    monkeypatch.setattr(pick, "shortest_times", lambda *args: [9, 1, 3, 2, 5])
    assert pick.fastest_layers(None, {}, layers) == layers[1:]
    assert pick.fastest_layers(None, {}, layers[:1]) == []


@needs_library
def test_session(packed):
    """The same outputs, another level in one call, options as ever."""
    dense = converter.session(*packed, level=2)
    fast = converter.session(*packed, level=2, fast=True, intra_op_num_threads=1)
    expected = dense.run(None, X)[0]
    found = fast.run(None, X)[0]
    same(found, expected)
    assert fast.get_session_options().intra_op_num_threads == 1
    fast.use_level(1)
    dense.use_level(1)
    same(fast.run(None, X)[0], dense.run(None, X)[0])
    assert not np.array_equal(fast.run(None, X)[0], found)
    fast.use_level("dense")
    assert fast.level == "dense"


@needs_library
def test_session_takes_a_library_twice(packed):
    """A SessionOptions object that already has the operators is no problem of ours to hide."""
    options = onnxruntime.SessionOptions()
    fast = converter.session(*packed, level=1, fast=0.5, sess_options=options)
    same(fast.run(None, X)[0], converter.session(*packed, level=1).run(None, X)[0])


def test_without_the_library(packed, tmp_path, no_library):
    """A session runs densely and says so; what cannot be measured is an error; the rest works."""
    with pytest.warns(RuntimeWarning, match="not built .*runs densely"):
        session = converter.session(*packed, level=2, fast=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected = converter.session(*packed, level=2).run(None, X)[0]
    assert np.array_equal(session.run(None, X)[0], expected)
    with pytest.raises(converter.MissingOperators, match=r"not built.*fast=0\.7"):
        converter.export(*packed, tmp_path / "fast.onnx", level=2, fast=True)
    with pytest.raises(ElsaError, match="not built"):
        converter.sparse_ops_library()
    assert not list(tmp_path.iterdir())
    converter.export(*packed, tmp_path / "fast.onnx", level=2, fast=0.5)
    same(run(tmp_path / "fast.onnx"), expected)
    assert sparse_room.instructions() == "none"
    rows = converter.measure_levels(*packed, threads=1, seconds=0)
    assert all(row.fast_seconds is None for row in rows)
    result = CliRunner().invoke(
        bench,
        [str(packed.elsa), "--onnx", str(packed.template), "-q", "--seconds=0", "--threads=1"],
    )
    assert result.exit_code == 0
    assert "not built" in result.output
    arguments = [str(packed.elsa), "--onnx", str(packed.template), "--level", "2", "--fast"]
    result = CliRunner().invoke(export, [*arguments, "-o", str(tmp_path / "no.onnx")])
    assert result.exit_code == 1
    assert "--fast 0.7" in result.output


@needs_library
def test_chosen_by_time(packed, monkeypatch):
    """The densest level that runs in time; if none does, how long each takes."""
    times = iter([0.010, 0.009, 0.004, 0.001])
    monkeypatch.setattr(latency, "shortest_times", lambda *args: [next(times)])
    assert converter.level_within(*packed, 0.005, fast=0.5) == 2
    times = iter([0.010])
    assert converter.level_within(*packed, 0.010) == "dense"
    times = iter([0.010, 0.009, 0.004, 0.003])
    with pytest.raises(NoSuchLevel, match=r"in 2 ms here: dense takes 10 ms.*level 1 takes 3 ms"):
        converter.level_within(*packed, 0.002)


@needs_library
def test_measured_levels(packed):
    """Every level and the dense network, with all that is promised."""
    rows = converter.measure_levels(*packed, threads=1, sizes={"n": 2}, seconds=0.01)
    assert [row.level for row in rows] == [1, 2, 3, "dense"]
    assert [round(row.sparsity, 2) for row in rows] == [0.95, 0.9, 0.6, 0]
    for row in rows:
        assert row.size > 0
        assert row.download is None
        assert row.dense_seconds > 0
        assert row.fast_seconds > 0
        assert row.quality is None
        if row.memory is not None:
            assert row.dense_memory > 0


@pytest.mark.parametrize("layout", ["dense", "bitmask"])
def test_the_file_of_a_level(packed, tmp_path, layout):
    """Is its level, whatever its number, and as sparse as it is, though only its data tells."""
    path, model = tmp_path / "level.safetensors", tmp_path / "level.onnx"
    elsa_format.extract(packed.elsa, path, level=2, layout=layout)
    (row,) = converter.measure_levels(path, packed.template, threads=1, seconds=0)
    assert (row.level, round(row.sparsity, 2), row.best) == (2, 0.9, False)
    assert converter.level_within(path, packed.template, 10.0) == 2
    assert converter.export(path, packed.template, model, sparse=True) == 2
    same(run(model), converter.session(*packed, level=2).run(None, X)[0])
    with pytest.raises(NoSuchLevel, match="the sparsest has 90"):
        converter.export(path, packed.template, model, sparsity=0.92, force=True)


def test_sparsity_that_nobody_knows_is_not_shown():
    """A level file need not say which tensors are nested."""
    row = converter.Measured(1, "", None, 1, None, None, None, 1.0, None, None)
    assert not mark_best([row])[0].best
    assert show([row], "accuracy").splitlines()[1].split()[:2] == ["1", "-"]


@pytest.mark.parametrize("options", [{"seconds": float("nan")}, {"seconds": -1}, {"threads": 0}])
def test_wrong_measurement(packed, options):
    """Refused before anything is measured."""
    with pytest.raises(InvalidOption, match="expected"):
        converter.measure_levels(*packed, **options)


@needs_library
def test_a_level_that_stays_dense_is_measured_once(packed, monkeypatch):
    """Its fast model is the dense one: neither faster nor slower."""
    monkeypatch.setattr(pick, "pick_layers", lambda *arguments, **options: [])
    for row in converter.measure_levels(*packed, threads=1, seconds=0.01):
        assert row.fast_seconds == row.dense_seconds
        assert row.memory == row.dense_memory


def test_best_levels():
    """A level is marked unless another is at least as good and as fast, and better in one."""

    def row(level, quality, seconds, sparsity=0.0):
        return converter.Measured(level, "", sparsity, 1, None, None, None, seconds, None, quality)

    def marked(*rows):
        return [r.level for r in mark_best(rows) if r.best]

    assert marked(row(1, 0.9, 1), row(2, 0.95, 2), row("dense", 0.96, 9)) == [1, 2, "dense"]
    assert marked(row(1, 0.9, 3), row(2, 0.95, 2), row("dense", 0.95, 9)) == [2]
    assert marked(row(1, 0.9, 1), row(2, 0.9, 1)) == [1, 2]
    # Nobody knows how good the others are.
    assert marked(row(1, None, 1, 0.9), row(2, 0.5, 2, 0.8), row("dense", None, 2)) == [2]
    assert marked(row(1, None, 1, 0.9), row("dense", None, 2)) == []


def test_the_star_is_explained():
    """In one line under the table, or that there is none, and why."""
    rows = [
        converter.Measured(1, "", 0.9, 1, None, None, None, 1.0, None, quality, axes={"n": 1})
        for quality in (0.5, None)
    ]
    starred, plain = (show(mark_best([row]), "top1") for row in rows)
    assert "\n* No other level is at least as good in top1 and time" in starred
    assert "*" not in plain
    assert "No level records top1; --metric" in plain
    for text in (starred, plain):
        assert "\nopen axes measured as n=1; set them with --dim AXIS=SIZE" in text


def test_commands(packed, tmp_path):
    """As a user runs them."""
    arguments = [str(packed.elsa), "--onnx", str(packed.template)]
    target = tmp_path / "fast.onnx"
    result = CliRunner().invoke(
        export, [*arguments, "--level", "1", "--fast=50", "-o", str(target)]
    )
    assert result.exit_code == 0, result.output
    assert "level 1, 3 of 3 layers sparse" in result.output
    assert len(operators(target)) == 3
    result = CliRunner().invoke(
        export, [*arguments, "-l1", "--fast=0.5", "--json", "-f", "-o", str(target)]
    )
    assert json.loads(result.output)["sparse_layers"] == 3
    if library() is None:
        return
    result = CliRunner().invoke(
        export,
        [*arguments, "-l1", "--fast", "--threads=1", "--dim", "n=3", "-f", "-o", str(target)],
    )
    assert result.exit_code == 0, result.output
    result = CliRunner().invoke(
        export, [*arguments, "--max-latency", "10s", "--threads=1", "-f", "-o", str(target)]
    )
    assert "level dense" in result.output
    result = CliRunner().invoke(bench, [*arguments, "--seconds", "0", "--threads=1", "-q"])
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0].split() == [
        "level",
        "sparsity",
        "dense",
        "fast",
        "accuracy",
        "size",
        "download",
        "memory",
    ]
    assert lines[6:8] == [
        "No level records accuracy; --metric names another metric.",
        "open axes measured as n=1; set them with --dim AXIS=SIZE",
    ]
    result = CliRunner().invoke(
        bench, [*arguments, "--seconds", "0", "--threads=1", "--json", "-q"]
    )
    assert [row["level"] for row in json.loads(result.stdout)] == [1, 2, 3, "dense"]
    page = tmp_path / "report.html"
    result = CliRunner().invoke(
        bench, [*arguments, "--seconds=0", "--threads=1", "-q", "--html", str(page)]
    )
    assert result.exit_code == 0, result.output
    document = re.search(r'<script[^>]*id="data"[^>]*>(.*?)</script>', page.read_text(), re.DOTALL)
    rows = json.loads(document[1])["measured"]
    assert [row["level"] for row in rows] == [1, 2, 3, "dense"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--level", "1", "--fast=150"], "below 100 percent"),
        (["--level", "1", "--fast=many"], "expected percent"),
        (["--level", "1", "--max-latency", "5ms"], "Give one of"),
        (["--max-latency", "5"], "not a time such as 5ms"),
        (["--max-latency", "0ms"], "not a time"),
        (["--max-latency", "-1ms"], "not a time"),
        (["--level", "1", "--fast", "--dim", "batch"], "such as batch=8"),
        (["--level", "1", "--fast", "--dim", "n=0"], "such as batch=8"),
        (["--level", "1", "--fast", "--threads", "0"], "0 is not in the range"),
        (["--level", "1", "--fast", "--threads", "257"], "expected None, or 1 to 256"),
        (["--max-latency", "5ms", "--threads", "99999999999"], "expected None, or 1 to 256"),
        (["--level", "1", "--threads", "2"], "what is measured"),
        (["--max-size", "1MB", "--fast=0.7"], "give --level or --sparsity"),
        (["--all-levels", "--fast=0.7"], "takes no such option"),
    ],
)
def test_wrong_usage(packed, tmp_path, options, words):
    """One line, exit code 2, nothing left behind."""
    target = tmp_path / "fast.onnx"
    arguments = [str(packed.elsa), "--onnx", str(packed.template), *options, "-o", str(target)]
    result = CliRunner().invoke(export, arguments)
    assert result.exit_code == 2
    assert words in result.output
    assert not target.exists()


@needs_library
def test_axes(packed, tmp_path):
    """A size for an axis that no input has is an error, which names those that there are."""
    with pytest.raises(InvalidOption, match="no input has an open axis called 'batch'"):
        converter.export(*packed, tmp_path / "fast.onnx", level=1, fast=True, sizes={"batch": 2})
    words = [str(packed.elsa), "--onnx", str(packed.template), "--dim", "batch=2"]
    fast = tmp_path / "fast.onnx"
    for command, options in ((bench, []), (export, ["-l1", "--fast", "-o", str(fast)])):
        result = CliRunner().invoke(command, [*words, *options])
        assert result.exit_code == 2
        assert result.output.endswith("called 'batch'; --dim takes one of n\n")
        assert "measuring" not in result.output
    assert not list(tmp_path.iterdir())
    result = CliRunner().invoke(export, [*words[:3], "-l1", "--fast", "-o", str(fast)])
    assert result.output.endswith("\nopen axes measured as n=1; set them with --dim AXIS=SIZE\n")


def test_axes_without_a_name(tmp_path):
    """Are called by their input and place, in the graph and in the session alike."""
    x = onnx.helper.make_tensor_value_info("x", 1, [None, 3, "width", 0])
    y = onnx.helper.make_tensor_value_info("y", 1, None)
    graph = onnx.helper.make_graph([onnx.helper.make_node("Relu", ["x"], ["y"])], "g", [x], [y])
    opset = [onnx.helper.make_opsetid("", 17)]
    model = onnx.helper.make_model(graph, opset_imports=opset, ir_version=8)
    onnx.save(model, tmp_path / "m.onnx")
    sizes = {"x[0]": 2}
    found = converter.measured_axes(tmp_path / "m.onnx", sizes)
    assert found == {"x[0]": 2, "width": 1}
    feeds = timing.example_inputs(timing.new_session(model, {}, library=False), sizes)
    assert feeds["x"].shape == (2, 3, 1, 0)


def test_help_needs_no_onnx():
    """`elsa-bench --help` imports neither onnx nor onnxruntime."""
    program = f"import sys; {import_line('_bench_command')}; print('onnx' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"


def test_the_former_name_works_with_a_warning() -> None:
    with pytest.warns(DeprecationWarning, match=r"is now elsa_converters\.sparse\.find_library"):
        from elsa_converters.onnx_sparse import find_library as former
    assert former is sparse_room.find_library
