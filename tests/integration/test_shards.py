"""Networks in several files: the same network as in one, whole or not at all."""

import io
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from bits import by_index, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from internals import ArrayCheckpoint, AtomicFile, LevelReader, _destination
from safetensors.numpy import save_file

import elsa_format as elsa

BIN = Path(sys.executable).parent
INDEX = "model.safetensors.index.json"
Network = dict[str, np.ndarray]
LEVELS = [95, 90, 50]


def save_shards(folder: Path, shards: Sequence[Network], **metadata: Any) -> Path:
    """A sharded checkpoint as the Hugging Face libraries write it."""
    folder.mkdir(parents=True, exist_ok=True)
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, name)
    total = sum(array.nbytes for shard in shards for array in shard.values())
    document = {"metadata": {"total_size": total} | metadata, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(document))
    return folder / INDEX


def split(network: Network, *ends: int) -> list[Network]:
    items = list(network.items())
    return [dict(items[a:b]) for a, b in itertools.pairwise((0, *ends, len(items)))]


@pytest.fixture
def large(network: Network) -> Network:
    """Seven tensors, two dtypes, and so few different magnitudes that most are ties."""
    rng = np.random.default_rng(3)
    more = {
        f"block{i}/kernel": (rng.integers(-9, 10, (40, 30)) / 8).astype(
            np.float16 if i % 2 else np.float32
        )
        for i in range(4)
    }
    return network | more


@pytest.fixture
def index(large: Network, tmp_path: Path) -> Path:
    return save_shards(tmp_path / "dense", split(large, 3, 6))


@pytest.fixture
def packed_index(index: Path, tmp_path: Path) -> Path:
    out = tmp_path / "packed" / INDEX
    out.parent.mkdir()
    elsa.pack(index, out, sparsities=LEVELS)
    return out


def pack_as_one(index: Path, **options: Any) -> elsa.File:
    written = io.BytesIO()
    elsa.pack(index, written, **options)
    return elsa.open(written)


def same_network(one: elsa.File, other: elsa.File) -> bool:
    return (
        one.levels == other.levels
        and one.nested == other.nested
        and same_bits(one.load(), other.load())
    )


@pytest.mark.parametrize("jobs", [1, 3])
@pytest.mark.parametrize("scope", ["global", "uniform"])
def test_shards_hold_what_one_file_would(
    index: Path, tmp_path: Path, jobs: int, scope: Any
) -> None:
    out = tmp_path / INDEX
    elsa.pack(index, out, sparsities=LEVELS, scope=scope, jobs=jobs)
    with elsa.open(out) as file:
        assert same_network(file, pack_as_one(index, sparsities=LEVELS, scope=scope))
        assert same_bits(file.load(), by_index(out))
    dense = json.loads(index.read_text())["weight_map"]
    assert json.loads(out.read_text())["weight_map"] == dense
    assert elsa.verify(out, jobs=jobs).digests == 3


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_ties_go_the_same_way_in_any_shards(data: Any, tmp_path_factory: Any) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    dtypes = [np.float32, np.float16, ml_dtypes.bfloat16, np.float64]
    network = {
        f"w{i}": rng.integers(-3, 4, (data.draw(st.integers(1, 9)), 8)).astype(
            dtypes[data.draw(st.integers(0, 3))]
        )
        for i in range(data.draw(st.integers(1, 6)))
    }
    sparsities = sorted(data.draw(st.sets(st.integers(20, 99), min_size=1, max_size=4)))[::-1]
    whole = io.BytesIO()
    elsa.pack(network, whole, sparsities=sparsities)
    out = tmp_path_factory.mktemp("ties") / INDEX
    limit = data.draw(st.integers(1, 2000))
    elsa.pack(network, out, sparsities=sparsities, max_shard_size=limit, jobs=2)
    with elsa.open(out) as file:
        assert same_network(file, elsa.open(whole))


