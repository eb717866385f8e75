"""Packing: exact counts, ties, patterns, given counters, nested checkpoints, refusals."""

import io
from decimal import ROUND_HALF_EVEN, Decimal
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from bits import same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

import elsa_format as elsa

Network = dict[str, np.ndarray]


def pack(network: Any, **options: Any) -> elsa.File:
    out = io.BytesIO()
    elsa.pack(network, out, **options)
    elsa.verify(io.BytesIO(out.getvalue()))
    return elsa.open(out)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.lists(st.integers(0, 99), min_size=1, max_size=5, unique=True),
    st.sampled_from(["global", "uniform"]),
    st.sampled_from(["float32", "float16", "bfloat16", "float64", "mixed"]),
)
def test_magnitude_levels_keep_exactly_the_largest(
    seed: int, percents: list[int], scope: str, kind: str
) -> None:
    rng = np.random.default_rng(seed)
    network: Network = {}
    for at, size in enumerate([(5, 7), (64, 33), (1, 1)]):
        # Few distinct magnitudes, so that ties are everywhere; zeros among them.
        values = rng.integers(-6, 7, size) / 4
        mixed = ["float32", "bfloat16", "float16"][at]
        dtype = np.dtype(ml_dtypes.bfloat16) if "bfloat16" in (kind, mixed) else None
        if kind not in ("bfloat16", "mixed"):
            dtype = np.dtype(kind)
        elif kind == "mixed":
            dtype = np.dtype(ml_dtypes.bfloat16 if mixed == "bfloat16" else mixed)
        network[f"w{at}"] = values.astype(dtype)
    percents = sorted(percents, reverse=True)
    file = pack(network, sparsities=[f"{percent}%" for percent in percents], scope=scope)
    groups = [list(network)] if scope == "global" else [[name] for name in network]
    # The order of writing decides ties: by falling width, then as given.
    order = sorted(network, key=lambda name: -network[name].itemsize)
    for group in groups:
        flat = np.concatenate(
            [network[n].astype(np.float64).reshape(-1) for n in order if n in group]
        )
        ranked = np.argsort(-np.abs(flat), kind="stable")
        for level, percent in enumerate(percents, 1):
            exact = Decimal(flat.size * (100 - percent)).scaleb(-2)
            keep = max(1, int(exact.to_integral_value(ROUND_HALF_EVEN)))
            expected = np.zeros(flat.size, bool)
            expected[ranked[:keep]] = True
            expected &= flat != 0
            found = np.concatenate(
                [file.tensor(n, level).reshape(-1) != 0 for n in order if n in group]
            )
            assert (found == expected).all()


def test_a_level_keeps_fewer_where_fewer_are_nonzero() -> None:
    weights = np.zeros((10, 10), np.float32)
    weights[0, :3] = 1
    file = pack({"w": weights}, sparsities=[99, 50])
    assert file.nested["w"] == (1, 3)


@pytest.mark.parametrize("axis", [-1, 0, 1, 2])
def test_patterns_keep_the_largest_of_each_group(axis: int) -> None:
    rng = np.random.default_rng(1)
    weights = rng.integers(-9, 10, (16, 24, 8)).astype(np.float32)
    file = pack({"w": weights}, sparsities=["1:8", "1:4", "2:4"], axis=axis)
    assert [level.pattern for level in file.levels] == ["1:8", "1:4", "2:4"]
    groups = np.moveaxis(weights, axis, -1)
    for level, (n, m) in enumerate([(1, 8), (1, 4), (2, 4)], 1):
        kept = np.moveaxis(file.tensor("w", level), axis, -1) != 0
        magnitude = np.abs(groups).reshape(-1, m)
        counts = kept.reshape(-1, m).sum(axis=1)
        assert (counts == np.minimum(n, (magnitude > 0).sum(axis=1))).all()
        smallest_kept = np.where(kept.reshape(-1, m), magnitude, np.inf).min(axis=1)
        largest_dropped = np.where(kept.reshape(-1, m), -np.inf, magnitude).max(axis=1)
        assert (largest_dropped <= smallest_kept).all()


