"""ONNX models packed by calibration: files, templates and what every level then computes."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from elsa_converters._numpy import read_numpy
from elsa_converters.onnx import (
    InvalidData,
    UnsupportedOnnx,
    all_levels_session,
    export,
    export_all_levels,
    session,
)
from elsa_converters.onnx._calibrate.samples import read_batches
from onnx import TensorProto, helper
from onnx_models import assert_near, graph, model, run, save, tensor, value, weights

import elsa_format
from elsa_format import pack

Array = np.ndarray[Any, Any]
SPARSITIES = [75, 50]


def classifier() -> onnx.ModelProto:
    """Convolutions of all kinds, a batch norm, a layer over all positions, a softmax."""
    nodes = [
        helper.make_node("Conv", ["x", "c1", "c1.b"], ["h1"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["h1"], ["r1"]),
        helper.make_node("Conv", ["r1", "depth"], ["h2"], pads=[1, 1, 1, 1], group=8),
        helper.make_node("BatchNormalization", ["h2", *(f"n.{i}" for i in range(4))], ["n"]),
        helper.make_node("Conv", ["n", "grouped"], ["h3"], strides=[2, 2], group=2),
        helper.make_node("Relu", ["h3"], ["r3"]),
        helper.make_node("GlobalAveragePool", ["r3"], ["p"]),
        helper.make_node("Flatten", ["p"], ["f"]),
        helper.make_node("MatMul", ["f", "w"], ["m"]),
        helper.make_node("Gemm", ["m", "head", "head.b"], ["logits"], transB=1),
        helper.make_node("Softmax", ["logits"], ["y"]),
    ]
    arrays = {
        "c1": weights(8, 3, 3, 3, seed=1),
        "c1.b": weights(8, seed=2),
        "depth": weights(8, 1, 3, 3, seed=3),
        **{f"n.{i}": np.abs(weights(8, seed=4 + i)) + 0.5 for i in range(4)},
        "grouped": weights(12, 4, 2, 2, seed=8),
        "w": weights(12, 16, seed=9) / 4,
        "head": weights(5, 16, seed=10) / 40,
        "head.b": weights(5, seed=11),
    }
    main = graph(
        nodes,
        [value("x", ["n", 3, 8, 8])],
        [value("y", ["n", 5])],
        [tensor(name, array) for name, array in arrays.items()],
    )
    return model(main)


@dataclass(frozen=True)
class Case:
    """A model, samples, and what they were packed to."""

    model: Path
    elsa: Path
    template: Path
    samples: Path
    x: Array

    @property
    def held(self) -> Array:
        """The samples that levels are measured on: one of eight batches of three."""
        return np.concatenate([self.x[21:24], self.x[45:48]])


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("packed")
    path, x = save(classifier(), folder / "net.onnx"), weights(48, 3, 8, 8, seed=20)
    elsa, template = folder / "net.safetensors", folder / "template.onnx"
    samples = folder / "samples.npz"
    np.savez(samples, x=x)
    pack(path, elsa, sparsities=SPARSITIES, calibrate=samples, template=template)
    return Case(path, elsa, template, samples, x)


def test_levels_compute_what_calibration_measured(case: Case) -> None:
    (expected,) = run(case.model, {"x": case.held})
    with elsa_format.open(case.elsa) as network:
        profile = network.profile
    assert profile.nested.keys() == {"c1", "grouped", "w", "head"}
    assert {"depth", "depth.bias", "c1.b", "c1.scale"} <= set(profile.per_level)
    measured = {level.number: level.metrics for level in profile.levels}
    for number, metrics in {**measured, "dense": profile.dense_metrics}.items():
        net = session(case.elsa, case.template, level=number)
        (found,) = net.run(None, {"x": case.held})
        error = np.sqrt(np.square(found - expected).sum() / np.square(expected).sum())
        assert metrics["relative_error"] == pytest.approx(error, rel=1e-4, abs=1e-5)
        same = (found.argmax(-1) == expected.argmax(-1)).mean()
        assert metrics["agreement"] == pytest.approx(same)


def test_sparsities_count_the_nested_tensors(case: Case) -> None:
    with elsa_format.open(case.elsa) as network:
        for level, sparsity in ((1, 75), (2, 50), ("dense", 0)):
            nested = [network.tensor(name, level) for name in ("c1", "grouped", "w", "head")]
            kept = sum(np.count_nonzero(array) for array in nested)
            assert kept == round(sum(array.size for array in nested) * (100 - sparsity) / 100)


def test_a_template_takes_everything_that_others_take(case: Case, tmp_path: Path) -> None:
    onnx.checker.check_model(case.template)
    for level in (1, "dense"):
        export(case.elsa, case.template, tmp_path / f"{level}.onnx", level=level)
        expected = session(case.elsa, case.template, level=level).run(None, {"x": case.x})
        assert_near(run(tmp_path / f"{level}.onnx", {"x": case.x}), expected, 1e-5)
    every = case.elsa.parent / "every.onnx"
    export_all_levels(case.elsa, case.template, every)
    expected = session(case.elsa, case.template, level=2).run(None, {"x": case.x})
    assert_near(all_levels_session(every, level=2).run(None, {"x": case.x}), expected, 1e-5)


@pytest.mark.parametrize("options", [{"threads": 1}, {"threads": 3, "max_memory": 1}])
def test_threads_and_memory_change_no_byte(
    options: dict[str, Any], case: Case, tmp_path: Path
) -> None:
    elsa = tmp_path / "net.safetensors"
    pack(case.model, elsa, sparsities=SPARSITIES, calibrate=case.samples, **options)
    assert elsa.read_bytes() == case.elsa.read_bytes()


def test_exact_keeps_the_dense_network(case: Case, tmp_path: Path) -> None:
    elsa, template = tmp_path / "net.safetensors", tmp_path / "net.onnx"
    pack(
        case.model,
        elsa,
        sparsities=SPARSITIES,
        calibrate=case.samples,
        keep_dense="exact",
        template=template,
    )
    (found,) = session(elsa, template, level="dense").run(None, {"x": case.x})
    assert_near([found], run(case.model, {"x": case.x}), 1e-5)


# --- Samples -------------------------------------------------------------------------------------


def test_samples_come_as_files_folders_mappings_and_iterables(case: Case, tmp_path: Path) -> None:
    halves, arrays = tmp_path / "halves", tmp_path / "arrays"
    halves.mkdir()
    arrays.mkdir()
    np.savez(halves / "0.npz", x=case.x[:20])
    np.savez(halves / "1.npz", x=case.x[20:])
    np.save(arrays / "x.npy", case.x)
    feeds = ({"x": case.x[at : at + 12]} for at in range(0, 48, 12))
    for samples in (case.samples, halves, arrays, {"x": case.x}, feeds):
        batches = read_batches(samples, case.model)
        assert max(len(batch["x"]) for batch in batches) == 3
        np.testing.assert_array_equal(np.concatenate([batch["x"] for batch in batches]), case.x)


def test_at_most_so_many_samples(case: Case) -> None:
    feeds = [{"x": case.x[:10]}, {"x": case.x[10:20]}, {"x": case.x[20:]}]
    for samples in (case.samples, feeds):
        batches = read_batches(samples, case.model, limit=17)
        np.testing.assert_array_equal(
            np.concatenate([batch["x"] for batch in batches]), case.x[:17]
        )


def test_a_fixed_number_at_a_time_leaves_out_the_rest(tmp_path: Path) -> None:
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    main = graph([node], [value("x", [4, 3])], [value("y", [4, 2])], [tensor("w", weights(3, 2))])
    path = save(model(main), tmp_path / "net.onnx")
    batches = read_batches({"x": weights(11, 3)}, path)
    assert [len(batch["x"]) for batch in batches] == [4, 4]


def recurrent() -> onnx.ModelProto:
    """A state whose samples lie along its second axis, and a number."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("Mul", ["h", "factor"], ["m"]),
        helper.make_node("Unsqueeze", ["m", "zero"], ["u"]),
        helper.make_node("Add", ["u", "state"], ["next"]),
    ]
    arrays = [tensor("w", weights(6, 4)), tensor("zero", np.zeros(1, np.int64))]
    inputs = [value("x", ["n", 6]), value("state", [1, "n", 4]), value("factor", [])]
    return model(graph(nodes, inputs, [value("next", [1, "n", 4])], arrays))