def test_every_way_to_pack(network: Network, tmp_path: Path) -> None:
    shards = split(network, 2)
    dense = save_shards(tmp_path / "dense", shards)
    counters = {
        name: np.random.default_rng(1).integers(0, 3, network[name].shape).astype(np.uint8)
        for name in ("conv/kernel", "dense/kernel")
    }
    levels = []
    for t in (1, 2):
        level = dict(network)
        for name, counter in counters.items():
            level[name] = np.where((counter > 0) & (counter <= t), network[name], 0)
        level["bn/mean"] = np.full(8, t, np.float32)
        levels.append(save_shards(tmp_path / f"level{t}", split(level, 1, 3)))
    for number, options in enumerate(
        [
            {"counters": counters},
            {"levels": levels, "per_level": ["bn/*"]},
            {"sparsities": ["1:4", "2:4"], "include": ["conv/*"]},
        ]
    ):
        out = tmp_path / f"{number}.safetensors.index.json"
        elsa.pack(dense, out, **options)
        with elsa.open(out) as file:
            assert same_network(file, pack_as_one(dense, **options))
            assert len(file.per_level) == ("per_level" in options)
        elsa.verify(out)
    document = json.loads((tmp_path / "1.safetensors.index.json").read_text())
    where = document["weight_map"]
    assert where["__elsa__.1.bn/mean"] == where["__elsa__.2.bn/mean"] == where["bn/mean"]
    stored = by_index(tmp_path / "1.safetensors.index.json")
    assert document["metadata"]["total_size"] == sum(array.nbytes for array in stored.values())


def test_every_shard_is_an_elsa_file(packed_index: Path) -> None:
    with elsa.open(packed_index) as whole:
        for number in (1, 2, 3):
            shard = packed_index.parent / f"model-{number:05}-of-00003.safetensors"
            elsa.verify(shard)
            with elsa.open(shard) as file:
                assert file.profile.shard == (number, 3)
                assert file.levels == whole.levels
                level = file.load(1)
                assert same_bits(level, {name: whole.tensor(name, 1) for name in level})


def test_shards_of_at_most_a_size(index: Path, tmp_path: Path) -> None:
    out = tmp_path / "model.safetensors.index.json"
    elsa.pack(index, out, sparsities=LEVELS, max_shard_size=5000)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert [f.name for f in files] == [
        f"model-{n:05}-of-{len(files):05}.safetensors" for n in range(1, len(files) + 1)
    ]
    for file in files:
        with elsa.open(file) as shard:
            assert shard.data_size <= 5000 or len(shard.tensors) == 1
    with pytest.raises(TypeError, match=r"index\.json"):
        elsa.pack(index, tmp_path / "x.safetensors", sparsities=[50], max_shard_size=1)


def test_existing_files_stay(index: Path, packed_index: Path, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in packed_index.parent.iterdir()}
    with pytest.raises(elsa.OutputExists):
        elsa.pack(index, packed_index, sparsities=[50])
    packed_index.unlink()
    with pytest.raises(elsa.OutputExists):
        elsa.pack(index, packed_index, sparsities=[50])
    del before[packed_index]
    assert {path: path.read_bytes() for path in packed_index.parent.iterdir()} == before
    elsa.pack(index, packed_index, sparsities=[50], force=True)
    assert elsa.verify(packed_index).levels == 1


@pytest.mark.parametrize("jobs", [1, 2])
def test_an_error_leaves_nothing(large: Network, tmp_path: Path, jobs: int) -> None:
    large["block3/kernel"][-1, -1] = np.nan
    index = save_shards(tmp_path / "dense", split(large, 3, 6))
    out = tmp_path / "out" / INDEX
    out.parent.mkdir()
    with pytest.raises(elsa.NonFinite, match="block3/kernel"):
        elsa.pack(index, out, sparsities=LEVELS, scope="uniform", jobs=jobs)
    assert list(out.parent.iterdir()) == []


