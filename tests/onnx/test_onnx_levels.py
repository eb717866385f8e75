"""Every way to a level gives the same network: one file, sparse, all levels, in memory, a pipe."""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_models as m
import onnxruntime
import pytest
from elsa_converters.onnx import (
    ExportOptions,
    OnnxCheckpoint,
    all_levels_session,
    export,
    export_all_levels,
    level_within,
    session,
)
from onnx import ModelProto, TensorProto, helper

import elsa_format

LEVELS: list[Any] = ["dense", 1, 2, 3]


def half_stored(dtype: Any) -> ModelProto:
    """Weights of 16 bits that the graph casts to float32, as onnxruntime needs of bfloat16."""
    nodes = [
        helper.make_node("Cast", ["w"], ["wide"], to=TensorProto.FLOAT),
        helper.make_node("MatMul", ["x", "wide"], ["y"]),
    ]
    w = m.tensor("w", m.weights(16, 24, dtype=dtype))
    return m.model(m.graph(nodes, [m.value("x", ["n", 16])], [m.value("y", ["n", 24])], [w]))


def in_branch() -> ModelProto:
    """A weight that only a branch reads."""
    branches = {
        key: m.graph(
            [
                m.constant("w", m.weights(16, 8, seed=seed)),
                helper.make_node("MatMul", ["x", "w"], ["y"]),
            ],
            [],
            [m.value("y", ["n", 8])],
            name=key,
        )
        for seed, key in enumerate(("then_branch", "else_branch"))
    }
    nodes = [
        helper.make_node("ReduceSum", ["x"], ["s"], keepdims=0),
        helper.make_node("Greater", ["s", "zero"], ["c"]),
        helper.make_node("If", ["c"], ["y"], **branches),
    ]
    zero = m.tensor("zero", np.zeros((), np.float32))
    return m.model(m.graph(nodes, [m.value("x", ["n", 16])], [m.value("y", ["n", 8])], [zero]))


def overridable() -> ModelProto:
    """Weights that a caller may change."""
    proto = m.mlp()
    for t in proto.graph.initializer:
        proto.graph.input.append(m.value(t.name, list(t.dims)))
    return proto


RUNTIME = tuple(int(n) for n in onnxruntime.__version__.split(".")[:2])
NEWEST = 24 if RUNTIME >= (1, 24) else 22
"""The operators that the runtime knows."""
MODELS = {
    **{f"opset {n}": (lambda n=n: m.mlp(n, ir_version=8)) for n in (9, 10, 11, 13, 17)},
    **{f"opset {n}": (lambda n=n: m.mlp(n)) for n in (18, 21, NEWEST)},
    "float64": lambda: m.mlp(dtype=np.float64),
    "float64, opset 9": lambda: m.mlp(9, np.float64, 4),
    "float16": lambda: m.mlp(dtype=np.float16),
    "stored as float16": lambda: half_stored(np.float16),
    "stored as bfloat16": lambda: half_stored(ml_dtypes.bfloat16),
    "in a branch": in_branch,
    "overridable": overridable,
}


@pytest.mark.parametrize("name", MODELS)
def test_all_routes_agree(tmp_path: Path, name: str) -> None:
    proto = MODELS[name]()
    elsa, template = m.packed(m.save(proto, tmp_path / "m.onnx"), tmp_path)
    kind = helper.tensor_dtype_to_np_dtype(proto.graph.input[0].type.tensor_type.elem_type)
    feeds = {"x": m.weights(5, 16, seed=11, dtype=kind)}
    check_routes(tmp_path, elsa, template, feeds)


def test_statistics_are_those_of_the_level(tmp_path: Path) -> None:
    proto = m.conv_bn()
    template = m.save(proto, tmp_path / "net.onnx")
    elsa = m.write_with_statistics(tmp_path / "net.safetensors", proto)
    check_routes(tmp_path, elsa, template, {"x": m.weights(2, 3, 8, 8)})
    export(elsa, template, tmp_path / "two.onnx", level=2)
    before = {t.name: onnx.numpy_helper.to_array(t) for t in proto.graph.initializer}
    found = m.initializers(tmp_path / "two.onnx")
    np.testing.assert_array_equal(found["n1.mean"], before["n1.mean"] + 2)
    np.testing.assert_array_equal(found["n1.scale"], before["n1.scale"])