def test_feeds_as_the_graph_takes_them(tmp_path: Path) -> None:
    """A feed whose first axes are not that of samples is one sample."""
    path = save(recurrent(), tmp_path / "net.onnx")
    half = np.float32(0.5).reshape(())
    feeds = [
        {"x": weights(5, 6, seed=at), "state": weights(1, 5, 4, seed=at), "factor": half}
        for at in range(9)
    ]
    folder = tmp_path / "feeds"
    folder.mkdir()
    for number, feed in enumerate(feeds):
        np.savez(folder / f"{number}.npz", **feed)
    for samples in (feeds, folder):
        batches = read_batches(samples, path, limit=8)
        assert [feed["x"].shape for feed in batches] == [(5, 6)] * 8
        out = tmp_path / "net.safetensors"
        pack(path, out, sparsities=[50], calibrate=samples, samples=8, force=True)
        with elsa_format.open(out) as network:
            assert network.profile.metrics["relative_error"].samples == 1
    with pytest.raises(InvalidData, match=r"samples: array 'state' holds 1 samples, 'x' 5"):
        read_batches(feeds[0], path)
    with pytest.raises(InvalidData, match=r"samples 0: array 'state' holds 2 samples, 'x' 5"):
        read_batches([{**feeds[0], "state": weights(2, 5, 4)}], path)
    feeds[0]["state"][0, 3] = np.nan
    with pytest.raises(InvalidData, match=r"samples 0: array 'state' holds NaN in sample 0"):
        read_batches(feeds, path)