def test_levels_given_as_checkpoints_come_back(network: Network, tmp_path: Path) -> None:
    file = pack(network, sparsities=[95, 90, 80])
    levels = [file.load(t) for t in (1, 2, 3)]
    for t, level in enumerate(levels, 1):
        level["bn/mean"] = np.full(8, t, np.float32)
        save_file(level, tmp_path / f"{t}.safetensors")
    save_file(file.load(), tmp_path / "dense.safetensors")
    paths = [tmp_path / f"{t}.safetensors" for t in (1, 2, 3)]
    again = pack(tmp_path / "dense.safetensors", levels=paths, per_level=["bn/*"])
    for t, level in enumerate(levels, 1):
        assert same_bits(again.load(t), level)
    with pytest.raises(elsa.TensorMismatch, match="per_level='bn/mean' stores one"):
        pack(tmp_path / "dense.safetensors", levels=paths)


def test_levels_that_are_not_nested_are_refused(network: Network) -> None:
    file = pack(network, sparsities=[95, 90])
    small, large = file.load(1), file.load(2)
    dense = file.load()
    with pytest.raises(elsa.NotNested, match="is zero, but a sparser level keeps it"):
        pack(dense, levels=[large, small])
    changed = dict(small, **{"dense/kernel": small["dense/kernel"] * np.float32(1.5)})
    with pytest.raises(elsa.NotNested, match=r"'dense/kernel': weight \d+ differs"):
        pack(dense, levels=[changed, large])
    with pytest.raises(elsa.TensorMismatch, match="'step' is missing"):
        pack(dense, levels=[{k: v for k, v in small.items() if k != "step"}])
    with pytest.raises(elsa.TensorMismatch, match=r"shape \[10, 32\], expected \[32, 10\]"):
        pack(dense, levels=[dict(small, **{"dense/kernel": small["dense/kernel"].T.copy()})])


def test_the_papers_counters(network: Network) -> None:
    rng = np.random.default_rng(0)
    steps = rng.integers(1, 5, (32, 10))  # 4 = T + 1: dense only
    file = pack(network, counters={"dense/kernel": steps}, level_count=3)
    assert len(file.levels) == 3
    assert set(file.nested) == {"dense/kernel"}
    for level in (1, 2, 3):
        assert ((file.tensor("dense/kernel", level) != 0) == (steps <= level)).all()
    zeros = np.where(steps == 4, 0, steps)
    assert same_bits(pack(network, counters={"dense/kernel": zeros}).load(), file.load())


def test_counters_without_a_zero_lose_no_level(network: Network) -> None:
    steps = np.random.default_rng(0).integers(1, 4, (32, 10))
    out = io.BytesIO()
    report = elsa.pack(network, out, counters={"dense/kernel": steps})
    file = elsa.open(out)
    assert len(file.levels) == 3
    for level in (1, 2, 3):
        assert ((file.tensor("dense/kernel", level) != 0) == (steps <= level)).all()
    assert "level 3 keeps every weight" in report.notes[0]
    assert elsa.pack(network, out, counters={"dense/kernel": steps}, level_count=3).notes == ()
    with pytest.raises(elsa.InfeasibleLevels, match="2 names for 3 levels"):
        pack(network, counters={"dense/kernel": steps}, names=["a", "b"], level_count=3)


def test_counters_that_do_not_fit_are_refused(network: Network) -> None:
    kernel = np.ones((32, 10), np.int32)
    kernel[0, 0] = 0
    with pytest.raises(elsa.TensorMismatch, match="'nope' is not in"):
        pack(network, counters={"nope": kernel})
    with pytest.raises(elsa.TensorMismatch, match="expected integers"):
        pack(network, counters={"dense/kernel": kernel.astype(np.float32)})
    with pytest.raises(elsa.TensorMismatch, match="shape"):
        pack(network, counters={"dense/kernel": kernel[:1]})
    bad = kernel.copy()
    bad[0, 3] = 9
    with pytest.raises(elsa.CounterOutOfRange, match="weight 3 has counter 9"):
        pack(network, counters={"dense/kernel": bad}, names=["a", "b"])
    bad[0, 1] = -1
    with pytest.raises(elsa.CounterOutOfRange, match="weight 1 has counter -1"):
        pack(network, counters={"dense/kernel": bad})


