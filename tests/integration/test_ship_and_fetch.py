"""Delivery files from the ELSA file to the device: written whole, fetched by the difference."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from faulty_server import Server, add_header, claim, cut_after, fine, replace_by, status
from internals import _blocks, at_once, find_command

import elsa_format as elsa
from elsa_format import verify

SHIPPED = "net.ship.safetensors"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network of some hundred kilobytes, with statistics per level."""
    rng = np.random.default_rng(3)
    path = tmp_path_factory.mktemp("net") / "net.safetensors"
    weights = {f"layer{i}": rng.standard_normal((300, 200)).astype(np.float32) for i in range(4)}
    tensors = {}
    for name, values in weights.items():
        ranks = np.argsort(np.argsort(-np.abs(values).ravel())).reshape(values.shape)
        counters = np.searchsorted(np.array([0.05, 0.1, 0.2]) * values.size, ranks, "right") + 1
        tensors[name] = elsa.embed_counters(values, np.where(counters > 3, 0, counters), bits=2)
    statistics = [rng.standard_normal(50).astype(np.float32) for _ in range(4)]
    elsa.write(
        path,
        tensors | {"mean": statistics[3], "bias": rng.standard_normal(99).astype(np.float32)},
        levels=[elsa.LevelSpec(f"{100 - p}%", target=1 - p / 100) for p in (5, 10, 20)],
        nested=list(tensors),
        per_level={"mean": statistics[:3]},
    )
    return path


@pytest.fixture(scope="module")
def shipped(source: Path) -> Path:
    """Its delivery file."""
    target = source.with_name(SHIPPED)
    elsa.ship(source, target, block=14)
    return target


@pytest.fixture(scope="module")
def sizes(shipped: Path) -> dict[int | str, int]:
    """How many bytes each level needs."""
    with elsa.open_delivery(shipped) as delivery:
        return dict(delivery.downloads)


def arrays_of(path: Path | io.BytesIO, level: int | str) -> dict[str, bytes]:
    with elsa.open_delivery(path) as delivery:
        return {name: array.tobytes() for name, array in delivery.load(level).items()}


# --- Shipping ------------------------------------------------------------------------------------


def test_levels_are_those_of_the_source(source: Path, shipped: Path) -> None:
    with elsa.open(source) as file:
        for level in (1, 2, 3, "dense"):
            expected = {name: array.tobytes() for name, array in file.load(level).items()}
            assert arrays_of(shipped, level) == expected
    assert verify(shipped).digests == 3


@pytest.mark.parametrize("jobs", [1, 3])
def test_the_same_bytes_by_any_way(source: Path, shipped: Path, jobs: int, tmp_path: Path) -> None:
    """From a path, a pipe or a URL, to a file, a stream or parts, in any number of threads."""
    wanted = shipped.read_bytes()
    out = io.BytesIO()
    elsa.ship(source, out, block=14, jobs=jobs)
    assert out.getvalue() == wanted
    piped = tmp_path / "piped"
    reading, writing = os.pipe()
    with os.fdopen(writing, "wb") as sink, os.fdopen(reading, "rb") as stream:
        if os.fork() == 0:  # pragma: no cover
            stream.close()
            sink.write(source.read_bytes())
            sink.flush()
            os._exit(0)
        sink.close()
        elsa.ship(stream, piped, block=14, jobs=jobs)
    os.wait()
    assert piped.read_bytes() == wanted
    report = elsa.ship(source, tmp_path / "split", block=14, jobs=jobs, split=True)
    parts = sorted(tmp_path.glob("split.part-*"))
    assert [str(path) for path in parts] == list(report.files)
    assert len(parts) == 5
    assert b"".join(path.read_bytes() for path in parts) == wanted
    assert not (tmp_path / "split").exists()


