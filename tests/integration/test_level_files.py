"""Level files are taken wherever ELSA files are: looked at, verified, made into other layouts."""

import contextlib
import io
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from internals import main
from safetensors.numpy import save_file

import elsa_format as elsa
import elsa_format.plugins

LAYOUTS = ("dense", "bitmask", "csr")
LEVEL = 2


class Pipe(io.RawIOBase):
    """Can be read along, a few bytes at a time, and no more."""

    def __init__(self, content: bytes) -> None:
        self.content = io.BytesIO(content)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self.content.readinto(memoryview(buffer)[:77])


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network with wide and narrow rows, an empty tensor, and dtypes of several widths."""
    rng = np.random.default_rng(7)
    shapes = {"wide": (3, 70_001), "narrow": (5_000, 3), "cube": (4, 5, 6), "empty": (3, 0)}
    dense = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    dense = {name: array.astype(np.float32) for name, array in dense.items()}
    dense["half"] = rng.standard_normal((33, 9)).astype(np.float16)
    dense["double"] = rng.standard_normal((7, 11))
    dense["bias"] = rng.standard_normal(13).astype(np.float32)
    dense["steps"] = np.arange(5)
    path = tmp_path_factory.mktemp("net") / "net.safetensors"
    elsa.pack(dense, path, sparsities=[90, 70, 50], names=["small", "medium", "large"])
    return path


@pytest.fixture(scope="module")
def level(net: Path) -> dict[str, np.ndarray]:
    with elsa.open(net) as file:
        return file.load(LEVEL)


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(
        (one[n].dtype, one[n].shape, one[n].tobytes())
        == (other[n].dtype, other[n].shape, other[n].tobytes())
        for n in one
    )


@pytest.mark.parametrize(("before", "after"), [*itertools.product(LAYOUTS, LAYOUTS)])
def test_every_layout_becomes_every_other(
    net: Path, level: dict[str, np.ndarray], tmp_path: Path, before: Any, after: Any
) -> None:
    first, second = tmp_path / "first.safetensors", tmp_path / "second.safetensors"
    elsa.extract(net, first, level=LEVEL, layout=before)
    assert elsa.extract(first, second, layout=after) == LEVEL
    assert same(elsa.load_level(second), level)
    assert elsa.verify(second).digests == 1
    piped = io.BytesIO()
    elsa.extract(Pipe(first.read_bytes()), piped, layout=after)
    assert piped.getvalue() == second.read_bytes()
    # Back again it is what it was, but for the order of tensors of different widths.
    third = io.BytesIO()
    elsa.extract(second, third, level="medium", layout=before)
    assert same(elsa.load_level(io.BytesIO(third.getvalue())), level)
    assert len(third.getvalue()) == first.stat().st_size


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_level_file_is_read_as_a_network(
    net: Path, level: dict[str, np.ndarray], tmp_path: Path, layout: Any
) -> None:
    path = tmp_path / "level.safetensors"
    elsa.extract(net, path, level=LEVEL, layout=layout)
    with elsa.open(path) as file:
        assert same(file.load(LEVEL), level)
        assert same({name: file.tensor(name, "medium") for name in level}, level)
        with pytest.raises(
            elsa.NoSuchLevel, match=r"no level 'dense', it holds level 2 \(medium\)"
        ):
            file.load()
    assert same(dict(elsa.stream(Pipe(path.read_bytes()), level=LEVEL)), level)
    for wrong in (1, 3, "large", "dense"):
        with pytest.raises(elsa.NoSuchLevel):
            elsa.extract(path, io.BytesIO(), level=wrong)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shards_of_a_level(
    net: Path, level: dict[str, np.ndarray], tmp_path: Path, layout: Any
) -> None:
    index = tmp_path / "level.safetensors.index.json"
    elsa.extract(net, index, level=LEVEL, layout=layout, max_shard_size=100_000)
    assert elsa.verify(index).digests == 1
    for other in LAYOUTS:
        out = tmp_path / f"{other}.safetensors"
        elsa.extract(index, out, layout=other)
        assert same(elsa.load_level(out), level)
    again = tmp_path / "again.safetensors.index.json"
    elsa.extract(index, again, layout="bitmask")
    assert same(elsa.load_level(again), level)
    shards = [json.loads(p.read_text())["weight_map"].values() for p in (index, again)]
    assert len({*shards[0]}) == len({*shards[1]}) > 1


@pytest.mark.parametrize("layout", ["bitmask", "csr"])
def test_any_flipped_or_missing_byte_is_noticed(layout: Any) -> None:
    rng = np.random.default_rng(1)
    weights = rng.standard_normal((3, 5)).astype(np.float32)
    net, level = io.BytesIO(), io.BytesIO()
    elsa.pack({"w": weights}, net, sparsities=[60])
    elsa.extract(io.BytesIO(net.getvalue()), level, level=1, layout=layout)
    content = level.getvalue()
    start = 8 + int.from_bytes(content[:8], "little")
    for at in range(start, len(content)):
        damaged = bytearray(content)
        damaged[at] ^= 1 << (at % 8)
        for read in (elsa.verify, elsa.load_level):
            with pytest.raises(elsa.FormatError, match="<stream>"):
                read(Pipe(bytes(damaged)))
        with contextlib.suppress(elsa.FormatError):  # the digest goes along, and tells
            written = io.BytesIO()
            elsa.extract(Pipe(bytes(damaged)), written)
            with pytest.raises(elsa.DigestMismatch):
                elsa.load_level(io.BytesIO(written.getvalue()))
    for end in range(start, len(content)):
        with pytest.raises(elsa.Truncated):
            elsa.verify(Pipe(content[:end]))


def test_a_dense_level_file_does_not_claim_to_know_what_it_keeps(
    net: Path, level: dict[str, np.ndarray], tmp_path: Path
) -> None:
    """Its header has no counts: what needs them reads the data, all else says so."""
    paths: dict[Any, Path] = {layout: tmp_path / f"{layout}.safetensors" for layout in LAYOUTS}
    for layout in LAYOUTS:
        elsa.extract(net, paths[layout], level=LEVEL, layout=layout)
    shown = CliRunner().invoke(main, ["inspect", str(paths["dense"]), "--json"]).output
    assert json.loads(shown)["nonzero"] is None
    with elsa.open(net) as file, elsa.open(paths["dense"]) as found:
        assert found.sparsity(LEVEL) is None
        assert found.levels[0].nonzero is None
        assert found.nested == dict.fromkeys(file.nested, ())
        assert found.nested_weights == file.nested_weights
        for layout in LAYOUTS:
            assert found.size(LEVEL, layout) == paths[layout].stat().st_size
            if layout != "dense":
                with elsa.open(paths[layout]) as sparse:
                    assert sparse.sparsity(LEVEL) == file.sparsity(LEVEL)
                loaded: dict[str, Any] = dict(found.load(LEVEL, layout))
                for name in found.nested:
                    loaded[name] = loaded[name].to_dense()
                assert same(loaded, level)
        assert found.choose(sparsity=70) == LEVEL
        with pytest.raises(elsa.NoSuchLevel, match=r"the sparsest has 70\.00"):
            found.choose(sparsity=71)
        size = paths["bitmask"].stat().st_size
        assert found.choose(max_size=size, layout="bitmask") == LEVEL
        with pytest.raises(elsa.NoSuchLevel, match=f"level 2 takes .*, {size} as bitmask"):
            found.choose(max_size=size - 1, layout="bitmask")
        assert found.sparsity(LEVEL) is None  # as before: the header is what it was
    for source in (paths["dense"], Pipe(paths["dense"].read_bytes())):
        with pytest.raises(elsa.NoSuchLevel, match=r"the sparsest has 70\.00"):
            elsa.extract(source, io.BytesIO(), sparsity=71)
    with pytest.raises(elsa.NoSuchLevel, match="level 2 takes"):
        elsa.extract(paths["dense"], io.BytesIO(), max_size=size - 1, layout="bitmask")


def test_a_level_file_need_not_tell_what_is_nested(tmp_path: Path) -> None:
    """Then nobody can know how sparse it is, and it is not said to be 0 % either."""
    path = tmp_path / "level.safetensors"
    document = {"version": "1.0", "level": 2, "name": "x", "layout": "dense"}
    save_file({"w": np.eye(3)}, path, metadata={"elsa_level": json.dumps(document)})
    with elsa.open(path) as file:
        assert (file.sparsity(2), file.levels[0].nonzero, dict(file.nested)) == (None, None, {})
        with pytest.raises(elsa.NoSuchLevel, match=r"does not tell how sparse .* give level=…"):
            file.choose(sparsity=50)
    assert elsa.extract(path, tmp_path / "csr.safetensors", layout="csr") == 2


def test_the_dense_network_and_kept_levels_are_not_in_a_level_file(
    net: Path, tmp_path: Path
) -> None:
    path = tmp_path / "level.safetensors"
    elsa.extract(net, path, level=LEVEL, layout="csr")
    with pytest.raises(elsa.NoSuchLevel, match="level file"):
        elsa.extract(path, io.BytesIO(), keep_levels=True)
    with pytest.raises(elsa.NoLevelGiven, match=r"holds 3 levels; give one of level=…, sparsity"):
        elsa.extract(net, io.BytesIO())


def test_the_commands(net: Path, tmp_path: Path) -> None:
    level, csr = tmp_path / "level.safetensors", tmp_path / "csr.safetensors"
    elsa.extract(net, level, level=LEVEL, layout="bitmask")
    run = CliRunner().invoke
    shown = run(main, ["inspect", str(level)]).output
    assert "level 2 (medium) as bitmask" in shown
    assert "wide" in shown
    told = json.loads(run(main, ["inspect", str(level), "--json"]).output)
    with elsa.open(net) as file:
        kept = {name: counts[LEVEL - 1] for name, counts in file.nested.items()}
        assert told["digest"] == file.levels[LEVEL - 1].digest
    found = {tensor["name"]: tensor["kept"] for tensor in told["tensors"]}
    assert {name: found[name] for name in kept} == kept
    assert (told["level"], told["layout"], told["nonzero"]) == (2, "bitmask", sum(kept.values()))
    assert "valid" in run(main, ["verify", str(level)]).output
    done = run(main, ["extract", str(level), "--layout", "csr", "-o", str(csr)])
    assert (done.exit_code, done.stderr) == (0, f"{csr}: level 2, 564 kB as csr\n")
    refused = run(main, ["inspect", str(level), "--html", str(tmp_path / "page.html")])
    assert (refused.exit_code, "level file" in refused.stderr) == (2, True)
    packed = run(main, ["pack", str(level), "--sparsities", "99", "-o", str(tmp_path / "p")])
    assert (packed.exit_code, "elsa-extract" in packed.stderr) == (3, True)
    unsaid = run(main, ["extract", str(net), "-o", str(tmp_path / "x")])
    assert unsaid.exit_code == 2
    assert unsaid.stderr.endswith("give one of --level, --sparsity and --max-size\n")


BOMB = """
import resource, sys, elsa_format
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
for read in (elsa_format.load_level, elsa_format.open, elsa_format.verify):
    try:
        read(sys.argv[1], max_bytes=1 << 30)
    except elsa_format.TooLarge as error:
        print(error)