def bad_samples(x: Array) -> Iterator[tuple[Any, str]]:
    yield {"y": x}, "samples: no array 'x'"
    yield {"x": x, "y": x}, "samples: array 'y' is no input"
    yield {"x": x.astype(np.float64)}, "array 'x' is float64, the graph takes float32"
    yield {"x": x[:, :2]}, r"array 'x' has shape \[48, 2, 8, 8\]"
    yield {"x": np.where(x == x[7, 0, 0, 0], np.nan, x)}, "array 'x' holds NaN in sample 7"
    yield [{"x": x}, {"z": x}], "samples 1: no array 'x'"
    yield [x], "samples 0: ndarray, expected arrays by names of inputs"
    yield {"x": x[:3]}, "3 samples"
    yield {"x": x[:0]}, "holds no samples"


@pytest.mark.parametrize("number", range(9))
def test_samples_that_do_not_fit(number: int, case: Case, tmp_path: Path) -> None:
    samples, message = list(bad_samples(case.x))[number]
    with pytest.raises(InvalidData, match=message):
        pack(case.model, tmp_path / "o.safetensors", sparsities=SPARSITIES, calibrate=samples)
    assert not list(tmp_path.iterdir())


def test_folders_of_other_files_are_refused(case: Case, tmp_path: Path) -> None:
    with pytest.raises(InvalidData, match=r"expected \.npz files"):
        read_batches(tmp_path, case.model)
    (tmp_path / "x.npy").write_bytes(b"no array")
    with pytest.raises(
        InvalidData, match=r"x.npy: is not a numpy archive \(.npz\) or array \(.npy\)"
    ):
        read_batches(tmp_path, case.model)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_damaged_archives_are_refused(save: Any, case: Case, tmp_path: Path) -> None:
    """Whatever zipfile, zlib and numpy make of them."""
    path, random = tmp_path / "x.npz", np.random.default_rng(0)
    save(path, x=case.x[:2])
    whole = path.read_bytes()
    for _ in range(300):
        damaged = np.frombuffer(whole, np.uint8).copy()
        damaged[random.integers(0, len(whole), 3)] = random.integers(0, 256, 3)
        path.write_bytes(damaged[: random.integers(len(whole) // 2, len(whole) + 1)].tobytes())
        with contextlib.suppress(InvalidData):
            read_numpy(path)


def test_random_numbers_are_told(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("RandomNormalLike", ["h"], ["r"]),
        helper.make_node("Add", ["h", "r"], ["y"]),
    ]
    main = graph(
        nodes, [value("x", ["n", 6])], [value("y", ["n", 4])], [tensor("w", weights(6, 4))]
    )
    path = save(model(main), tmp_path / "net.onnx")
    report = pack(path, tmp_path / "o", sparsities=[50], calibrate={"x": weights(16, 6)})
    assert any("draws random numbers (RandomNormalLike)" in note for note in report.notes)


def test_a_graph_without_layers(tmp_path: Path) -> None:
    node = helper.make_node("Gather", ["w", "x"], ["y"])
    main = graph(
        [node],
        [value("x", ["n"], TensorProto.INT64)],
        [value("y", ["n", 3])],
        [tensor("w", weights(9, 3))],
    )
    path = save(model(main), tmp_path / "net.onnx")
    with pytest.raises(UnsupportedOnnx, match=r"no layer can be nested \('w': used by Gather\)"):
        pack(path, tmp_path / "o", sparsities=[50], calibrate={"x": np.arange(9)})