def check_routes(folder: Path, elsa: Path, template: Path, feeds: dict[str, Any]) -> None:
    constant, chosen = folder / "levels.onnx", folder / "input.onnx"
    export_all_levels(elsa, template, constant)
    export_all_levels(elsa, template, chosen, level_input=True)
    onnx.checker.check_model(constant)
    onnx.checker.check_model(chosen)
    for level in LEVELS:
        expected = one_level(folder, elsa, template, level, feeds)
        for route in other_routes(folder, elsa, template, level, feeds):
            m.assert_same(route, expected)
        m.assert_same(m.run(all_levels_session(constant, level=level), feeds), expected)
        # A runtime input is no constant to prepare for: compare without such preparations.
        number = np.array(0 if level == "dense" else level, np.int32)
        found = m.run(chosen, {**feeds, "elsa_level": number}, plain=True)
        m.assert_same(found, m.run(folder / f"{level}.onnx", feeds, plain=True))


def one_level(folder: Path, elsa: Path, template: Path, level: Any, feeds: dict[str, Any]) -> Any:
    """The outputs of the exported level, whose tensors are the extracted bits."""
    path = folder / f"{level}.onnx"
    assert export(elsa, template, path, level=level) == level
    onnx.checker.check_model(path)
    found = m.initializers(path)
    with elsa_format.open(elsa) as file:
        for name, array in file.load(level).items():
            assert found[name].tobytes() == array.tobytes()
    return m.run(path, feeds)


def other_routes(
    folder: Path, elsa: Path, template: Path, level: Any, feeds: dict[str, Any]
) -> Iterator[Any]:
    sparse, outside = folder / f"{level}-sparse.onnx", folder / f"{level}-external.onnx"
    export(elsa, template, sparse, level=level, sparse=True)
    onnx.checker.check_model(sparse)
    with elsa_format.open(elsa) as file:
        for name, array in file.load(level).items():
            assert m.initializers(sparse)[name].tobytes() == array.tobytes()
    yield m.run(sparse, feeds)
    export(elsa, template, outside, level=level, external_data=True)
    onnx.checker.check_model(outside)
    yield m.run(outside, feeds)
    yield m.run(session(elsa, template, level=level), feeds)
    yield m.run(session(io.BytesIO(elsa.read_bytes()), template, level=level), feeds)


def test_sparse_initializers_only_where_they_are_smaller(tmp_path: Path) -> None:
    elsa, template = m.packed(m.save(m.mlp(), tmp_path / "m.onnx"), tmp_path)
    sizes = {}
    for level in (1, 3):  # 95 % and 50 % zeros; coordinates pay from two thirds on
        path = tmp_path / f"{level}.onnx"
        export(elsa, template, path, level=level, sparse=True)
        sizes[level] = (len(onnx.load(path).graph.sparse_initializer), path.stat().st_size)
    assert sizes[1][0] == 2
    assert sizes[3][0] == 0
    assert sizes[1][1] < sizes[3][1]


def test_a_level_with_no_weights_at_all(tmp_path: Path) -> None:
    proto = m.mlp()
    template = m.save(proto, tmp_path / "net.onnx")
    arrays = {t.name: onnx.numpy_helper.to_array(t) for t in proto.graph.initializer}
    for name in ("w1", "w2"):
        counters = np.full(arrays[name].shape, 2, np.uint8)
        arrays[name] = elsa_format.embed_counters(arrays[name], counters, 2)
    levels = [elsa_format.LevelSpec("none"), elsa_format.LevelSpec("all")]
    elsa = tmp_path / "net.safetensors"
    elsa_format.write(elsa, arrays, levels=levels, nested=["w1", "w2"])
    export(elsa, template, tmp_path / "none.onnx", level=1, sparse=True)
    onnx.checker.check_model(tmp_path / "none.onnx")
    assert len(onnx.load(tmp_path / "none.onnx").graph.sparse_initializer) == 2
    assert not m.run(tmp_path / "none.onnx", {"x": m.weights(2, 16)})[0].any()