def test_what_is_nested_can_be_chosen(network: Network) -> None:
    assert set(pack(network, sparsities=[50]).nested) == {"conv/kernel", "dense/kernel"}
    assert set(pack(network, sparsities=[50], exclude=["conv*"]).nested) == {"dense/kernel"}
    assert set(pack(network, sparsities=[50], include=["*bias"]).nested) == {"dense/bias"}
    report = elsa.pack(network, io.BytesIO(), sparsities=[50], exclude=["conv*"])
    assert report.shared == {
        "conv/kernel": "excluded",
        "dense/bias": "1-dimensional",
        "bn/mean": "1-dimensional",
        "step": "dtype I64",
    }
    with pytest.raises(elsa.TensorMismatch, match="no tensor matches 'cov'"):
        pack(network, sparsities=[50], exclude=["cov"])


@pytest.mark.parametrize(
    ("change", "options", "error", "message"),
    [
        ({}, {"sparsities": [80, 90]}, elsa.InfeasibleLevels, "must fall"),
        ({}, {"sparsities": [90, 90]}, elsa.InfeasibleLevels, "must fall"),
        ({}, {"sparsities": [100]}, elsa.InfeasibleLevels, "below 100"),
        ({}, {"sparsities": ["x"]}, elsa.InfeasibleLevels, "expected percent"),
        ({}, {"sparsities": []}, elsa.InfeasibleLevels, "0 levels"),
        ({}, {"sparsities": ["2:4", 50]}, elsa.InfeasibleLevels, "mixed"),
        ({}, {"sparsities": ["2:4"]}, elsa.InfeasibleLevels, "10 weights along axis -1"),
        ({}, {"sparsities": [50], "exclude": ["*"]}, elsa.InfeasibleLevels, "no tensor can be"),
        ({"conv/kernel": np.inf}, {"sparsities": [50]}, elsa.NonFinite, "weight 5 is inf"),
        ({"dense/kernel": np.nan}, {"sparsities": [50]}, elsa.NonFinite, "weight 5 is nan"),
        ({}, {"sparsities": [50], "per_level": ["bn*"]}, elsa.TensorMismatch, "per-level"),
    ],
)
def test_what_cannot_be_packed(
    network: Network,
    tmp_path: Path,
    change: dict[str, float],
    options: dict[str, Any],
    error: type[elsa.ElsaError],
    message: str,
) -> None:
    for name, value in change.items():
        network[name].reshape(-1)[5] = value
    with pytest.raises(error, match=message):
        elsa.pack(network, tmp_path / "out.safetensors", **options)
    assert list(tmp_path.iterdir()) == []


def test_a_zero_weight_cannot_be_frozen(network: Network) -> None:
    network["dense/kernel"][0, 0] = 0
    counters = np.ones((32, 10), np.uint8)
    counters[5] = 0
    with pytest.raises(elsa.ZeroFrozen, match="weight 0 is zero"):
        pack(network, counters={"dense/kernel": counters})


def test_too_many_levels_for_the_dtype() -> None:
    weights = np.ones((20, 20), ml_dtypes.bfloat16)
    with pytest.raises(elsa.BitsTooWide, match="8-bit counters do not fit BF16"):
        pack({"w": weights}, counters={"w": np.arange(400).reshape(20, 20) % 200})
    report = elsa.pack({"w": weights}, io.BytesIO(), sparsities=[90, 80, 70, 60])
    assert "4 mantissa bits in BF16" in report.notes[0]


