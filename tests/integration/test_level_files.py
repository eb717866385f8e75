"""Level files: what only they refuse, and what their headers do not tell."""

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from internals import main
from kinds.places import Pipe
from safetensors.numpy import save_file

import elsa_format as elsa
import elsa_format.plugins

LAYOUT_NAMES = ("dense", "bitmask", "csr")
LEVEL = 2


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


def test_a_dense_level_file_does_not_claim_to_know_what_it_keeps(net: Path, tmp_path: Path) -> None:
    """Its header has no counts: what needs them reads the data, all else says so."""
    paths: dict[Any, Path] = {layout: tmp_path / f"{layout}.safetensors" for layout in LAYOUT_NAMES}
    for layout in LAYOUT_NAMES:
        elsa.extract(net, paths[layout], level=LEVEL, layout=layout)
    with elsa.open(net) as file, elsa.open(paths["dense"]) as found:
        assert found.nested == dict.fromkeys(file.nested, ())
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


def test_a_level_has_to_be_named(net: Path) -> None:
    with pytest.raises(elsa.NoLevelGiven, match=r"holds 3 levels; give one of level=…, sparsity"):
        elsa.extract(net, io.BytesIO())


def test_the_commands(net: Path, tmp_path: Path) -> None:
    level, csr = tmp_path / "level.safetensors", tmp_path / "csr.safetensors"
    elsa.extract(net, level, level=LEVEL, layout="bitmask")
    run = CliRunner().invoke
    shown = run(main, ["inspect", str(level)]).output
    assert "level 2 (medium) as bitmask" in shown
    assert "wide" in shown
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
    for layout in LAYOUT_NAMES:
        elsa.extract(path, tmp_path / layout, level=LEVEL, layout=layout)
        assert elsa.load_level(tmp_path / layout)