def test_nothing_is_replaced_or_left(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "there"
    target.write_bytes(b"precious")
    with pytest.raises(elsa.OutputExists):
        elsa.ship(source, target)
    assert target.read_bytes() == b"precious"
    elsa.ship(source, target, force=True)
    assert verify(target).available == "dense"
    (tmp_path / "cut").write_bytes(source.read_bytes()[:-1])
    with pytest.raises(elsa.Truncated):
        elsa.ship(tmp_path / "cut", tmp_path / "out")
    with pytest.raises(elsa.InvalidOption):
        elsa.ship(source, tmp_path / "out", block=5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cut", "there"]


def test_shards(source: Path, tmp_path: Path) -> None:
    """Each shard is a delivery file, the index that of the sources with other names."""
    index = tmp_path / "model.safetensors.index.json"
    elsa.extract(source, index, level=3, keep_levels=True, max_shard_size=400_000)
    target = tmp_path / "out" / "model.ship.safetensors.index.json"
    target.parent.mkdir()
    report = elsa.ship(index, target)
    before, after = json.loads(index.read_bytes()), json.loads(target.read_bytes())
    assert after["metadata"] == before["metadata"]
    assert len(report.files) == len(set(after["weight_map"].values())) + 1
    for name, file in before["weight_map"].items():
        made = after["weight_map"][name]
        assert made == file.removesuffix(".safetensors") + ".ship.safetensors"
        out = io.BytesIO()
        elsa.extract(target.parent / made, out, restore=True)
        assert out.getvalue() == (tmp_path / file).read_bytes()
    there = tmp_path / "device" / "model.ship.safetensors.index.json"
    there.parent.mkdir()
    one = elsa.fetch(target, there, level=1)
    two = elsa.fetch(target, there, upgrade=2)
    size = target.stat().st_size
    assert (one.size, two.size) == (report.sizes[1] + size, report.sizes[2] + size)
    with pytest.raises(elsa.InvalidOption):
        elsa.ship(index, tmp_path / "file")


def test_ship_from_a_server(server: Server, source: Path, tmp_path: Path) -> None:
    """A file or the shards of an index at a URL are read once, and give what local ones give."""
    elsa.ship(source, tmp_path / "one")
    raw = source.read_bytes()
    elsa.ship(server.serve(raw), tmp_path / "from a URL")
    assert (tmp_path / "from a URL").read_bytes() == (tmp_path / "one").read_bytes()
    assert server.sent == len(raw)
    index = tmp_path / "model.safetensors.index.json"
    elsa.extract(source, index, level=3, keep_levels=True, max_shard_size=400_000)
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    url = server.serve(index.read_bytes(), f"/{index.name}")
    for shard in shards:
        server.serve(shard.read_bytes(), f"/{shard.name}")
    made = []
    for place, where in (("near", index), ("far", url)):
        (tmp_path / place).mkdir()
        report = elsa.ship(where, tmp_path / place / "model.ship.safetensors.index.json")
        made.append({Path(file).name: Path(file).read_bytes() for file in report.files})
    assert len(shards) > 1
    assert made[0] == made[1]


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda raw: raw[:-1], "Truncated"),
        (lambda raw: raw + b"x", "TrailingData"),
        (lambda raw: raw[:-1] + bytes([raw[-1] ^ 1]), "ChecksumMismatch"),
    ],
)
def test_a_wrong_source_leaves_nothing(
    source: Path, tmp_path: Path, change: Callable[[bytes], bytes], error: str
) -> None:
    """It is noticed when much has been coded already."""
    wrong = change(source.read_bytes())
    (tmp_path / "wrong").write_bytes(wrong)
    for where in (tmp_path / "wrong", io.BytesIO(wrong), Pipe(wrong)):
        with pytest.raises(elsa.FormatError) as found:
            elsa.ship(where, tmp_path / "out")  # type: ignore[arg-type]
        assert type(found.value).__name__ == error
    assert [path.name for path in tmp_path.iterdir()] == ["wrong"]


class Pipe(io.RawIOBase):
    """A stream that cannot seek."""

    def __init__(self, data: bytes) -> None:
        self._data = io.BytesIO(data)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self._data.readinto(buffer)


