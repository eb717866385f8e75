"""What a delivery file may cost: time with small blocks, memory, forks, and growth under way."""

import inspect
import io
import json
import os
import signal
import sys
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import xxhash
from bits import same_bits
from click.testing import CliRunner
from faulty_server import Server
from internals import FileStorage, _blocks, _manifest, _places, find_command, header_bytes

import elsa_format as elsa
from elsa_report import write_report


def shipped(folder: Path, weights: int, block: int) -> Path:
    """A delivery file of about so many weights, with stored blocks among the others."""
    source, target = folder / f"{weights}.safetensors", folder / f"{weights}-{block}.ship"
    if not source.exists():
        rng = np.random.default_rng(weights)
        layer = rng.standard_normal(weights).astype(np.float32)
        bits = rng.integers(1 << 20, 1 << 30, weights // 4, np.uint32)
        layer[: weights // 4] = bits.view(np.float32)
        tensors = {"layer": layer, "bias": rng.standard_normal(weights // 8).astype(np.float32)}
        elsa.pack(tensors, source, sparsities=[95, 80], include=["layer"])
    elsa.ship(source, target, block=block)
    return target


def lines_run(work: Callable[[], object]) -> int:
    """How many lines of the package the work takes in this thread, loops counted."""
    lines = 0

    def count(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal lines
        if "elsa_format" not in frame.f_code.co_filename:
            return None
        lines += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        work()
    finally:
        sys.settrace(before)
    return lines


ROUTES: dict[str, Callable[[Path], object]] = {
    "verify": elsa.verify,
    "load": lambda path: elsa.open(path).load("dense"),
    "stream": lambda path: list(elsa.stream(path, level=1)),
    "extract": lambda path: elsa.extract(path, path.with_suffix(".out"), level=1, force=True),
    "fetch": lambda path: elsa.fetch(path, path.with_suffix(".copy"), level=1, force=True),
}


@pytest.mark.parametrize("route", ROUTES)
def test_time_is_linear_in_small_blocks(
    route: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SECURITY.md promises it; every block once summed up all that were kept."""
    monkeypatch.setattr(_blocks, "SMALL", 1 << 60)  # all in this thread
    work, steps, reads = ROUTES[route], [], [0]
    read_at = FileStorage.read_at

    def counted(self: FileStorage, position: int, view: memoryview) -> int:
        reads[-1] += 1
        return read_at(self, position, view)

    monkeypatch.setattr(FileStorage, "read_at", counted)
    work(shipped(tmp_path, 64, 6))  # what is imported, once
    for weights in (1 << 15, 1 << 16):
        path = shipped(tmp_path, weights, 6)
        reads.append(0)
        steps.append(lines_run(lambda path=path: work(path)))  # type: ignore[misc]
    blocks = (1 << 16) // 64
    assert steps[1] < 2.2 * steps[0]
    assert steps[1] < 100 * blocks
    assert reads[-1] < blocks / 4


@pytest.mark.parametrize("block", [6, 9, 16, 18])
def test_small_blocks_hold_the_same(tmp_path: Path, block: int) -> None:
    """However many blocks are decoded together, stored ones included."""
    path = shipped(tmp_path, 150_000, block)
    with (
        elsa.open(path.with_name("150000.safetensors")) as wanted,
        elsa.open(path) as file,
        elsa.open_delivery(path) as delivery,
    ):
        loaded = delivery.load(1)
        for level in (1, 2, "dense"):
            expected = {name: array.tobytes() for name, array in wanted.load(level).items()}
            assert {name: array.tobytes() for name, array in file.load(level).items()} == expected
            assert file.tensor("bias", level).tobytes() == expected["bias"]
            delivery.upgrade(level)
            assert {name: array.tobytes() for name, array in loaded.items()} == expected
    assert elsa.verify(path).digests == 2


def limited(route: str) -> Callable[[Path, Path, int], object]:
    """A public function that reads a network, as source, target, and max_bytes."""
    calls: dict[str, Callable[[Path, Path, int], object]] = {
        "open": lambda source, _, most: elsa.open(source, max_bytes=most),
        "inspect": lambda source, _, most: elsa.inspect(source, max_bytes=most),
        "open_delivery": lambda source, _, most: elsa.open_delivery(source, max_bytes=most),
        "load_level": lambda source, _, most: elsa.load_level(source, max_bytes=most),
        "stream": lambda source, _, most: list(elsa.stream(source, level=1, max_bytes=most)),
        "verify": lambda source, _, most: elsa.verify(source, max_bytes=most),
        "extract": lambda s, out, most: elsa.extract(s, out, level=1, max_bytes=most),
        "extract whole": lambda s, out, most: elsa.extract(s, out, restore=True, max_bytes=most),
        "ship": lambda source, out, most: elsa.ship(source, out, max_bytes=most),
        "fetch": lambda source, out, most: elsa.fetch(source, out, level=1, max_bytes=most),
        "evaluate": lambda s, _, most: elsa.evaluate(s, lambda _: {"loss": 0.0}, max_bytes=most),
        "record": lambda s, out, most: elsa.record(s, out, {1: {"loss": 0.0}}, max_bytes=most),
        "write_report": lambda s, out, most: write_report(s, out, max_bytes=most),
    }
    return calls[route]


BOTH = ("open", "inspect", "stream", "verify", "extract", "evaluate")
DELIVERED = (*BOTH, "open_delivery", "extract whole", "fetch")
PLAIN = (*BOTH, "ship", "load_level", "record", "write_report")


def test_no_route_lacks_a_limit() -> None:
    """Whatever reads a network takes `max_bytes`, and is tested below; `pack` reads one's own."""
    found = {name: getattr(elsa, name) for name in elsa.__all__ if name[0].islower()}
    reading = {n for n, f in found.items() if {"source"} & set(inspect.signature(f).parameters)}
    assert reading - {"pack"} == {route.split()[0] for route in (*DELIVERED, *PLAIN)} - {
        "write_report"
    }


@pytest.fixture
def long_header(tmp_path: Path) -> Path:
    """A small network with a header of 300 kB, most of which compression takes away."""
    path = tmp_path / "long.safetensors"
    levels = [elsa.LevelSpec("90%")]
    counters = np.arange(100, dtype=np.int64) % 2
    weights = elsa.embed_counters(np.ones(100, np.float32), counters, bits=1)
    elsa.write(path, {"w": weights}, levels=levels, nested=["w"], metadata={"notes": "n" * 300_000})
    elsa.ship(path, tmp_path / "long.ship.safetensors")
    return path


@pytest.mark.parametrize("route", DELIVERED)
def test_the_header_in_a_delivery_file_is_limited(
    long_header: Path, route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it is decompressed: 4.6 MB may be a header of 95 MB."""
    source, out = long_header.with_name("long.ship.safetensors"), long_header.with_name("out")
    assert source.stat().st_size < 5000
    limited(route)(source, out, 400_000)
    out.unlink(missing_ok=True)
    monkeypatch.setattr("zlib.decompressobj", None)
    with pytest.raises(elsa.TooLarge, match=r"headers of 30\d\d\d\d bytes, more than the 100000"):
        limited(route)(source, out, 100_000)
    with pytest.raises(elsa.TooLarge, match=r": a header of \d\d\d bytes, more than the 10 that"):
        limited(route)(source, out, 10)
    assert not out.exists()


@pytest.mark.parametrize("route", PLAIN)
def test_headers_and_tensors_are_limited(long_header: Path, tmp_path: Path, route: str) -> None:
    """All of them, of one file and of all shards behind an index."""
    out, index = tmp_path / "out", tmp_path / "shards.safetensors.index.json"
    source = long_header
    tensors = {f"w{n}": np.ones((30, 10), np.float32) for n in range(4)}
    if route == "load_level":
        elsa.extract(long_header, tmp_path / "level.safetensors", level=1)
        elsa.pack(tensors, tmp_path / "net.safetensors", sparsities=[50])
        source = tmp_path / "level.safetensors"
        elsa.extract(tmp_path / "net.safetensors", index, level=1, max_shard_size=1300)
    else:
        elsa.pack(tensors, index, sparsities=[50], max_shard_size=1300)
    with pytest.raises(elsa.TooLarge, match=r": a header of 30\d\d\d\d bytes"):
        limited(route)(source, out, 100_000)
    shards = sorted(tmp_path.glob("shards-*.safetensors"))
    headers = [int.from_bytes(shard.read_bytes()[:8], "little") for shard in shards]
    assert len(shards) == 4
    together = index.stat().st_size + sum(headers)
    target = out.with_suffix(".index.json") if route in ("ship", "record") else out
    with pytest.raises(elsa.TooLarge, match=f": headers of {together} bytes"):
        limited(route)(index, target, together - 1)
    large = max(together, 4800)
    limited(route)(index, target, large)


def test_tensors_of_a_delivery_file_are_limited(tmp_path: Path) -> None:
    path = shipped(tmp_path, 4096, 6)
    size = 4096 * 4 + 512 * 4
    for route in DELIVERED:
        out = tmp_path / route
        with pytest.raises(elsa.TooLarge, match=f": tensors of {size} bytes"):
            limited(route)(path, out, size - 1)
        assert not out.exists()
        limited(route)(path, out, size)


def test_the_commands_that_write_are_limited(tmp_path: Path) -> None:
    path, out = shipped(tmp_path, 4096, 6), tmp_path / "out.safetensors"
    for words in (["extract", "--restore"], ["fetch", "--level", "1"], ["ship"]):
        source = path.with_name("4096.safetensors") if words == ["ship"] else path
        command = find_command(words[0])
        assert command is not None
        done = CliRunner().invoke(
            command, [str(source), *words[1:], "--max-bytes", "10", "-o", str(out)]
        )
        assert (done.exit_code, "see --max-bytes" in done.stderr) == (2, True), done.output
        assert not out.exists()


def test_an_index_is_limited_before_it_is_read(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where its size is known; else before it is parsed."""
    index = tmp_path / "model.safetensors.index.json"
    index.write_bytes(b" " * 5000)
    url = server.serve(b" " * 5000, "/model.safetensors.index.json", ranges=False, length=False)
    refused = pytest.raises(elsa.TooLarge, match="a header of 5000 bytes, more than the 4999")
    with refused:
        elsa.open(url, max_bytes=4999)
    monkeypatch.setattr(_places, "read_exactly", None)
    for route in ("open", "load_level", "stream", "verify", "extract", "fetch"):
        with refused:
            limited(route)(index, tmp_path / "out.index.json", 4999)


def test_a_manifest_is_limited(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it is parsed; but what answers in its place says nothing of a file."""
    folder, out = tmp_path / "net", tmp_path / "out"
    folder.mkdir()
    raw = shipped(tmp_path, 4096, 6).read_bytes()
    (folder / "model.ship.safetensors").write_bytes(raw)
    manifest = b'{"files":{},"version":"1.0","weights":"model.ship.safetensors"}'
    (folder / "elsa-files.json").write_bytes(manifest.ljust(30_000))
    url = server.serve(raw, "/net")
    server.serve(manifest.ljust(30_000), "/net/elsa-files.json")
    assert elsa.fetch(folder, out, level=1, max_bytes=30_000).level == 1
    assert elsa.fetch(url, tmp_path / "file", level=1, max_bytes=29_999).level == 1
    monkeypatch.setattr(_manifest, "parse", None)
    for source in (folder, f"{url}/"):
        with pytest.raises(elsa.TooLarge, match="a header of 30000 bytes, more than the 29999"):
            elsa.fetch(source, out, level=1, max_bytes=29_999)


DECLARED = 1 << 36
"""Bytes of weights that a header declares, and no machine has."""


def test_no_memory_for_what_no_byte_backs(tmp_path: Path) -> None:
    """Indexes are compared with the bytes of their parts before there are arrays."""
    shape = [DECLARED // 4]
    profile = json.dumps(
        {"version": "1.0", "bits": 1, "levels": [{"name": "1", "nonzero": 0}], "nested": {"w": [0]}}
    )
    entry = {"dtype": "F32", "shape": shape, "data_offsets": [0, DECLARED]}
    raw = json.dumps({"__metadata__": {"elsa": profile}, "w": entry}).encode()
    head = len(raw).to_bytes(8, "little") + raw
    packed = zlib.compress(head)
    index = bytes(3 * 1000)  # of 16,384 blocks
    checksum = f"xxh3:{xxhash.xxh3_64_hexdigest(packed)}"
    header = header_bytes(20, [len(packed), len(index), 3 * (DECLARED >> 22)], len(head), checksum)
    path = tmp_path / "bomb.ship.safetensors"
    path.write_bytes(header + packed + index)
    for read in (
        lambda: elsa.open(path).load(1),
        lambda: elsa.open(path).tensor("w", 1),
        lambda: list(elsa.stream(path, level=1)),
        lambda: elsa.open_delivery(path).load(1),
        lambda: list(elsa.open_delivery(path).stream(1)),
        lambda: elsa.extract(path, tmp_path / "out", level=1),
        lambda: elsa.verify(path),
    ):
        with pytest.raises(
            elsa.InvalidDelivery, match="an index of 16384 blocks in a part of 3000"
        ):
            read()
    with pytest.raises(elsa.TooLarge, match=f"tensors of {DECLARED} bytes"):
        elsa.open_delivery(path, max_bytes=1 << 30)
    assert not (tmp_path / "out").exists()


# --- Forks, growth, upgrades at once -------------------------------------------------------------


@pytest.fixture(scope="module")
def delivered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A delivery file of several large blocks, which threads decode ahead."""
    folder = tmp_path_factory.mktemp("delivered")
    weights = np.random.default_rng(1).standard_normal((6, 256, 1024)).astype(np.float32)
    net = {f"layer{n}": layer for n, layer in enumerate(weights)}
    elsa.pack(net, folder / "net.safetensors", sparsities=[90, 50])
    elsa.ship(folder / "net.safetensors", folder / "net.ship.safetensors")
    return folder / "net.ship.safetensors"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks")
@pytest.mark.filterwarnings("ignore:.*fork.*")
@pytest.mark.parametrize("kind", ["path", "stream", "file", "URL"])
def test_a_child_goes_on_with_a_stream(delivered: Path, kind: str, server: Server) -> None:
    """What the parent's threads decode at the fork is decoded anew, and no lock is held."""
    expected = dict(elsa.stream(delivered, level=2))
    sources: dict[str, Callable[[], Any]] = {
        "path": lambda: delivered,
        "stream": lambda: io.BytesIO(delivered.read_bytes()),
        "file": lambda: delivered.open("rb"),
        "URL": lambda: server.serve(delivered.read_bytes()),
    }
    for after in (1, 2, 3, 1, 2, 3, 1, 2, 3, 1):
        source = sources[kind]()
        arrays = elsa.stream(source, level=2)
        for _ in range(after):
            next(arrays)
        child = os.fork()
        if child == 0:  # pragma: no cover
            signal.alarm(60)  # instead of a wait for ever
            left = dict(arrays)
            os._exit(0 if same_bits(left, {n: expected[n] for n in list(expected)[after:]}) else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert same_bits(dict(arrays), {n: expected[n] for n in list(expected)[after:]})


@pytest.mark.skipif(not hasattr(os, "preadv"), reason="files are read from their position")
def test_the_position_of_a_file_stays(delivered: Path) -> None:
    """A forked child shares it, and would read from where the parent has just gone."""
    with delivered.open("rb") as file, elsa.open(file) as network:
        os.lseek(file.fileno(), 7, os.SEEK_SET)
        assert same_bits(network.load(2), elsa.open(delivered).load(2))
        assert os.lseek(file.fileno(), 0, os.SEEK_CUR) == 7


@pytest.mark.parametrize("read", ["stream", "extract", "verify", "load"])
def test_a_prefix_that_grows_is_not_changed(delivered: Path, tmp_path: Path, read: str) -> None:
    device = tmp_path / "device.ship.safetensors"
    whole = delivered.read_bytes()
    with elsa.open_delivery(delivered) as delivery:
        first = delivery.downloads[1]
    device.write_bytes(whole[:first])

    def grow(done: int, total: int) -> None:
        with device.open("ab") as file:
            file.write(whole[file.tell() : file.tell() + 1000])

    if read == "stream":
        arrays = elsa.stream(device, level=1)
        found = dict([next(arrays)])
        grow(0, 0)
        found |= dict(arrays)
    elif read == "extract":
        elsa.extract(device, tmp_path / "out.safetensors", level=1, progress=grow)
        found = elsa.load_level(tmp_path / "out.safetensors")
    elif read == "verify":
        elsa.verify(device, progress=grow)
        found = elsa.open(device).load(1)
    else:
        with elsa.open(device) as file:
            grow(0, 0)
            found = file.load(1)
    assert device.stat().st_size > first
    assert same_bits(dict(found), elsa.open(delivered).load(1))


def test_a_prefix_that_shrinks_is_changed(delivered: Path, tmp_path: Path) -> None:
    device = tmp_path / "device.ship.safetensors"
    device.write_bytes(delivered.read_bytes())
    arrays = elsa.stream(device, level=1)
    next(arrays)
    os.truncate(device, device.stat().st_size - 1)
    with pytest.raises(elsa.InputChanged):
        list(arrays)


def test_two_upgrades_at_once(delivered: Path) -> None:
    with elsa.open_delivery(delivered) as delivery:
        delivery.load(1)
        with ThreadPoolExecutor(4) as pool:
            for done in [pool.submit(delivery.upgrade, "dense") for _ in range(4)]:
                arrays = done.result()
        assert same_bits(arrays, elsa.open(delivered).load())
        with pytest.raises(elsa.InvalidOption, match="level dense is loaded, and 2 is not above"):
            delivery.upgrade(2)


def test_verify_says_first_what_is_downloaded(delivered: Path, tmp_path: Path) -> None:
    whole, device = delivered.read_bytes(), tmp_path / "device.ship.safetensors"
    with elsa.open_delivery(delivered) as delivery:
        sizes = delivery.downloads
    said = {
        sizes[1] - 1: "valid: 0 of 2 levels downloaded",
        sizes[1]: "valid: 1 of 2 levels downloaded",
        sizes[2]: "valid: 2 of 2 levels downloaded",
        sizes["dense"]: "valid: all 2 levels and the dense network downloaded",
    }
    for size, words in said.items():
        device.write_bytes(whole[:size])
        found = CliRunner().invoke(find_command("verify"), [str(device)])
        assert f"{device}: {words}, 6 tensors" in found.output


def test_inspect_says_that_no_level_is_downloaded(delivered: Path, tmp_path: Path) -> None:
    device = tmp_path / "device.ship.safetensors"
    with elsa.open(delivered) as file:
        device.write_bytes(delivered.read_bytes()[: file.downloads[1] - 1])
    found = CliRunner().invoke(find_command("inspect"), [str(device)])
    assert "delivery file, no level downloaded" in " ".join(found.output.split())
