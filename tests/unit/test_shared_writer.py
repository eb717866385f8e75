"""One network written by several processes; here they are threads, which talk over a barrier."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from internals import AtomicFile

import elsa_format
from elsa_format import ElsaError, LevelSpec
from elsa_format.plugins import (
    Contents,
    TensorInfo,
    Together,
    digest_lines,
    digest_of_lines,
    of_array,
    open_shared_writer,
    tensor_line,
    variant_name,
)

PROCESSES = 3
RNG = np.random.default_rng(0)
WEIGHTS = {
    name: elsa_format.embed_counters(
        RNG.normal(size=shape).astype(np.float32), RNG.integers(0, 3, shape), bits=2
    )
    for name, shape in {"a": (13, 5), "b": (40,), "c": (3, 3)}.items()
}
MEANS = [np.full(4, t, np.float32) for t in range(3)]
ARRAYS = {**WEIGHTS, "mean": MEANS[2], **{variant_name("mean", t + 1): MEANS[t] for t in (0, 1)}}
HOMES = {name: int(name in "bc") for name in ARRAYS}
LEVELS = [LevelSpec("90%"), LevelSpec("50%")]


class Talk:
    """An exchange among threads; with one that is gone it fails for all."""

    def __init__(self):
        self.barrier = threading.Barrier(PROCESSES, timeout=20)
        self.said = [b""] * PROCESSES

    def of(self, process):
        def exchange(message):
            self.said[process] = message
            self.barrier.wait()
            answers = list(self.said)
            self.barrier.wait()
            return answers

        return exchange


def write(path, talk, process, *, force=False, before_finish=lambda process: None):
    infos = [TensorInfo(name, of_array(a.dtype), a.shape) for name, a in ARRAYS.items()]
    owners = [0, 1]  # process 2 has nothing to write, but takes part
    groups = [[info for info in infos if HOMES[info.name] == owner] for owner in owners]
    contents = Contents(2, LEVELS, frozenset(WEIGHTS), frozenset(["mean"]))
    together = Together(str(path), process, talk.of(process))
    together.check_folder()
    with open_shared_writer(together, groups, owners, contents, force=force) as writer:
        for name, array in ARRAYS.items():
            if HOMES[name] == process:
                flat = array.reshape(-1)
                for start in range(0, flat.size, 16):
                    writer.append(name, flat[start : start + 16])
        before_finish(process)
        writer.finish()


def all_write(path, **options):
    """Return what each raised, or None."""
    talk = Talk()

    def one(process):
        try:
            write(path, talk, process, **options)
        except (ElsaError, OSError, RuntimeError) as error:
            if isinstance(error, Killed):
                talk.barrier.abort()
            return error
        return None

    with ThreadPoolExecutor(PROCESSES) as pool:
        return list(pool.map(one, range(PROCESSES)))


class Killed(RuntimeError):
    """A process is gone without a word."""


@pytest.fixture
def index(tmp_path):
    return tmp_path / "net.safetensors.index.json"


def names(path):
    return sorted(file.name for file in path.parent.iterdir())


def test_shards_of_several_are_the_network_that_one_writes(index, tmp_path):
    assert all_write(index) == [None] * PROCESSES
    shards = [f"net-0000{n}-of-00002.safetensors" for n in (1, 2)]
    assert names(index) == [*shards, index.name]
    elsa_format.verify(index)
    dense = {**WEIGHTS, "mean": MEANS[2]}
    elsa_format.write(
        tmp_path / "one.safetensors",
        dense,
        levels=LEVELS,
        nested=WEIGHTS,
        per_level={"mean": MEANS[:2]},
    )
    with elsa_format.open(index) as found, elsa_format.open(tmp_path / "one.safetensors") as one:
        assert found.levels == one.levels
        for level in (1, 2, "dense"):
            for name, array in one.load(level).items():
                assert found.load(level)[name].tobytes() == array.tobytes()
        digests = [level.digest for level in one.levels]
    parts = [digest_lines(tmp_path / shard) for shard in shards]
    assert [digest_of_lines(parts[0][t] | parts[1][t]) for t in (0, 1)] == digests


def test_what_is_there_stays_without_force_and_goes_with_it(index):
    assert all_write(index) == [None] * PROCESSES
    refused = all_write(index)
    assert all("exists already" in str(error) for error in refused)
    elsa_format.verify(index)
    assert all_write(index, force=True) == [None] * PROCESSES
    elsa_format.verify(index)


@pytest.mark.parametrize("method", ["write_at", "sync", "publish"])
def test_a_full_disk_of_one_is_an_error_of_all_and_leaves_nothing(index, monkeypatch, method):
    whole = getattr(AtomicFile, method)

    def fail(self, *words):
        if "00002-of" in self.name:
            raise OSError(28, "No space left on device", self.name)
        return whole(self, *words)

    monkeypatch.setattr(AtomicFile, method, fail)
    first, second, third = all_write(index)
    assert isinstance(second, OSError)
    assert "process 1 failed: [Errno 28]" in str(first)
    assert "process 1 failed: [Errno 28]" in str(third)
    assert names(index) == []


def test_an_index_that_cannot_be_written_takes_its_shards_away(index, monkeypatch):
    whole = AtomicFile.publish

    def fail(self):
        if self.name.endswith(".json"):
            raise OSError(28, "No space left on device", self.name)
        whole(self)

    monkeypatch.setattr(AtomicFile, "publish", fail)
    first, second, third = all_write(index)
    assert isinstance(first, OSError)
    assert "process 0 failed" in str(second)
    assert "process 0 failed" in str(third)
    assert names(index) == []


def test_a_process_that_dies_leaves_no_index(index):
    def die(process):
        if process == 1:
            raise Killed

    found = all_write(index, before_finish=die)
    assert all(isinstance(error, RuntimeError) for error in found)
    assert names(index) == []


def test_a_folder_that_is_not_shared_is_refused(tmp_path):
    talk = Talk()
    folders = [tmp_path / str(process) for process in range(PROCESSES)]
    for folder in folders:
        folder.mkdir()

    def check(process):
        with pytest.raises(ElsaError, match="give a folder that all hosts share"):
            Together(
                str(folders[process] / "i.index.json"), process, talk.of(process)
            ).check_folder()

    with ThreadPoolExecutor(PROCESSES) as pool:
        list(pool.map(check, range(PROCESSES)))
    assert not any(list(folder.iterdir()) for folder in folders)


def test_a_line_does_not_depend_on_blocks():
    array = WEIGHTS["a"].reshape(-1)
    info = TensorInfo("a", of_array(array.dtype), (13, 5))
    for nested in (True, False):
        whole = tensor_line(info, [array], nested=nested)
        parts = [array[start : start + 8] for start in range(0, array.size, 8)]
        assert tensor_line(info, parts, nested=nested) == whole


def test_a_store_holds_the_same_bytes(tmp_path):
    """Also where an older network is replaced."""
    fsspec = pytest.importorskip("fsspec")
    assert all_write(tmp_path / "m.index.json") == [None] * PROCESSES
    store = fsspec.filesystem("memory")
    for force in (False, True):
        assert all_write("memory://shared/m.index.json", force=force) == [None] * PROCESSES
        names = sorted(path.name for path in tmp_path.iterdir())
        assert sorted(name.rpartition("/")[2] for name in store.find("/shared")) == names
        for name in names:
            assert store.cat(f"/shared/{name}") == (tmp_path / name).read_bytes()
    refused = all_write("memory://shared/m.index.json")
    assert all("exists already" in str(error) for error in refused)
    store.rm("/shared", recursive=True)