def test_the_level_is_chosen_by_sparsity_or_size(tmp_path: Path) -> None:
    elsa, template = m.packed(m.save(m.mlp(), tmp_path / "m.onnx"), tmp_path)
    assert export(elsa, template, tmp_path / "a.onnx", sparsity=0.8) == 2
    export(elsa, template, tmp_path / "b.onnx", level=1, sparse=True)
    limit = (tmp_path / "b.onnx").stat().st_size
    assert export(elsa, template, tmp_path / "c.onnx", max_size=limit, sparse=True) == 1
    with pytest.raises(elsa_format.NoSuchLevel):
        export(elsa, template, tmp_path / "d.onnx", max_size=limit - 1, sparse=True)


def test_the_level_is_chosen_by_its_metrics(tmp_path: Path) -> None:
    elsa, template = m.packed(m.save(m.mlp(), tmp_path / "m.onnx"), tmp_path)
    with pytest.raises(elsa_format.NoSuchLevel, match="no level records accuracy"):
        export(elsa, template, tmp_path / "a.onnx", min={"accuracy": 0.5})
    metrics = {1: 0.7, 2: 0.8, 3: 0.81, "dense": 0.9}
    elsa_format.record(
        elsa,
        None,
        {n: {"accuracy": elsa_format.Metric(x, "higher", 9, 0.02)} for n, x in metrics.items()},
    )
    wanted: Any = {"min": {"accuracy": 0.75}}
    assert export(elsa, template, tmp_path / "b.onnx", **wanted) == 2
    out = tmp_path / "c.onnx"
    assert export(elsa, template, out, max_size=10**6, **wanted) == "dense"
    export(elsa, template, tmp_path / "2.onnx", level=2, sparse=True)
    limit = (tmp_path / "2.onnx").stat().st_size
    assert export(elsa, template, out, max_size=limit, sparse=True, force=True, **wanted) == 2
    with pytest.raises(elsa_format.NoSuchLevel, match="takes 99 bytes or less; level 2 takes"):
        export(elsa, template, tmp_path / "d.onnx", max_size=99, sparse=True, **wanted)
    # In time are all, so it is the best.
    assert level_within(elsa, template, 10.0, **wanted) == "dense"
    with pytest.raises(elsa_format.NoSuchLevel, match="or less; "):
        level_within(elsa, template, 1e-12, **wanted)
    with pytest.raises(elsa_format.ConflictingOptions):
        ExportOptions(level=1, **wanted)


def test_options_serve_several_exports(tmp_path: Path) -> None:
    """Keywords go before them, and are checked together with them."""
    elsa, template = m.packed(m.save(m.mlp(), tmp_path / "m.onnx"), tmp_path)
    small = ExportOptions(level=2, sparse=True)
    for level in (1, 2):
        once, apart = tmp_path / f"{level}.onnx", tmp_path / f"{level}-apart.onnx"
        assert export(elsa, template, once, small, level=level) == level
        export(elsa, template, apart, level=level, sparse=True)
        assert once.read_bytes() == apart.read_bytes()
    assert export(elsa, template, once, small, force=True) == 2
    with pytest.raises(elsa_format.InvalidOption, match="size is not known"):
        export(elsa, template, once, ExportOptions(max_size=9), fast=0.5, force=True)
    with pytest.raises(TypeError, match="levle"):
        export(elsa, template, once, levle=2, force=True)


def test_a_level_out_of_range_is_an_error_of_the_graph(tmp_path: Path) -> None:
    elsa, template = m.packed(m.save(m.mlp(), tmp_path / "m.onnx"), tmp_path)
    export_all_levels(elsa, template, tmp_path / "levels.onnx", level_input=True)
    with pytest.raises(Exception, match=r"out of data bounds|indices"):
        m.run(
            tmp_path / "levels.onnx", {"x": m.weights(2, 16), "elsa_level": np.array(4, np.int32)}
        )