def test_the_same_input_gives_the_same_bytes(network: Network, tmp_path: Path) -> None:
    save_file(network, tmp_path / "dense.safetensors")
    for name in "ab":
        elsa.pack(tmp_path / "dense.safetensors", tmp_path / name, sparsities=[95, 90, 80])
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_the_data_section_has_the_size_of_the_dense_checkpoint(
    network: Network, tmp_path: Path
) -> None:
    save_file(network, tmp_path / "dense.safetensors", metadata={"format": "np"})
    elsa.pack(tmp_path / "dense.safetensors", tmp_path / "net.safetensors", sparsities=[95, 90])
    with elsa.open(tmp_path / "net.safetensors") as file:
        assert file.data_size == sum(array.nbytes for array in network.values())
        assert file.metadata == {"format": "np"}
    loaded = load_file(tmp_path / "net.safetensors")
    assert loaded.keys() == network.keys()
    for name, array in loaded.items():
        np.testing.assert_allclose(array, network[name], rtol=1e-6)


def test_packing_twice_is_refused(packed: Path, tmp_path: Path) -> None:
    with pytest.raises(elsa.AlreadyPacked, match="is an ELSA file already"):
        elsa.pack(packed, tmp_path / "again", sparsities=[50])


def test_numpy_archives(network: Network, tmp_path: Path) -> None:
    network["dense/kernel"] = np.asfortranarray(network["dense/kernel"])
    plain, squeezed = tmp_path / "plain.npz", tmp_path / "squeezed.npz"
    np.savez(plain, **network)
    np.savez_compressed(squeezed, **network)
    expected = pack(network, sparsities=[90, 50]).load()
    assert same_bits(pack(plain, sparsities=[90, 50]).load(), expected)
    assert same_bits(pack(squeezed, sparsities=[90, 50]).load(), expected)
    np.savez(plain, w=np.array([None, {}]))
    with pytest.raises(elsa.InvalidCheckpoint, match="array 'w'"):
        pack(plain, sparsities=[50])
    plain.write_bytes(b"\0 not a zip file")
    with pytest.raises(elsa.InvalidCheckpoint, match="not a zip file"):
        pack(plain, sparsities=[50])
    np.savez(plain, w=np.ones((2, 2), ml_dtypes.bfloat16))
    with pytest.raises(elsa.InvalidCheckpoint, match="bfloat16 as safetensors"):
        pack(plain, sparsities=[50])


def test_shards_are_read_as_one_checkpoint(network: Network, tmp_path: Path) -> None:
    halves = [dict(list(network.items())[:2]), dict(list(network.items())[2:])]
    weight_map = {}
    for number, half in enumerate(halves, 1):
        name = f"model-{number:05d}-of-00002.safetensors"
        save_file(half, tmp_path / name)
        weight_map |= dict.fromkeys(half, name)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(
        f'{{"metadata":{{}},"weight_map":{str(weight_map).replace(chr(39), chr(34))}}}'
    )
    assert same_bits(
        pack(index, sparsities=[90, 50]).load(), pack(network, sparsities=[90, 50]).load()
    )
    for name in ("../model-00001-of-00002.safetensors", "/etc/passwd", "sub/x.safetensors"):
        index.write_text(f'{{"weight_map":{{"a":"{name}"}}}}')
        with pytest.raises(elsa.UnsafePath, match="outside the directory"):
            pack(index, sparsities=[50])
    outside = tmp_path.parent / "outside.safetensors"
    save_file(network, outside)
    (tmp_path / "link.safetensors").symlink_to(outside)
    index.write_text('{"weight_map":{"a":"link.safetensors"}}')
    with pytest.raises(elsa.UnsafePath):
        pack(index, sparsities=[50])
    index.write_text('{"weight_map":{"a":"missing.safetensors"}}')
    with pytest.raises(elsa.InvalidIndex, match="does not exist"):
        pack(index, sparsities=[50])
    index.write_text('{"weight_map":{"a":"model-00001-of-00002.safetensors"}}')
    with pytest.raises(elsa.InvalidIndex, match="not in the index"):
        pack(index, sparsities=[50])
