"""Model directories from a server, which cannot be listed: by the list that elsa-ship writes."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
from click.testing import CliRunner
from faulty_server import Server, cut_after, status
from internals import find_command
from safetensors.numpy import save_file

import elsa_format as elsa

LIST = "elsa-files.json"
SIDE = {
    "config.json": b'{"vocab_size": 100,\r\n "name": "\xc3\xa9"}',
    ".gitattributes": b"*.safetensors filter=lfs",
    "tokenizer.model": bytes(range(256)) * 90,
    "1_Pooling/größe #1?.txt": "π".encode(),
    "empty": b"",
}


@pytest.fixture(scope="module", params=["model", "sharded", "variant"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def packed(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    rng = np.random.default_rng(1)
    weights = {f"h.{i}.weight": rng.standard_normal((200, 64)).astype(np.float32) for i in (0, 1)}
    name = "model.fp16.safetensors" if kind == "variant" else "model.safetensors"
    for path, content in SIDE.items():
        (folder / "dense" / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / "dense" / path).write_bytes(content)
    save_file(weights, folder / "dense" / name)
    size = 60_000 if kind == "sharded" else None
    elsa.pack(folder / "dense", folder / "packed", sparsities=[90, 50], max_shard_size=size)
    return folder / "packed"


@pytest.fixture(scope="module")
def ship(packed: Path) -> Path:
    elsa.ship(packed, packed.with_name("ship"))
    return packed.with_name("ship")


def content(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def serve(server: Server, folder: Path, query: str = "") -> str:
    """Serve a directory; returns its URL."""
    for name, raw in content(folder).items():
        server.serve(raw, f"/some%20models/{quote(name)}{query}")
    return f"{server.url}/some%20models/{query}"


def weights_of(names: dict[str, bytes]) -> set[str]:
    return {name for name in names if name.endswith(".safetensors")}


def test_the_list_has_every_file_but_the_weights(ship: Path, kind: str) -> None:
    """ELSA-D-049."""
    found = json.loads((ship / LIST).read_bytes())
    assert found["version"] == "1.0"
    assert found["files"] == {
        name: {"size": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
        for name, raw in SIDE.items()
    }
    assert (
        found["weights"]
        == {
            "model": "model.ship.safetensors",
            "sharded": "model.ship.safetensors.index.json",
            "variant": "model.fp16.ship.safetensors",
        }[kind]
    )


@pytest.mark.parametrize("query", ["", "?token=a%2Fb"])
def test_a_level_and_an_upgrade(
    server: Server, packed: Path, ship: Path, query: str, tmp_path: Path
) -> None:
    url, phone = serve(server, ship, query), tmp_path / "new" / "phone"
    report = elsa.fetch(url, phone, level=1)
    found = content(phone)
    assert found.keys() == content(ship).keys()
    assert all(raw.startswith(found[name]) for name, raw in content(ship).items())
    assert report.size == sum(map(len, found.values()))
    assert report.fetched == server.sent
    for level, wish in ((1, {}), (2, {"upgrade": 2}), ("dense", {"upgrade": "dense"})):
        if wish:
            server.requests.clear()
            server.sent = 0
            again = elsa.fetch(url, phone, **wish)
            assert again.fetched == server.sent
            changed = weights_of(found)
            side = {path for path, _ in server.requests if not path.partition("?")[0].endswith("s")}
            assert side == {p for p in side if LIST in p or ".index.json" in p}  # no file twice
            assert again.fetched < sum(len(content(ship)[name]) for name in changed)
        elsa.extract(phone, tmp_path / f"{level}", level=level)
        elsa.extract(packed, tmp_path / f"{level} expected", level=level)
        assert content(tmp_path / f"{level}") == content(tmp_path / f"{level} expected")
    assert content(phone) == content(ship)
    # What was fetched can be served, and is a directory like the one it came from.
    elsa.fetch(phone, tmp_path / "copy", level="dense")
    assert content(tmp_path / "copy") == content(ship)


def test_the_command(server: Server, ship: Path, tmp_path: Path) -> None:
    words = [serve(server, ship), "--level", "50%", "-o", str(tmp_path / "phone"), "--json"]
    done = CliRunner().invoke(find_command("fetch"), words)
    assert done.exit_code == 0, done.output
    size = sum(map(len, content(tmp_path / "phone").values()))
    found = json.loads(done.stdout)
    assert (found["level"], found["size"], found["fetched"]) == (2, size, server.sent)


def test_the_weights_alone(server: Server, ship: Path, kind: str, tmp_path: Path) -> None:
    """Where the output has the name of a file."""
    name = json.loads((ship / LIST).read_bytes())["weights"]
    elsa.fetch(serve(server, ship), tmp_path / "out" / name, level=1)
    assert content(tmp_path / "out").keys() == weights_of(content(ship)) | {name}


def test_the_budget_is_for_all_files(server: Server, ship: Path, tmp_path: Path) -> None:
    url = serve(server, ship)
    size = elsa.fetch(url, tmp_path / "one", level=1).size
    found = content(tmp_path / "one")
    side = size - sum(len(found[name]) for name in weights_of(found))
    with pytest.raises(elsa.NoSuchLevel, match="level 1 takes"):
        elsa.fetch(url, tmp_path / "two", max_size=side)
    assert not (tmp_path / "two").exists()
    assert elsa.fetch(url, tmp_path / "two", max_size=size).level == 1


def test_what_is_cut_goes_on(
    server: Server, ship: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every file in turn: what was complete is not asked for again."""
    monkeypatch.setenv("ELSA_RETRIES", "0")
    url, phone = serve(server, ship), tmp_path / "phone"
    for path in sorted(server.files, key=lambda path: (path.endswith(".safetensors"), path)):
        served = server.files[path]
        if not served.content:
            continue
        served.faults = [cut_after(len(served.content) // 2)] * 9
        with pytest.raises(elsa.RemoteError, match="broke"):
            elsa.fetch(url, phone, level="dense")
        served.faults = []
        found = content(phone) if phone.exists() else {}
        for name, raw in found.items():
            expected = content(ship)[name]
            assert raw == expected or (name in weights_of(found) and expected.startswith(raw))
    elsa.fetch(url, phone, level="dense")
    assert content(phone) == content(ship)


@pytest.mark.parametrize("kind", ["sharded"], indirect=True)
def test_killed_at_any_moment(server: Server, ship: Path, tmp_path: Path) -> None:
    """kill -9 leaves what the next call continues, and no level without its side files."""
    script = "import sys, elsa_format as e; e.fetch(sys.argv[1], sys.argv[2], level='dense')"
    url, phone = serve(server, ship), tmp_path / "phone"
    expected, sizes = content(ship), list[int]()
    for path, served in server.files.items():

        def wait(request: Any) -> None:
            reached.append(path)  # noqa: B023 - used in this round
            time.sleep(0.5)

        reached: list[str] = []
        served.faults = [wait]
        process = subprocess.Popen([sys.executable, "-c", script, url, str(phone)])
        until = time.monotonic() + 30
        while time.monotonic() < until and process.poll() is None and not reached:
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.wait()
        served.faults = []
        found = content(phone) if phone.exists() else {}
        sizes.append(sum(map(len, found.values())))
        assert all(expected[name].startswith(raw) for name, raw in found.items())
        whole = {name for name, raw in found.items() if raw == expected[name]}
        assert found.keys() - whole <= weights_of(found)
    assert sizes == sorted(sizes)
    elsa.fetch(url, phone, level="dense")
    assert content(phone) == expected


def test_nothing_is_left_of_a_wrong_level(server: Server, ship: Path, tmp_path: Path) -> None:
    for source in (serve(server, ship), ship):
        with pytest.raises(elsa.NoSuchLevel):
            elsa.fetch(source, tmp_path / "new" / "out", level=9)
    assert not (tmp_path / "new").exists()


def test_a_file_that_is_not_as_listed(server: Server, ship: Path, tmp_path: Path) -> None:
    """ELSA-D-048."""
    url, phone = serve(server, ship), tmp_path / "phone"
    served = server.files["/some%20models/config.json"]
    good = served.content
    for wrong in (good[:-1] + b"]", good[:-1], good + b"\n"):
        served.content = wrong
        with pytest.raises(elsa.ChecksumMismatch, match=r"config.json: .* as elsa-files.json"):
            elsa.fetch(url, phone, level=1)
        assert not (phone / "config.json").exists()
        with pytest.raises((elsa.FormatError, OSError)):  # no level is there without it
            elsa.extract(phone, tmp_path / "level", level=1)
    served.content = good
    elsa.fetch(url, phone, level=1)
    assert (phone / "config.json").read_bytes() == good


def test_what_is_there_is_replaced_only_by_force(
    server: Server, ship: Path, tmp_path: Path
) -> None:
    url, phone = serve(server, ship), tmp_path / "phone"
    elsa.fetch(url, phone, level=1)
    (phone / "config.json").write_bytes(b"mine")
    before = content(phone)
    with pytest.raises(elsa.OutputExists, match=r"config\.json: is another file than http"):
        elsa.fetch(url, phone, upgrade=2)
    assert content(phone) == before
    elsa.fetch(url, phone, upgrade=2, force=True)
    assert (phone / "config.json").read_bytes() == SIDE["config.json"]


def test_other_weights_in_the_directory(server: Server, ship: Path, tmp_path: Path) -> None:
    phone = tmp_path / "phone"
    phone.mkdir()
    (phone / "model.safetensors").write_bytes(b"others")
    with pytest.raises(elsa.OutputExists, match="is there already"):
        elsa.fetch(serve(server, ship), phone, level=1)
    assert content(phone) == {"model.safetensors": b"others"}


def test_a_server_without_a_list(server: Server, ship: Path, tmp_path: Path) -> None:
    url = serve(server, ship)
    server.files.pop(f"/some%20models/{LIST}")
    with pytest.raises(elsa.RemoteError, match=r"files\.json: .*404.*give the URL of the deliv"):
        elsa.fetch(url, tmp_path / "out", level=1)
    server.serve(b"", f"/some%20models/{LIST}", faults=[status(403)])
    with pytest.raises(elsa.RemoteError, match=r"403 Forbidden; .*writes this manifest"):
        elsa.fetch(url, tmp_path / "out", level=1)
    assert not (tmp_path / "out").exists()


def test_a_local_directory_needs_no_list(ship: Path, tmp_path: Path) -> None:
    elsa.fetch(ship, tmp_path / "copy", level="dense")
    (tmp_path / "copy" / LIST).unlink()
    elsa.fetch(tmp_path / "copy", tmp_path / "again", level="dense")
    assert content(tmp_path / "again") == content(ship)


def test_the_list_stays_with_its_directory(packed: Path, ship: Path, tmp_path: Path) -> None:
    """What is made of a directory has other files."""
    elsa.extract(ship, tmp_path / "level", level=1)
    assert not (tmp_path / "level" / LIST).exists()
    (packed / LIST).write_bytes(b"an old one")
    try:
        elsa.ship(packed, tmp_path / "ship")
    finally:
        (packed / LIST).unlink()
    assert content(tmp_path / "ship") == content(ship)


# --- Hostile lists --------------------------------------------------------------------------------

ONE = {"size": 1, "sha256": hashlib.sha256(b"x").hexdigest()}


def having(**changes: Any) -> Callable[[dict[str, Any]], bytes]:
    return lambda listing: json.dumps(listing | changes).encode()


def with_file(name: str, entry: Any = ONE) -> Callable[[dict[str, Any]], bytes]:
    return lambda listing: json.dumps(listing | {"files": {name: entry}}).encode()


NAMES = [
    "../x",
    "/x",
    "a/../../x",
    "a\\..\\x",
    "c:x",
    "",
    ".",
    "a//x",
    "a/",
    ".git/x",
    "\0",
    "a/..",
]
HOSTILE = [
    *((f"name {name!r}", with_file(name), elsa.UnsafePath) for name in [*NAMES, LIST]),
    ("not JSON", lambda _: b"<html>", elsa.InvalidJson),
    ("not UTF-8", lambda _: b'{"\xff": 1}', elsa.InvalidJson),
    ("an array", lambda _: b"[]", elsa.InvalidJson),
    ("a key twice", lambda _: b'{"weights": "a", "weights": "b"}', elsa.DuplicateKey),
    ("no version", having(version=None), elsa.InvalidIndex),
    ("version 2", having(version="2.0"), elsa.UnsupportedVersion),
    ("version 1", having(version=1), elsa.InvalidIndex),
    ("no weights", having(weights=None), elsa.InvalidIndex),
    ("weights elsewhere", having(weights="../model.ship.safetensors"), elsa.UnsafePath),
    ("weights in a folder", having(weights="a/model.ship.safetensors"), elsa.UnsafePath),
    ("files in an array", having(files=["config.json"]), elsa.InvalidIndex),
    ("no size", with_file("x", {"sha256": ONE["sha256"]}), elsa.InvalidIndex),
    ("a size of 1.5", with_file("x", ONE | {"size": 1.5}), elsa.InvalidIndex),
    ("a size of true", with_file("x", ONE | {"size": True}), elsa.InvalidIndex),
    ("a size below 0", with_file("x", ONE | {"size": -1}), elsa.InvalidIndex),
    ("an entry of 1", with_file("x", 1), elsa.InvalidIndex),
    ("half a sha256", with_file("x", ONE | {"sha256": "ab"}), elsa.InvalidIndex),
    ("too large", lambda _: b" " * ((16 << 20) + 1), elsa.InvalidIndex),
]


@pytest.mark.parametrize("kind", ["model"], indirect=True)
@pytest.mark.parametrize(("change", "error"), [h[1:] for h in HOSTILE], ids=[h[0] for h in HOSTILE])
def test_hostile_lists(
    server: Server, ship: Path, change: Any, error: type[elsa.ElsaError], tmp_path: Path
) -> None:
    url = serve(server, ship)
    served = server.files[f"/some%20models/{LIST}"]
    served.content = change(json.loads(served.content))
    with pytest.raises(error, match=LIST):
        elsa.fetch(url, tmp_path / "a" / "out", level=1)
    assert not any(tmp_path.iterdir())


def test_weights_among_the_side_files(server: Server, ship: Path, tmp_path: Path) -> None:
    """A side file must not be written over weights, nor the other way round."""
    url = serve(server, ship)
    served = server.files[f"/some%20models/{LIST}"]
    listing = json.loads(served.content)
    for name in weights_of(content(ship)) | {listing["weights"]}:
        served.content = with_file(name)(listing)
        with pytest.raises(elsa.InvalidIndex, match="weights"):
            elsa.fetch(url, tmp_path / "out", level=1)
    assert not (tmp_path / "out").exists()


def test_links_that_leave_the_output(server: Server, ship: Path, tmp_path: Path) -> None:
    (tmp_path / "phone").mkdir()
    (tmp_path / "elsewhere").mkdir()
    os.symlink(tmp_path / "elsewhere", tmp_path / "phone" / "1_Pooling")
    with pytest.raises(elsa.UnsafePath, match="leaves the directory"):
        elsa.fetch(serve(server, ship), tmp_path / "phone", level=1)
    assert content(tmp_path / "phone") == {}


def test_names_that_cannot_be_listed(packed: Path, tmp_path: Path) -> None:
    odd = packed / "a:b"
    odd.write_bytes(b"")
    try:
        with pytest.raises(elsa.InvalidOption, match="a:b: such a name cannot be listed"):
            elsa.ship(packed, tmp_path / "out")
    finally:
        odd.unlink()
    assert not (tmp_path / "out").exists()