def test_a_shard_that_appears_meanwhile_is_kept(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the shards that have their names already lose them again."""
    out = tmp_path / INDEX
    meanwhile = tmp_path / "model-00002-of-00003.safetensors"
    commit = _destination.Destination.finish

    def late(self: Any, *contents: Any) -> None:
        meanwhile.write_bytes(b"somebody else's")
        commit(self, *contents)

    monkeypatch.setattr(_destination.Destination, "finish", late)
    with pytest.raises(elsa.OutputExists):
        elsa.pack(index, out, sparsities=LEVELS)
    assert sorted(tmp_path.glob("*.*")) == [meanwhile]
    assert meanwhile.read_bytes() == b"somebody else's"


def test_an_index_is_there_only_with_all_its_shards(
    index: Path, packed_index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash while shards are replaced leaves no index that names a mixture."""
    seen = []
    publish = AtomicFile.publish

    def watched(self: Any) -> None:
        seen.append(packed_index.exists())
        publish(self)

    monkeypatch.setattr(AtomicFile, "publish", watched)
    elsa.pack(index, packed_index, sparsities=[50], force=True)
    assert seen == [False] * 4
    assert packed_index.exists()


def test_the_first_error_stops_the_other_shards(tmp_path: Path) -> None:
    class Endless(ArrayCheckpoint):
        blocks_read = 0

        def blocks(self, name: str, size: int) -> Iterator[np.ndarray]:
            if name != "endless":
                raise OSError("disk on fire")
            for _ in range(256):
                self.blocks_read += 1
                yield np.zeros(size, np.uint8)

    large = np.broadcast_to(np.int8(0), (1 << 14, 1 << 14))
    checkpoint = Endless({"endless": large, "w": np.ones((8, 8), np.float32)})
    with pytest.raises(OSError, match="disk on fire"):
        elsa.pack(checkpoint, tmp_path / INDEX, sparsities=["1:2"], max_shard_size=1, jobs=2)
    assert checkpoint.blocks_read < 200
    assert list(tmp_path.iterdir()) == []


def test_a_shard_that_changes_while_it_is_read(packed_index: Path, tmp_path: Path) -> None:
    stream = elsa.stream(packed_index, level=1)
    next(stream)
    shard = packed_index.parent / "model-00003-of-00003.safetensors"
    os.utime(shard, ns=(1, 1))
    with pytest.raises(elsa.InputChanged, match="00003-of-00003"):
        list(stream)
    elsa.verify(packed_index)


def test_a_mixture_of_two_networks_is_found(index: Path, packed_index: Path) -> None:
    other = index.parent / "other.safetensors.index.json"
    elsa.pack(index, other, sparsities=[95, 90, 60])
    shard = "model-00002-of-00003.safetensors"
    (packed_index.parent / shard).write_bytes(
        (other.parent / shard.replace("model", "other")).read_bytes()
    )
    with pytest.raises(elsa.InvalidIndex, match="other levels"):
        elsa.open(packed_index)


@pytest.mark.parametrize("layout", ["dense", "bitmask"])
def test_a_mixture_of_two_levels_is_found(packed_index: Path, tmp_path: Path, layout: Any) -> None:
    """Digests or not: the shards say what they are of."""
    packed = tmp_path / "plain.safetensors.index.json"
    elsa.pack(
        elsa.open(packed_index).load(),
        packed,
        sparsities=LEVELS,
        digests=False,
        max_shard_size=5000,
    )
    one, other = (tmp_path / f"level{t}.safetensors.index.json" for t in (1, 2))
    elsa.extract(packed, one, level=1, layout=layout)
    elsa.extract(packed, other, level=2, layout=layout)
    shards = sorted(tmp_path.glob("level2-*"))
    assert len(shards) > 1
    shards[1].rename(tmp_path / shards[1].name.replace("level2", "level1"))
    for read in (
        lambda: elsa.load_level(one),
        lambda: elsa.load_level(one, verify=False),
        lambda: elsa.pack(one, tmp_path / "out.safetensors", sparsities=[99]),
    ):
        with pytest.raises(elsa.FormatError) as error:
            read()
        refused = layout != "dense" and "make it dense" in str(error.value)
        assert isinstance(error.value, elsa.InvalidIndex) or refused
    assert not (tmp_path / "out.safetensors").exists()


def test_a_network_is_no_level(packed_index: Path) -> None:
    shard = packed_index.parent / "model-00001-of-00003.safetensors"
    for source in (packed_index, shard):
        with pytest.raises(
            elsa.InvalidLayout, match=r"00001-of-00003.*open\(\.\.\.\)\.load\(level\)"
        ):
            elsa.load_level(source)


def test_a_shard_that_changes_while_a_level_is_loaded(
    packed_index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    level = tmp_path / "level.safetensors.index.json"
    elsa.extract(packed_index, level, level=1)
    shard, load = tmp_path / "level-00002-of-00003.safetensors", LevelReader.array

    def late(*arguments: Any) -> Any:
        os.utime(shard, ns=(1, 1))
        return load(*arguments)

    monkeypatch.setattr(LevelReader, "array", late)
    with pytest.raises(elsa.InputChanged, match="00002-of-00003"):
        elsa.load_level(level)


def test_a_plain_index_may_state_any_size(network: Network, tmp_path: Path) -> None:
    """Some libraries have written fractions, or sizes of other things."""
    index = save_shards(tmp_path, split(network, 2), total_size=12.5)
    assert same_bits(elsa.load_level(index), network)
    elsa.pack(index, tmp_path / "packed.safetensors", sparsities=[50])


def test_a_shard_that_is_a_link_to_itself(index: Path) -> None:
    shard = index.parent / "model-00002-of-00003.safetensors"
    shard.unlink()
    shard.symlink_to(shard.name)
    with pytest.raises(elsa.InvalidIndex, match=r"00002-of-00003.*not exist"):
        elsa.load_level(index)


def test_damage_in_a_shard_is_found(packed_index: Path, tmp_path: Path) -> None:
    shard = packed_index.parent / "model-00002-of-00003.safetensors"
    content = bytearray(shard.read_bytes())
    content[-7] ^= 4
    shard.write_bytes(content)
    for read in (
        lambda: elsa.verify(packed_index, jobs=2),
        lambda: elsa.open(packed_index).load(1),
        lambda: list(elsa.stream(packed_index, level=1)),
        lambda: elsa.extract(packed_index, tmp_path / "level.safetensors", level=1),
        lambda: elsa.extract(packed_index, tmp_path / "l.index.json", level=1, jobs=2),
    ):
        with pytest.raises(elsa.ChecksumMismatch, match=r"00002-of-00003|index\.json"):
            read()
    assert not list(tmp_path.glob("l*"))


def test_a_download_cache_of_links(packed_index: Path, tmp_path: Path) -> None:
    """All files of a network are links into one directory, under other names."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "main"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for number, path in enumerate(packed_index.parent.iterdir()):
        (blobs / str(number)).write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(Path("../../blobs") / str(number))
    elsa.verify(snapshot / INDEX)
    (snapshot / INDEX).unlink()
    (snapshot / INDEX).write_bytes(packed_index.read_bytes())
    with pytest.raises(elsa.UnsafePath, match="link"):
        elsa.open(snapshot / INDEX)


@pytest.mark.parametrize(
    ("document", "error"),
    [
        (b"\xff", elsa.InvalidJson),
        (b"[]", elsa.InvalidJson),
        (b"{}", elsa.InvalidIndex),
        (b'{"weight_map":{}}', elsa.InvalidIndex),
        (b'{"weight_map":{"a":"b"},"metadata":3}', elsa.InvalidIndex),
        (b'{"weight_map":{"a":"b","a":"c"}}', elsa.DuplicateKey),
        (b'{"weight_map":{"a":"../b"}}', elsa.UnsafePath),
        (b'{"weight_map":{"a":"b/c"}}', elsa.UnsafePath),
        (b'{"weight_map":{"a":"/etc/passwd"}}', elsa.UnsafePath),
        (b'{"weight_map":{"a":"..\\\\b"}}', elsa.UnsafePath),
        (b'{"weight_map":{"a":""}}', elsa.UnsafePath),
        (b'{"weight_map":{"a":"missing.safetensors"}}', elsa.InvalidIndex),
    ],
)
def test_bad_indexes_are_refused_everywhere(
    tmp_path: Path, document: bytes, error: type[Exception]
) -> None:
    index = tmp_path / INDEX
    index.write_bytes(document)
    for read in (
        lambda: elsa.open(index),
        lambda: elsa.verify(index),
        lambda: elsa.load_level(index),
        lambda: elsa.pack(index, tmp_path / "out.safetensors", sparsities=[50]),
        lambda: elsa.extract(index, tmp_path / "out.safetensors", level=1),
    ):
        with pytest.raises(error):
            read()
    assert list(tmp_path.iterdir()) == [index]


def test_shards_that_are_no_elsa_files(index: Path) -> None:
    with pytest.raises(elsa.NotElsa, match="00001-of-00003"):
        elsa.open(index)


def test_packed_shards_are_not_packed_again(packed_index: Path, tmp_path: Path) -> None:
    with pytest.raises(elsa.AlreadyPacked):
        elsa.pack(packed_index, tmp_path / "x.safetensors", sparsities=[50])


def test_the_commands_take_indexes(index: Path, tmp_path: Path) -> None:
    out, level = tmp_path / INDEX, tmp_path / "level.safetensors.index.json"

    def run(*words: object) -> subprocess.CompletedProcess[str]:
        command = [str(BIN / str(words[0])), *map(str, words[1:])]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    for words in (
        ["elsa-pack", index, "--sparsities", "90,50", "--jobs", 2, "-o", out],
        ["elsa-inspect", out],
        ["elsa-verify", out, "--jobs", 2],
        ["elsa-extract", out, "--level", 1, "--max-shard-size", "5kB", "-o", level],
    ):
        done = run(*words)
        assert done.returncode == 0, done.stderr
    assert len(elsa.load_level(level)) == 9
    wrong = run("elsa-pack", index, "--sparsities", "90", "--max-shard-size", 9, "-o", "x")
    assert wrong.returncode == 2
    assert "--max-shard-size" in wrong.stderr