@pytest.mark.parametrize("cores", [1, 3])
def test_decoded_ahead(
    source: Path, shipped: Path, tmp_path: Path, cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads make no difference, to what is read, to what is wrong, nor to one tensor alone."""
    monkeypatch.setattr(_blocks, "SMALL", 0)
    monkeypatch.setattr(at_once, "__defaults__", (cores,))
    with elsa.open(source) as wanted, elsa.open(shipped) as file:
        for level in (1, "dense"):
            expected = {name: array.tobytes() for name, array in wanted.load(level).items()}
            assert {n: a.tobytes() for n, a in file.load(level).items()} == expected
            assert {n: a.tobytes() for n, a in elsa.stream(shipped, level=level)} == expected
            assert file.tensor("layer2", level).tobytes() == expected["layer2"]
    elsa.extract(shipped, tmp_path / "back", restore=True)
    assert (tmp_path / "back").read_bytes() == source.read_bytes()
    raw = bytearray(shipped.read_bytes())
    raw[-1] ^= 1
    with elsa.open(io.BytesIO(bytes(raw))) as file:
        for _ in range(2):  # the error is not all that is left of the block
            with pytest.raises(elsa.ChecksumMismatch):
                file.load("dense")
        assert file.tensor("layer0", "dense").size == 60_000


def test_commands(source: Path, tmp_path: Path) -> None:
    run, ship, fetch = CliRunner(), find_command("ship"), find_command("fetch")
    assert ship is not None
    assert fetch is not None
    made = run.invoke(ship, [str(source), "-o", str(tmp_path / SHIPPED), "--json"])
    assert made.exit_code == 0, made.output
    told = json.loads(made.stdout)
    assert [entry["level"] for entry in told["levels"]] == [1, 2, 3, "dense"]
    assert told["levels"][-1]["size"] == (tmp_path / SHIPPED).stat().st_size
    arguments = [str(tmp_path / SHIPPED), "-o", str(tmp_path / "device"), "--json"]
    got = run.invoke(fetch, [*arguments, "--sparsity", "90"])
    assert json.loads(got.stdout)["level"] == 2
    assert run.invoke(fetch, arguments).exit_code == 2
    assert run.invoke(fetch, [*arguments, "--level", "9"]).exit_code == 2
    assert run.invoke(ship, [str(source), "-o", str(tmp_path / SHIPPED)]).exit_code == 1
    assert run.invoke(ship, [str(tmp_path / SHIPPED), "-o", str(tmp_path / "x")]).exit_code == 3


# --- Fetching ------------------------------------------------------------------------------------


def test_each_byte_once(
    server: Server, shipped: Path, sizes: dict[int | str, int], tmp_path: Path
) -> None:
    """A level by its bytes, an upgrade by the difference and the header."""
    raw, out = shipped.read_bytes(), tmp_path / "device"
    url = server.serve(raw)
    elsa.fetch(url, out, level=1)
    assert out.read_bytes() == raw[: sizes[1]]
    assert server.sent <= sizes[1] + (64 << 10)
    for level, before in ((2, 1), ("dense", 2)):
        server.sent, server.requests[:], server.headers[:] = 0, [], []
        report = elsa.fetch(url, out, upgrade=level)
        assert out.read_bytes() == raw[: sizes[level]]
        assert server.sent == report.fetched <= sizes[level] - sizes[before] + 1024
        assert server.ranges[-1] == f"bytes={sizes[before]}-{sizes[level] - 1}"
        assert server.headers[-1]["If-Range"] == '"one"'
    server.sent = 0
    assert elsa.fetch(url, out, level=1).size == len(raw)
    assert server.sent <= 1024
    assert arrays_of(out, "dense") == arrays_of(shipped, "dense")


def test_the_level_for_a_budget(
    server: Server, shipped: Path, sizes: dict[int | str, int], tmp_path: Path
) -> None:
    url, out = server.serve(shipped.read_bytes()), tmp_path / "device"
    with pytest.raises(elsa.NoSuchLevel, match="level 1 takes"):
        elsa.fetch(url, out, max_size=100)
    assert not out.exists()
    with pytest.raises(elsa.NoSuchLevel, match=f"level 1 takes {sizes[1]}"):
        elsa.fetch(url, out, max_size=sizes[1] - 1)  # header and head count, too
    assert elsa.fetch(url, out, max_size=sizes[2]).fetched == sizes[2]
    header = 8 + int.from_bytes(shipped.read_bytes()[:8], "little")  # brought again, to compare
    more = header + sizes[3] - sizes[2]
    assert elsa.fetch(url, out, max_size=more - 1).level == 2
    assert elsa.fetch(url, out, max_size=more).level == 3
    assert out.stat().st_size == sizes[3]


def test_connections_that_break(
    server: Server, shipped: Path, sizes: dict[int | str, int], tmp_path: Path
) -> None:
    raw, out = shipped.read_bytes(), tmp_path / "device"
    faults = [fine, cut_after(1000), status(503), cut_after(0), claim(content_range="bytes 0-9/10")]
    url = server.serve(raw, faults=faults)
    with pytest.raises(elsa.RemoteError):  # a wrong range is not tried again
        elsa.fetch(url, out, level="dense")
    kept = out.read_bytes()
    assert raw.startswith(kept)
    elsa.fetch(url, out, level="dense")
    assert out.read_bytes() == raw
    assert server.ranges[-1] == f"bytes={len(kept)}-{len(raw) - 1}"


def test_a_server_without_ranges(
    server: Server, shipped: Path, sizes: dict[int | str, int], tmp_path: Path
) -> None:
    raw, out = shipped.read_bytes(), tmp_path / "device"
    for options in ({"ranges": False}, {"ranges": False, "length": False, "etag": None}):
        url = server.serve(raw, **options)
        out.unlink(missing_ok=True)
        for level in (1, 2, "dense"):
            assert elsa.fetch(url, out, level=level).size == sizes[level]
            assert out.read_bytes() == raw[: sizes[level]]


def test_a_file_that_changes(
    server: Server, source: Path, shipped: Path, sizes: dict[int | str, int], tmp_path: Path
) -> None:
    raw, out = shipped.read_bytes(), tmp_path / "device"
    other = raw[:-1] + bytes([raw[-1] ^ 1])
    url = server.serve(raw, faults=[fine, replace_by(other, '"two"')])
    with pytest.raises(elsa.InputChanged):  # in the middle of a fetch
        elsa.fetch(url, out, level="dense")
    assert raw.startswith(out.read_bytes())
    # Another network under the same name: what is there is not its beginning.
    elsa.extract(source, tmp_path / "two", level=2, keep_levels=True)
    elsa.ship(tmp_path / "two", tmp_path / "two.ship")
    url = server.serve((tmp_path / "two.ship").read_bytes(), etag='"three"')
    before = out.read_bytes()
    with pytest.raises(elsa.OutputExists, match="is not a prefix of"):
        elsa.fetch(url, out, level=1)
    assert out.read_bytes() == before
    elsa.fetch(url, out, level=1, force=True)
    assert (tmp_path / "two.ship").read_bytes().startswith(out.read_bytes())


def test_damage_is_brought_again(
    server: Server, shipped: Path, sizes: dict[int | str, int], tmp_path: Path
) -> None:
    """A part that is not what it should be is fetched once more; what comes so is refused."""
    raw, out = shipped.read_bytes(), tmp_path / "device"
    url = server.serve(raw)
    for length, at in ((sizes[2], sizes[1] + 50), (sizes[2] + 99, sizes[2] + 50), (sizes[1], 700)):
        damaged = bytearray(raw[:length])
        damaged[at] ^= 4
        out.write_bytes(damaged)
        elsa.fetch(url, out, level=3)
        assert out.read_bytes() == raw[: sizes[3]]
    bad = bytearray(raw)
    bad[sizes[1] + 500] ^= 1
    url = server.serve(bytes(bad))
    out.unlink()
    with pytest.raises(elsa.ChecksumMismatch):
        elsa.fetch(url, out, level=3)
    assert out.read_bytes() == raw[: sizes[1]]
    assert arrays_of(out, 1) == arrays_of(shipped, 1)


def test_what_is_no_delivery_file(server: Server, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "device"
    with pytest.raises(elsa.NotElsa):
        elsa.fetch(server.serve(source.read_bytes()), out, level=1)
    with pytest.raises(elsa.Truncated):
        elsa.fetch(server.serve(b""), out, level=1)
    with pytest.raises(elsa.RemoteError, match="404"):
        elsa.fetch(server.url + "/no", out, level=1)
    url = server.serve(b"{}", faults=[add_header("Content-Encoding", "gzip")])
    with pytest.raises(elsa.RemoteError, match="gzip"):
        elsa.fetch(url, out, level=1)
    with pytest.raises(elsa.InvalidOption, match="does not exist; use level=2"):
        elsa.fetch(server.url, out, upgrade=2)
    assert not list(tmp_path.iterdir())


def test_a_beginning_on_the_server(
    server: Server, shipped: Path, sizes: dict[int | str, int], tmp_path: Path
) -> None:
    """Who serves what it has fetched so far serves the levels that are there."""
    url, out = server.serve(shipped.read_bytes()[: sizes[1] + 9]), tmp_path / "device"
    assert elsa.fetch(url, out, level=1).size == sizes[1]
    with pytest.raises(elsa.Incomplete):
        elsa.fetch(url, out, level=2)
    assert arrays_of(out, 1) == arrays_of(shipped, 1)


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_killed_at_any_moment(
    server: Server, shipped: Path, sizes: dict[int | str, int], tmp_path: Path
) -> None:
    """kill -9 leaves a beginning that the next call continues."""
    raw, out = shipped.read_bytes(), tmp_path / "device"

    def slowly(request: object) -> None:
        time.sleep(0.05)

    script = "import sys, elsa_format as e; e.fetch(sys.argv[1], sys.argv[2], level='dense')"
    server.serve(raw)
    for _ in range(4):
        before = out.stat().st_size if out.exists() else 0
        step = [cut_after(max((len(raw) - before) // 3, 1)), slowly] * 40
        url = server.serve(raw, faults=[fine, *step])
        process = subprocess.Popen([sys.executable, "-c", script, url, str(out)])
        until = time.monotonic() + 20
        while time.monotonic() < until and process.poll() is None:
            if out.exists() and out.stat().st_size > before:
                break
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert raw.startswith(out.read_bytes())
    kept = out.stat().st_size
    elsa.fetch(server.serve(raw), out, level="dense")
    assert out.read_bytes() == raw
    assert kept == len(raw) or server.ranges[-1] == f"bytes={kept}-{len(raw) - 1}"


def test_open_a_url(server: Server, shipped: Path, sizes: dict[int | str, int]) -> None:
    """A level from a URL takes its bytes, an upgrade the difference."""
    url = server.serve(shipped.read_bytes())
    with elsa.open_delivery(url) as delivery:
        assert delivery.available[-1] == "dense"
        arrays = delivery.load(1)
        assert server.sent <= sizes[1] + (64 << 10)
        before, server.sent = server.sent, 0
        delivery.upgrade(3)
        assert server.sent <= sizes[3] - min(before, sizes[1])
        assert {n: a.tobytes() for n, a in arrays.items()} == arrays_of(shipped, 3)


def test_a_shard_that_is_a_link_elsewhere_is_not_fetched(source: Path, tmp_path: Path) -> None:
    """As everywhere else where an index names files; and no index is left behind."""
    index, target = (
        tmp_path / "m.safetensors.index.json",
        tmp_path / "m.ship.safetensors.index.json",
    )
    elsa.extract(source, index, level=3, keep_levels=True, max_shard_size=400_000)
    elsa.ship(index, target)
    shard = next(iter(sorted(tmp_path.glob("m-*.ship.safetensors"))))
    (tmp_path / "elsewhere").mkdir()
    shard.rename(tmp_path / "elsewhere" / shard.name)
    shard.symlink_to(tmp_path / "elsewhere" / shard.name)
    there = tmp_path / "device" / target.name
    there.parent.mkdir()
    with pytest.raises(elsa.UnsafePath, match="leaves the directory"):
        elsa.fetch(target, there, level=1)
    assert list(there.parent.iterdir()) == []