def test_a_float32_graph_takes_weights_stored_in_16_bits(tmp_path: Path) -> None:
    """The graph then casts, which changes no value."""
    proto = m.mlp()
    arrays = {
        t.name: onnx.numpy_helper.to_array(t).astype(ml_dtypes.bfloat16)
        for t in proto.graph.initializer
    }
    elsa = tmp_path / "net.safetensors"
    elsa_format.pack(arrays, elsa, sparsities=[90, 50])
    template = m.save(proto, tmp_path / "net.onnx")
    feeds = {"x": m.weights(3, 16)}
    with elsa_format.open(elsa) as file:
        for level in ("dense", 1, 2):
            wide = file.load(level)
            for t in proto.graph.initializer:
                t.raw_data = wide[t.name].astype(np.float32).tobytes()
            expected = m.run(proto, feeds)
            path = tmp_path / f"{level}.onnx"
            export(elsa, template, path, level=level)
            onnx.checker.check_model(path)
            m.assert_same(m.run(path, feeds), expected)
            m.assert_same(m.run(session(elsa, template, level=level), feeds), expected)
    export_all_levels(elsa, template, tmp_path / "levels.onnx")
    m.assert_same(m.run(all_levels_session(tmp_path / "levels.onnx", level=2), feeds), expected)


def test_shards_are_pointed_into(tmp_path: Path) -> None:
    elsa, template = m.packed(m.save(m.mlp(), tmp_path / "m.onnx"), tmp_path)
    index, sharded = tmp_path / "model.safetensors.index.json", tmp_path / "sharded.onnx"
    elsa_format.extract(elsa, index, level=3, keep_levels=True, max_shard_size=3000)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    export(elsa, template, tmp_path / "3.onnx", level=3)
    OnnxCheckpoint(tmp_path / "3.onnx").write_template(sharded, index)
    export_all_levels(index, sharded, tmp_path / "levels.onnx")
    for path in (sharded, tmp_path / "levels.onnx"):
        onnx.checker.check_model(path)
    feeds = {"x": m.weights(5, 16)}
    m.assert_same(m.run(sharded, feeds), m.run(tmp_path / "3.onnx", feeds))
    for level in (1, 2):
        expected = m.run(session(elsa, template, level=level), feeds)
        export(index, sharded, tmp_path / f"{level}.onnx", level=level)
        m.assert_same(m.run(tmp_path / f"{level}.onnx", feeds), expected)
        m.assert_same(m.run(session(index, sharded, level=level), feeds), expected)
        found = m.run(all_levels_session(tmp_path / "levels.onnx", level=level), feeds)
        m.assert_same(found, expected)


def test_exported_levels_pack_into_the_same_network(tmp_path: Path) -> None:
    """ELSA to ONNX and back: the levels keep their digests, statistics included."""
    proto = m.conv_bn()
    template = m.save(proto, tmp_path / "net.onnx")
    elsa = m.write_with_statistics(tmp_path / "net.safetensors", proto)
    names = ["dense", 1, 2, 3]
    for level in names:
        export(elsa, template, tmp_path / f"{level}.onnx", level=level, sparse=level == 1)
    dense, *levels = (tmp_path / f"{level}.onnx" for level in names)
    again = tmp_path / "again.safetensors"
    elsa_format.pack(
        OnnxCheckpoint(dense),
        again,
        levels=[OnnxCheckpoint(level) for level in levels],
        per_level=["*.mean", "*.var"],
    )
    with elsa_format.open(elsa) as one, elsa_format.open(again) as other:
        assert [level.digest for level in other.levels] == [level.digest for level in one.levels]


def test_exports_are_the_same_every_time(tmp_path: Path) -> None:
    elsa, template = m.packed(m.save(m.mlp(), tmp_path / "m.onnx"), tmp_path)
    for name in ("a.onnx", "b.onnx"):
        export(elsa, template, tmp_path / name, level=2, sparse=True)
    assert (tmp_path / "a.onnx").read_bytes() == (tmp_path / "b.onnx").read_bytes()


def test_an_exported_level_serves_as_template(tmp_path: Path) -> None:
    elsa, template = m.packed(m.save(m.mlp(), tmp_path / "m.onnx"), tmp_path)
    export(elsa, template, tmp_path / "one.onnx", level=1, sparse=True)
    export(elsa, tmp_path / "one.onnx", tmp_path / "two.onnx", level=2)
    export(elsa, template, tmp_path / "direct.onnx", level=2)
    feeds = {"x": m.weights(2, 16)}
    m.assert_same(m.run(tmp_path / "two.onnx", feeds), m.run(tmp_path / "direct.onnx", feeds))