"""


def test_what_expands_to_more_than_is_allowed_is_refused_from_the_header(tmp_path: Path) -> None:
    """In CSR, and as a bitmask of F64, few bytes stand for many."""
    rows = 1 << 20
    path = tmp_path / "bomb.safetensors"
    document = {
        "version": "1.0",
        "level": 1,
        "name": "x",
        "layout": "csr",
        "tensors": {"w": {"dtype": "F64", "shape": [3, rows << 10]}},
    }
    entries = {"indptr": ("I32", 4), "indices": ("I32", 0), "values": ("F64", 0)}
    tensors, at = {}, 0
    for part, (dtype, count) in entries.items():
        size = count * int(dtype[1:]) // 8
        offsets = [at, at + size]
        tensors[f"__elsa__.{part}.w"] = {"dtype": dtype, "shape": [count], "data_offsets": offsets}
        at += size
    text = json.dumps({"__metadata__": {"elsa_level": json.dumps(document)}, **tensors}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(at))
    done = subprocess.run(
        [sys.executable, "-c", BOMB, str(path)], capture_output=True, text=True, check=True
    )
    size = 3 * rows * 1024 * 8
    said = f"{path}: tensors of {size} bytes, more than the {1 << 30} that are allowed"
    assert done.stdout.splitlines() == [f"{said}; see max_bytes=…"] * 3


def test_limits_of_memory(net: Path, tmp_path: Path) -> None:
    with elsa.open(net) as file:
        data, header = file.data_size, file.file_size - file.data_size
    assert elsa.open(net, max_bytes=data).bits == 2
    for read in (elsa.open, elsa.verify, lambda x, **o: list(elsa.stream(x, level=1, **o))):
        with pytest.raises(elsa.TooLarge, match=f"tensors of {data} bytes"):
            read(net, max_bytes=data - 1)
        with pytest.raises(elsa.TooLarge, match="header of"):
            read(net, max_bytes=header - 9)
        with pytest.raises(TypeError, match="max_bytes"):
            read(net, max_bytes="1 GB")
    out = tmp_path / "out.safetensors"
    for words in (["extract", "--level", "1", "-o", str(out)], ["verify"], ["inspect"]):
        done = CliRunner().invoke(main, [*words, str(net), "--max-bytes", "1kB"])
        assert (done.exit_code, "see --max-bytes" in done.stderr) == (2, True)
    assert not out.exists()


@pytest.mark.parametrize("kind", ["bitmask", "csr", "variants", "delivery"])
def test_a_lost_document_is_refused_on_every_route(net, rich, tmp_path, kind) -> None:
    """With one bit of its key changed, what the document described must not pass for tensors."""
    path, out = tmp_path / "file.safetensors", tmp_path / "out.safetensors"
    if kind == "delivery":
        elsa.ship(net, path)
    elif kind == "variants":
        path.write_bytes(rich.read_bytes())
    else:
        elsa.extract(net, path, level=LEVEL, layout=kind)
    key = {"variants": b'"elsa"', "delivery": b'"elsa_delivery"'}.get(kind, b'"elsa_level"')
    content = path.read_bytes()
    assert content.count(key) == 1
    path.write_bytes(content.replace(key, key[:-2] + bytes([key[-2] ^ 1]) + b'"'))
    routes = [
        lambda: elsa.load_level(path),
        lambda: elsa.load_level(io.BytesIO(path.read_bytes())),
        lambda: elsa.load_level(path, verify=False),
        lambda: elsa.open(path),
        lambda: elsa.verify(path),
        lambda: elsa.extract(path, out, level=LEVEL),
        lambda: dict(elsa.stream(path, level=LEVEL)),
        lambda: elsa.ship(path, out),
        lambda: elsa.pack(path, out, sparsities=[90]),
        lambda: elsa.pack({"w": np.eye(3)}, out, levels=[path]),
    ]
    for route in routes:
        with pytest.raises(elsa.NotElsa, match=r"reserved name|profile"):
            route()
    assert not out.exists()


def test_shards_without_documents_are_refused(net: Path, tmp_path: Path) -> None:
    index = tmp_path / "level.safetensors.index.json"
    elsa.extract(net, index, level=LEVEL, layout="csr", max_shard_size=300_000)
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 1
    for shard in shards:
        shard.write_bytes(shard.read_bytes().replace(b'"elsa_level"', b'"elsa_levem"'))
    stated = json.loads(index.read_text())
    del stated["metadata"]["elsa_level"]
    index.write_text(json.dumps(stated))
    with pytest.raises(elsa.NotElsa, match="reserved name"):
        elsa.load_level(index)


@pytest.mark.parametrize("key", ["elsa", "elsa_level", "elsa_delivery"])
def test_no_writer_takes_the_key_of_a_document(rich: Path, tmp_path: Path, key: str) -> None:
    out = tmp_path / "out.safetensors"
    tensors = {"w": elsa.embed_counters(np.ones((2, 2), np.float32), np.eye(2, dtype=int), bits=1)}
    levels = [elsa.LevelSpec("half")]

    class Told(elsa.plugins.Checkpoint):
        path, metadata = "<told>", {key: "x"}

        @property
        def tensors(self) -> Any:
            return {"w": elsa.plugins.TensorInfo("w", elsa.plugins.DTYPES["F32"], (2, 2))}

        def blocks(self, name: str, size: int) -> Any:
            yield np.ones(4, np.float32).view(np.uint8)

    writers = [
        lambda: elsa.write(out, tensors, levels=levels, nested=["w"], metadata={key: "x"}),
        lambda: elsa.pack(Told(), out, sparsities=[50]),
    ]
    for write in writers:
        with pytest.raises(elsa.InvalidHeader, match=f"'{key}': the name is reserved"):
            write()
    assert not out.exists()


def test_metadata_makes_the_round_trip(net: Path, rich: Path, tmp_path: Path) -> None:
    """What `File.metadata` gives, `write` takes: of ELSA files, level files and delivery files."""
    elsa.ship(rich, tmp_path / "ship")
    sources = [rich, tmp_path / "ship"]
    for layout in LAYOUTS:
        sources.append(tmp_path / layout)
        elsa.extract(rich, sources[-1], level=LEVEL, layout=layout)
    counters = elsa.embed_counters(np.ones((2, 2), np.float32), np.eye(2, dtype=int), bits=1)
    for number, source in enumerate(sources):
        with elsa.open(source) as file:
            assert file.metadata == {"format": "pt"}
            levels = [elsa.LevelSpec("half")]
            path = tmp_path / f"{number}.safetensors"
            elsa.write(path, {"w": counters}, levels=levels, nested=["w"], metadata=file.metadata)
        with elsa.open(path) as file:
            assert file.metadata == {"format": "pt"}


def test_a_level_of_a_file_with_a_foreign_key_opens(net: Path, tmp_path: Path) -> None:
    """What another writer called `elsa_delivery` is not copied to where it would mean something."""
    content = net.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    profile = json.loads(header["__metadata__"]["elsa"])
    del profile["header"]  # the checksum of the header that is changed here
    header["__metadata__"] = {"elsa": json.dumps(profile), "elsa_delivery": "x"}
    changed = json.dumps(header).encode()
    path = tmp_path / "net.safetensors"
    path.write_bytes(len(changed).to_bytes(8, "little") + changed + content[8 + size :])
    for layout in LAYOUTS:
        elsa.extract(path, tmp_path / layout, level=LEVEL, layout=layout)
        assert elsa.load_level(tmp_path / layout)
